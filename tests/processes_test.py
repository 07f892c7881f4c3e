"""Roles with several processes, on loopback: the same results as with one, and no process left when one dies."""

import json
import os
import signal
import socket
import subprocess
import sys

import numpy as np
import pytest

from areal_jax.launch.cluster import Cluster
from areal_jax.transport.weights import OrbaxChannel
from areal_jax.types import PolicySnapshot, UserError
from tests.helpers import ROOT, environment, tiny_model, wait_until


def free_address():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{free.getsockname()[1]}"


def start_samplers(directory, processes, axis="tensor", reports=80):
    model, channel = tiny_model(), OrbaxChannel(directory / "weights")
    for version in range(3):
        channel.publish(PolicySnapshot(version, model.init_params(version)))
    address = free_address()
    return [
        subprocess.Popen(
            [sys.executable, "-m", "tests.sampler_process", address, str(processes), str(i), axis,
             str(directory), str(reports)],
            cwd=ROOT, env=environment(), stderr=subprocess.PIPE, text=True,
        )
        for i in range(processes)
    ]  # fmt: skip


def ended(processes):
    """The exit code and what was said, of each."""
    said = [p.communicate(timeout=120)[1] for p in processes]
    return [(p.returncode, text) for p, text in zip(processes, said, strict=True)]


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
