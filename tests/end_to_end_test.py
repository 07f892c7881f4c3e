"""Whole runs of a shrunken preset in both topologies, by the command that users type; and how runs fail."""

import contextlib
import functools
import json
import os
import pathlib
import re
import signal
import socket
import subprocess
import sys

import numpy as np
import orbax.checkpoint as ocp
import pytest

from areal_jax.metrics import read_metrics
from tests.helpers import ROOT, environment, main_command, run_main, wait_until

CONFIG = "--config=tests/small_config.py"
SUMMARY_KEYS = {
    "heldout_before", "heldout_after", "response_length_before", "response_length_after", "steps", "seconds_total",
    "seconds_warm_start", "trained_tokens_per_second", "generated_tokens_per_second", "trainer_busy", "sampler_busy",
    "staleness_mean", "staleness_max", "ledger", "compiles_after_warmup",
}  # fmt: skip
FILES = ("config.json", "metrics.jsonl", "samples.jsonl", "learning_curve.png", "summary.json", "tensorboard")


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return f"--config.data.cache_dir={tmp_path_factory.mktemp('cache')}"


def run_small(workdir, cache, *overrides, config=CONFIG):
    return run_main(config, f"--config.workdir={workdir}", cache, *overrides)


def summary_of(workdir):
    return json.loads((workdir / "summary.json").read_text())


def parameters(workdir):
    """The arrays of the newest checkpoint."""
    newest = max(int(p.name) for p in (workdir / "checkpoints").iterdir() if p.name.isdigit())
    tree = ocp.PyTreeCheckpointer().restore(workdir / "checkpoints" / str(newest) / "state")
    return tree["params"]


def flatten(tree, prefix=()):
    if isinstance(tree, dict):
        return {k: v for name, sub in tree.items() for k, v in flatten(sub, (*prefix, str(name))).items()}
    return {prefix: np.asarray(tree)}


def processes_of(workdir):
    """Processes whose command line names the workdir."""
    found = []
    for path in pathlib.Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if str(workdir).encode() in (path / "cmdline").read_bytes() and int(path.name) != os.getpid():
                found.append(int(path.name))
    return found


def assert_one_clear_message(done, *words):
    assert done.returncode == 1, done.stderr
    message = done.stderr.strip()
    assert "Traceback" not in message
    assert message.count("areal_jax: error:") == 1
    for word in words:
        assert word in message


def check_outputs(workdir):
    summary = summary_of(workdir)
    assert summary.keys() >= SUMMARY_KEYS
    assert summary["compiles_after_warmup"] == 0
    assert summary["ledger"].pop("issued") == sum(summary["ledger"].values())
    for name in FILES:
        assert (workdir / name).exists(), name
    records = read_metrics(workdir)
    steps = [r for r in records if r["kind"] == "step"]
    assert [r["version"] for r in steps] == [1, 2, 3]
    for r in steps:
        states = ("leased", "finished", "queued", "trained", "dropped")
        assert r["ledger/issued"] == sum(r[f"ledger/{s}"] for s in states)
        assert r["ledger/trained"] == 16 * r["version"]
        assert r["optimizer/grad_norm"] > 0  # else nothing below says anything about training
    evaluations = [r["version"] for r in records if r["kind"] == "evaluation"]
    assert evaluations == [0, 2, 3]
    assert all(json.loads(line)["versions"][0] >= 0 for line in (workdir / "samples.jsonl").read_text().splitlines())
    return summary, steps


def test_colocated_runs_twice_bit_identical(tmp_path, cache):
    timeless = []
    for name in ("a", "b"):
        done = run_small(tmp_path / name, cache, "--config.launch.kind=colocated")
        assert done.returncode == 0, done.stderr
        assert "Three held-out problems" in done.stdout
        check_outputs(tmp_path / name)
        timed = ("seconds", "throughput/", "busy/", "rollout/swap_pause", "staleness/queue_age_seconds")
        records = [
            {k: v for k, v in r.items() if not k.startswith(timed)}
            for r in read_metrics(tmp_path / name)
            if r["kind"] in ("step", "evaluation")
        ]
        timeless.append((records, (tmp_path / name / "samples.jsonl").read_text()))
    assert timeless[0] == timeless[1]
    first, second = (flatten(parameters(tmp_path / n)) for n in ("a", "b"))
    for key, value in first.items():
        np.testing.assert_array_equal(value, second[key])


def test_staleness_zero_is_synchronous_training_bit_for_bit(tmp_path, cache):
    overrides = [cache, "--config.optimizer.learning_rate=1e-3"]
    kind = ["--config.rollout.max_staleness=0", "--config.launch.kind=colocated"]
    done = run_main(CONFIG, *overrides, *kind, f"--config.workdir={tmp_path / 'run'}")
    assert done.returncode == 0, done.stderr
    output = tmp_path / "reference.npz"
    command = [sys.executable, "-m", "tests.synchronous", str(output), CONFIG, *overrides]
    subprocess.run(command, cwd=ROOT, env=environment(), check=True, timeout=180)
    assert summary_of(tmp_path / "run")["staleness_max"] == 0
    reference = sorted(np.load(output).values(), key=lambda x: (x.shape, x.tobytes()))
    ours = sorted(flatten(parameters(tmp_path / "run")).values(), key=lambda x: (x.shape, x.tobytes()))
    assert len(reference) == len(ours)
    for a, b in zip(ours, reference, strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_run_that_has_nothing_to_train_on_comes_to_its_end(tmp_path, cache):
    """No answer is right, so that every group is dropped from the loss: nothing is learnt, and that is reported."""
    nothing = ("--config.reward.name=exact_answer", "--config.rollout.zero_variance_groups=drop")
    done = run_small(tmp_path / "run", cache, "--config.launch.kind=colocated", *nothing)
    assert done.returncode == 0, done.stderr
    steps = [r for r in read_metrics(tmp_path / "run") if r["kind"] == "step"]
    assert [r["tokens/trained"] for r in steps] == [0, 0, 0]
    assert "nothing was learnt" in done.stdout
    assert np.isfinite(summary_of(tmp_path / "run")["staleness_mean"])


def test_local_run_with_two_samplers(tmp_path, cache):
    bound = "--config.rollout.max_staleness=1"
    done = run_small(tmp_path / "run", cache, bound, "--config.launch.kind=local", "--config.launch.samplers=2")
    assert done.returncode == 0, done.stderr
    _, steps = check_outputs(tmp_path / "run")
    for r in steps:  # Eq. 3, from the run's own record: 16 samples a batch
        assert (r["ledger/issued"] - 1) // 16 <= r["version"] + 1
    assert "learning_curve.png" in done.stdout
    assert (tmp_path / "run" / "logs" / "sampler-1.log").exists()
    assert not processes_of(tmp_path)


def test_local_at_staleness_zero_is_on_policy(tmp_path, cache):
    done = run_small(tmp_path / "run", cache, "--config.rollout.max_staleness=0")
    assert done.returncode == 0, done.stderr
    summary, _ = check_outputs(tmp_path / "run")
    assert summary["staleness_max"] == 0


def test_injected_staleness_is_what_is_measured(tmp_path, cache):
    options = ("--config.rollout.max_staleness=0", "--config.rollout.injected_staleness=2", "--config.trainer.steps=6")
    for kind in ("colocated", "local"):
        done = run_small(tmp_path / kind, cache, *options, f"--config.launch.kind={kind}")
        assert done.returncode == 0, done.stderr
        for r in (r for r in read_metrics(tmp_path / kind) if r["kind"] == "step"):
            age = min(2, r["version"] - 1)  # before its step the trainer was one version younger
            assert r["staleness/hist"] == [0] * age + [int(r["tokens/trained"])]
    (tmp_path / "colocated" / "summary.json").unlink()
    again = run_small(tmp_path / "colocated", cache, *options, "--config.launch.kind=colocated")
    assert_one_clear_message(again, "injected_staleness cannot go on")


def test_static_batches_draw_the_same_samples_with_emptier_slots(tmp_path, cache):
    """Synchronous, 16 samples a batch through 8 slots: the samples do not depend on how slots are filled."""
    found = {}
    for batching in ("continuous", "static"):
        done = run_small(
            tmp_path / batching, cache, "--config.launch.kind=colocated", "--config.rollout.max_staleness=0",
            "--config.rollout.slots=8", f"--config.rollout.batching={batching}",
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        steps = [r for r in read_metrics(tmp_path / batching) if r["kind"] == "step"]
        found[batching] = (
            [(r["reward/mean"], r["length/mean"], r["staleness/token_max"]) for r in steps],
            summary_of(tmp_path / batching)["slots_useful"],
        )
    assert found["static"][0][0] == found["continuous"][0][0]
    assert found["static"][1] < found["continuous"][1]
    spans = [json.loads(line) for line in (tmp_path / "static" / "timeline.jsonl").read_text().splitlines()]
    assert {s["role"] for s in spans} == {"trainer", "colocated"}
    assert all(s["start"] <= s["end"] for s in spans)


def test_roles_started_by_hand(tmp_path, cache):
    common = (CONFIG, f"--config.workdir={tmp_path / 'run'}", cache)
    start = functools.partial(subprocess.Popen, cwd=ROOT, env=environment(), stderr=subprocess.PIPE, text=True)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    address = f"--config.transport.address=tcp://127.0.0.1:{port}"
    trainer = start(main_command(*common, "--role=trainer", f"--config.transport.port={port}"))
    sampler = start(main_command(*common, "--role=sampler", address))
    for process in (trainer, sampler):
        _, errors = process.communicate(timeout=120)
        assert process.returncode == 0, errors
    check_outputs(tmp_path / "run")


@contextlib.contextmanager
def running(workdir, cache, *overrides):
    """A local run under way, after its first step; killed at the end."""
    overrides = ("--config.trainer.steps=400", "--config.evaluation.every_steps=0", *overrides)
    command = main_command(CONFIG, f"--config.workdir={workdir}", cache, *overrides)
    process = subprocess.Popen(
        command, cwd=ROOT, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        started = wait_until(lambda: any(r["kind"] == "step" for r in read_metrics(workdir)))
        assert started, process.communicate()[1] if process.poll() is not None else "no step within a minute"
        yield process
    finally:
        process.kill()
        process.communicate()
        for pid in processes_of(workdir):
            os.kill(pid, signal.SIGKILL)


def pid_of(workdir, role):
    (pid,) = [p for p in processes_of(workdir) if f"--role={role}" in pathlib.Path(f"/proc/{p}/cmdline").read_text()]
    return pid


def newest_version(workdir):
    return max((r["version"] for r in read_metrics(workdir) if r["kind"] == "step"), default=0)


def test_a_killed_sampler_is_started_again_and_nothing_is_lost(tmp_path, cache):
    with running(tmp_path / "run", cache, "--config.trainer.steps=100000") as process:
        victim = pid_of(tmp_path / "run", "sampler")
        os.kill(victim, signal.SIGKILL)
        assert wait_until(lambda: any("--role=sampler" in pathlib.Path(f"/proc/{p}/cmdline").read_text()
                                      for p in processes_of(tmp_path / "run") if p != victim))  # fmt: skip
        reached = newest_version(tmp_path / "run")
        assert wait_until(lambda: newest_version(tmp_path / "run") > reached + 5)
        assert process.poll() is None
        last = [r for r in read_metrics(tmp_path / "run") if r["kind"] == "step"][-1]
        assert last["ledger/trained"] == 16 * last["version"]


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_no_orphans_when_the_parent_goes(tmp_path, cache, how):
    with running(tmp_path / "run", cache, "--config.trainer.steps=100000") as process:
        assert len(processes_of(tmp_path / "run")) == 3
        process.send_signal(how)
        _, errors = process.communicate(timeout=30)
        assert process.returncode == (130 if how == signal.SIGINT else -signal.SIGKILL)
        assert "Traceback" not in errors
        assert wait_until(lambda: not processes_of(tmp_path / "run"), 10)


def test_a_killed_run_goes_on_from_its_checkpoint(tmp_path, cache):
    steps = "--config.trainer.steps=60"
    with running(tmp_path / "run", cache, steps) as process:
        assert wait_until(lambda: newest_version(tmp_path / "run") >= 4)
        process.kill()
        process.wait()
        assert wait_until(lambda: not processes_of(tmp_path / "run"), 10)
    assert not (tmp_path / "run" / "summary.json").exists(), "the run was over before it was killed"
    done = run_small(tmp_path / "run", cache, steps, "--config.evaluation.every_steps=0")
    assert done.returncode == 0, done.stderr
    assert "resuming after step" in done.stdout
    steps_seen = [r["version"] for r in read_metrics(tmp_path / "run") if r["kind"] == "step"]
    assert steps_seen == list(range(1, 61))
    ledger = summary_of(tmp_path / "run")["ledger"]
    assert ledger["trained"] == 16 * 60


def test_a_killed_run_with_a_critic_and_a_reference_goes_on(tmp_path, cache):
    """A reference taken anew from the checkpoint would be the policy itself: the KL to it would begin at 0 again."""
    changes = {
        "trainer.steps": 60, "trainer.minibatches": 1, "critic.kind": "network", "advantage.name": "gae",
        "loss.name": "ppo", "loss.kl_coefficient": 0.01, "optimizer.scale_by_ess": True,
        "optimizer.learning_rate": 1e-3, "rollout.zero_variance_groups": "refill",
    }  # fmt: skip
    options = [f"--config.{key}={value}" for key, value in changes.items()]
    with running(tmp_path / "run", cache, *options) as process:
        assert wait_until(lambda: newest_version(tmp_path / "run") >= 12)
        process.kill()
        process.wait()
        assert wait_until(lambda: not processes_of(tmp_path / "run"), 10)
    done = run_small(tmp_path / "run", cache, *options, "--config.evaluation.every_steps=0")
    assert done.returncode == 0, done.stderr
    resumed = int(re.search(r"resuming after step (\d+)", done.stdout)[1])
    assert resumed >= 10
    steps = {r["version"]: r for r in read_metrics(tmp_path / "run") if r["kind"] == "step"}
    kl = [steps[v]["loss/reference_kl"] for v in range(1, 61)]
    assert kl[0] < 1e-6
    assert kl[resumed] > max(10 * kl[0], kl[resumed - 1] / 2)
    assert steps[60]["optimizer/step_scale_min"] <= 1
    assert steps[60]["value/explained_variance"] <= 1
    assert summary_of(tmp_path / "run")["ledger"]["trained"] == 16 * 60


def test_a_workdir_of_another_run_and_a_finished_one_are_refused(tmp_path, cache):
    workdir = tmp_path / "run"
    done = run_small(workdir, cache, "--config.launch.kind=colocated", "--config.trainer.steps=1")
    assert done.returncode == 0, done.stderr
    assert_one_clear_message(
        run_small(workdir, cache, "--config.trainer.steps=2"), "config.trainer.steps is 1 there and 2"
    )
    assert_one_clear_message(run_small(workdir, cache, "--config.trainer.steps=1"), "finished run")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.txt").write_text("precious")
    assert_one_clear_message(run_small(tmp_path / "other", cache), "is not empty and holds no run")


def test_two_runs_in_one_workdir_at_once_are_refused(tmp_path, cache):
    with running(tmp_path / "run", cache) as process:
        again = run_small(tmp_path / "run", cache, "--config.trainer.steps=400", "--config.evaluation.every_steps=0")
        assert_one_clear_message(again, "a run is under way")
        assert process.poll() is None


def test_a_port_in_use(tmp_path, cache):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = run_small(tmp_path / "run", cache, f"--config.transport.port={port}")
    assert_one_clear_message(done, f"cannot listen on tcp://127.0.0.1:{port}", "transport.port")
    assert not processes_of(tmp_path)


def test_a_data_file_cut_short(tmp_path, cache):
    own = f"--config.data.cache_dir={tmp_path / 'cache'}"
    done = run_small(tmp_path / "a", own, "--config.launch.kind=colocated", "--config.trainer.steps=1")
    assert done.returncode == 0, done.stderr
    (file,) = (tmp_path / "cache").rglob("*train.array_record*")
    file.write_bytes(file.read_bytes()[:100_000])
    done = run_small(tmp_path / "b", own, "--config.launch.kind=colocated")
    assert_one_clear_message(done, "cannot be read", "delete that directory")


def test_a_sampler_that_raises_at_start(tmp_path, cache):
    done = run_small(tmp_path / "run", cache, "--config.mesh.sampler.tensor=2")
    assert_one_clear_message(done, "sampler-0 failed", "does not fit 1 device", "sampler-0.log")
    assert not processes_of(tmp_path)


def test_a_loss_that_is_not_finite(tmp_path, cache):
    done = run_small(tmp_path / "run", cache, "--config.optimizer.learning_rate=1e38")
    assert_one_clear_message(done, "trainer failed", "the loss is", "optimizer.learning_rate")
    assert not processes_of(tmp_path)


@pytest.mark.parametrize("kind", ["colocated", "local"])
def test_a_reward_that_raises(tmp_path, cache, kind):
    no_warm_start = "--config.warm_start.enabled=False"  # its validation would meet the reward first
    done = run_small(
        tmp_path / "run", cache, f"--config.launch.kind={kind}", no_warm_start, config="--config=tests/broken_reward.py"
    )
    assert_one_clear_message(done, "ZeroDivisionError: the grader divided by zero")
    assert not processes_of(tmp_path)


def test_debug_shows_the_frames(tmp_path, cache):
    colocated = ("--config.launch.kind=colocated", "--config.mesh.trainer.data=2")
    done = run_small(tmp_path / "run", cache, *colocated, "--debug")
    assert done.returncode == 1
    assert "in make_mesh" in done.stderr
