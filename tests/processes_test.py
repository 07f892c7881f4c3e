"""Roles with several processes, on loopback: the same results as with one, and no process left when one dies."""

import json
import os
import signal
import socket
import subprocess
import sys

import jax
import numpy as np
import pytest

from areal_jax.launch.cluster import Cluster
from areal_jax.transport.broadcast import Channel
from areal_jax.transport.weights import OrbaxChannel
from areal_jax.types import PolicySnapshot, UserError
from tests.helpers import ROOT, environment, tiny_model, wait_until


def free_address():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{free.getsockname()[1]}"


def start(module, arguments):
    command = [sys.executable, "-m", module, *arguments]
    return subprocess.Popen(command, cwd=ROOT, env=environment(), stderr=subprocess.PIPE, text=True)


def start_samplers(directory, processes, axis="tensor", reports=80):
    model, channel = tiny_model(), OrbaxChannel(directory / "weights")
    for version in range(3):
        channel.publish(PolicySnapshot(version, model.init_params(version)))
    address = free_address()
    arguments = [[address, str(processes), str(i), axis, str(directory), str(reports)] for i in range(processes)]
    return [start("tests.sampler_process", a) for a in arguments]


def ended(processes):
    """The exit code and what was said, of each."""
    said = [p.communicate(timeout=120)[1] for p in processes]
    return [(p.returncode, text) for p, text in zip(processes, said, strict=True)]


def test_a_channel_waits_for_all_its_receivers_and_notices_one_that_goes():
    sender, others = Channel("127.0.0.1"), [Channel(None) for _ in range(3)]
    for other in others[:2]:
        other.connect("127.0.0.1", sender.port)
    with pytest.raises(ConnectionError, match="1 of 3 processes have not come"):
        sender.await_others(3, timeout_seconds=1.0)
    others[2].connect("127.0.0.1", sender.port)
    sender.await_others(1, timeout_seconds=20.0)
    for data in (b"one", b"two"):
        sender.send(data)
    assert [[other.receive() for _ in range(2)] for other in others] == [[b"one", b"two"]] * 3
    others[0].close()

    def lost():
        try:
            sender.send(b"three")
        except ConnectionError:
            return True
        return False

    assert wait_until(lost, seconds=20.0)
    sender.close()
    heard = []

    def hear_the_rest():
        while True:
            heard.append(others[1].receive())

    with pytest.raises(ConnectionError, match="process 0 has ended"):
        hear_the_rest()
    assert set(heard) <= {b"three"}
    others[1].close()
    others[2].close()


@pytest.mark.parametrize("axis", ["data", "tensor"])
def test_a_sampler_of_two_processes_draws_what_one_draws_through_swaps_and_an_evaluation(tmp_path, axis):
    found = {}
    for n in (1, 2):
        for code, said in ended(start_samplers(tmp_path / str(n), n, axis)):
            assert code == 0, said
        found[n] = json.loads((tmp_path / str(n) / "reported.json").read_text())
    assert len(found[1]) == 10 * 4 + 2
    assert {v for _, versions, _ in found[1].values() for v in versions} == {-1, 0, 1, 2}
    assert any(len(set(versions)) > 2 for _, versions, _ in found[1].values())  # weights swapped inside a sample
    assert found[2].keys() == found[1].keys()
    for i, (tokens, versions, logprobs) in found[1].items():
        assert found[2][i][:2] == [tokens, versions]
        np.testing.assert_allclose(found[2][i][2], logprobs, atol=1e-5)


@pytest.mark.parametrize("victim", [0, 1])
def test_when_one_process_of_a_sampler_dies_the_other_ends(tmp_path, victim):
    processes = start_samplers(tmp_path, 2, reports=10**9)
    try:
        assert wait_until(lambda: all((tmp_path / f"{i}.started").exists() for i in range(2)))
        os.kill(processes[victim].pid, signal.SIGKILL)
        other = processes[1 - victim]
        assert wait_until(lambda: other.poll() is not None)
        assert other.returncode != 0
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def test_a_trainer_of_two_processes_takes_the_steps_that_one_takes(tmp_path):
    """With a critic, whose values are gathered from all processes, and a reference."""
    found, metrics = {}, {}
    for n in (1, 2):
        directory, address = tmp_path / str(n), free_address()
        directory.mkdir()
        arguments = [[address, str(n), str(i), str(directory)] for i in range(n)]
        for code, said in ended([start("tests.trainer_process", a) for a in arguments]):
            assert code == 0, said
        model = tiny_model()
        found[n] = [OrbaxChannel(directory / "weights").load(v, model.abstract_params).params for v in (1, 2)]
        metrics[n] = json.loads((directory / "metrics.json").read_text())
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7), found[2], found[1])
    assert metrics[2] == [pytest.approx(m, rel=1e-4, abs=1e-5) for m in metrics[1]]
    changed = jax.tree.map(lambda a, b: bool((a != b).any()), *found[2])
    assert any(jax.tree.leaves(changed))


def test_processes_with_different_configs_are_refused(tmp_path):
    common = ["--config=tests/small_config.py", f"--config.workdir={tmp_path / 'run'}", "--role=trainer"]
    common += [f"--config.data.cache_dir={tmp_path}", f"--coordinator_address={free_address()}", "--num_processes=2"]
    common += ["--config.mesh.trainer.data=2"]
    rates = ["--config.optimizer.learning_rate=1e-3", "--config.optimizer.learning_rate=1e-4"]
    arguments = [[*common, rate, f"--process_id={i}"] for i, rate in enumerate(rates)]
    (code, _), (other, said) = ended([start("areal_jax.main", a) for a in arguments])
    assert code != 0
    assert other == 1
    assert "optimizer.learning_rate is 0.0001 here and 0.001 in process 0" in said


def test_a_run_with_two_processes_for_each_role(tmp_path):
    port = free_address().rpartition(":")[2]
    common = ["--config=tests/small_config.py", f"--config.workdir={tmp_path / 'run'}"]
    common += [f"--config.data.cache_dir={tmp_path / 'cache'}", "--config.mesh.trainer.data=1"]
    common += ["--config.mesh.trainer.fsdp=2", "--config.mesh.sampler.tensor=2", "--config.mesh.sampler.data=1"]
    roles = {"trainer": f"--config.transport.port={port}"}
    roles["sampler"] = f"--config.transport.address=tcp://127.0.0.1:{port}"
    processes = []
    for role, where in roles.items():
        cluster = [f"--role={role}", f"--coordinator_address={free_address()}", "--num_processes=2"]
        processes += [start("areal_jax.main", [*common, where, *cluster, f"--process_id={i}"]) for i in range(2)]
    for code, said in ended(processes):
        assert code == 0, said
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["ledger"]["trained"] == 3 * 16
    assert summary["compiles_after_warmup"] == 0
    assert sorted(p.name for p in (tmp_path / "run" / "checkpoints").iterdir()) == ["2", "3"]


@pytest.mark.parametrize(
    ("role", "cluster", "named"),
    [
        ("sampler", Cluster("", 2, 0), "coordinator_address"),
        ("sampler", Cluster("host", 2, 0), "HOST:PORT"),
        ("sampler", Cluster("host:1", 2, 2), "process_id is 2"),
        ("sampler", Cluster("host:1", 1, 0), "set both, or neither"),
        ("", Cluster("host:1", 2, 0), "--role is not set"),
    ],
)
def test_what_does_not_go_together_is_refused(role, cluster, named):
    with pytest.raises(UserError, match=named):
        cluster.check(role)
