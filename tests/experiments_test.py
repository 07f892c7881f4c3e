"""The sweep's own logic, with a stand-in for the runs: killed and continued, failing cells, checks that can fail."""

import importlib
import json
import re
import shlex
import shutil
import sys

import pytest

from areal_jax.workdir import lock
from experiments import common, staleness_sweep, straggler
from experiments.staleness_sweep import Cell
from tests.helpers import ROOT


class Begun(BaseException):
    """A run was about to begin."""


def fake_run(calls, fail=(), interrupt_at=None):
    """Writes what a run leaves, determined by its overrides; a finished one is only read, as by `common.run_main`."""

    def run_main(workdir, config, overrides, place=None):
        summary = workdir / "summary.json"
        if summary.exists():
            return json.loads(summary.read_text())
        shutil.rmtree(workdir, ignore_errors=True)
        calls.append(workdir.name)
        if len(calls) == interrupt_at:
            workdir.mkdir(parents=True)
            (workdir / "metrics.jsonl").write_text('{"kind": "step", "version": 1}\n{"cut')
            raise KeyboardInterrupt
        if workdir.name in fail:
            raise RuntimeError("the reward divided by zero")
        eta, seed = overrides["rollout.injected_staleness"], overrides["seed"]
        workdir.mkdir(parents=True)
        records = []
        for version in (1, 2, 3):
            age = min(eta, version - 1)
            counts = {"ledger/issued": 16 * version, "ledger/dropped": 0, "ledger/trained": 16 * version}
            counts |= {"seconds": float(version), "staleness/hist": [0] * age + [50], "staleness/started_ahead": 0}
            records.append({"kind": "step", "version": version, **counts})
        accuracy = {"heldout/sampled_accuracy": 0.9 - 0.1 * eta - 0.01 * seed, "heldout/sampled_standard_error": 0.01}
        records.append({"kind": "evaluation", "version": 3, "seconds": 1.0, "heldout/greedy_accuracy": 1.0, **accuracy})
        (workdir / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
        names = (*staleness_sweep.COLUMNS, *staleness_sweep.TIMES)
        summary.write_text(json.dumps(dict.fromkeys(names, 0.5) | {"heldout_after": 0.9 - 0.1 * eta - 0.01 * seed}))
        return json.loads(summary.read_text())

    return run_main


def sweep(monkeypatch, tmp_path, name, run_main, *more):
    monkeypatch.setattr(common, "run_main", run_main)
    arguments = ["--mode=injected", "--etas", "0", "2", "--objectives", "ppo", "reinforce", "--seeds", "0", "1"]
    places = ["--output", str(tmp_path / name / "out"), "--runs", str(tmp_path / name / "runs")]
    monkeypatch.setattr(sys, "argv", ["staleness_sweep", *arguments, *places, *more])
    staleness_sweep.main()
    return {f.name: f.read_text() for f in (tmp_path / name / "out").iterdir() if f.suffix in (".csv", ".md")}


def test_a_sweep_that_was_killed_goes_on_to_the_same_result(monkeypatch, tmp_path):
    whole = sweep(monkeypatch, tmp_path, "whole", fake_run([]))
    first, second = [], []
    with pytest.raises(KeyboardInterrupt):
        sweep(monkeypatch, tmp_path, "killed", fake_run(first, interrupt_at=4))
    cut_short = first[3]
    continued = sweep(monkeypatch, tmp_path, "killed", fake_run(second))
    assert continued == whole
    assert cut_short in second
    assert len({*first, *second}) == 8
    assert set(first) & set(second) == {cut_short}  # what was finished is not run again


def test_a_cell_that_fails_is_reported_and_the_others_go_on(monkeypatch, tmp_path):
    found = sweep(monkeypatch, tmp_path, "run", fake_run([], fail=("injected-eta2-ppo-seed1",)))
    assert found["runs.csv"].count("\n") == 1 + 7
    assert "the reward divided by zero" in found["report.md"]
    assert "eta=2" in found["report.md"]
    again = []
    found = sweep(monkeypatch, tmp_path, "run", fake_run(again))
    assert again == ["injected-eta2-ppo-seed1"]
    assert "None." in found["report.md"]


def step(version, counts, started, ahead=0):
    return {"kind": "step", "version": version, "staleness/hist": counts, "ledger/issued": started + 3,
            "ledger/dropped": 3, "ledger/trained": 16 * version, "staleness/started_ahead": ahead}  # fmt: skip


def test_the_checks_of_a_cell_can_fail():
    exact, bounded = Cell("injected", 2, "ppo", 0), Cell("async", 1, "ppo", 0)
    staleness_sweep.check([step(1, [9], 16), step(2, [0, 9], 48), step(5, [0, 0, 9], 80)], exact)
    with pytest.raises(AssertionError, match="all should be 2 old"):
        staleness_sweep.check([step(5, [0, 1, 8], 80)], exact)
    with pytest.raises(AssertionError, match=r"tokens of ages \[0\], all should be 2 old"):
        staleness_sweep.check([step(5, [9], 80)], exact)
    staleness_sweep.check([step(2, [9], 16 * 4, 1)], bounded)  # floor((64 - 1) / 16) = 3 = version + eta
    with pytest.raises(AssertionError, match="step 2: a sample started 2 batches ahead"):
        staleness_sweep.check([step(2, [9], 16 * 4, 2)], bounded)
    with pytest.raises(AssertionError, match="65 samples started at version 2"):
        staleness_sweep.check([step(2, [9], 16 * 4 + 1)], bounded)
    staleness_sweep.check([step(2, [9], 10**6)], Cell("async", float("inf"), "ppo", 0))


def test_this_machine_is_shared_out(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0, 1, 4, 5})
    assert common.places(1) == [{}]
    assert common.places(2) == [{"CORES": "0,1"}, {"CORES": "4,5"}]
    with pytest.raises(SystemExit, match="--parallel=5"):
        common.places(5)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,4,5")
    assert common.places(3) == [{"CUDA_VISIBLE_DEVICES": d} for d in "345"]
    with pytest.raises(SystemExit, match="expected KEY=VALUE"):
        common.parse_overrides(["trainer.steps"])


def test_a_slow_sample_holds_its_share_of_what_may_be_under_way_and_is_as_old_as_it_took():
    found = {condition: straggler.simulate(*bound) for condition, bound in straggler.CONDITIONS.items()}
    duration = straggler.SLOW_FACTOR * straggler.LENGTH
    while_out = {c: sum(s["slow_is_out"] for s in run) for c, run in found.items()}
    at_the_end = {c: sum(s["tick"] >= straggler.TICKS - duration for s in run) for c, run in found.items()}
    assert while_out["η = 0"] == 0
    assert 0 < while_out["η = 1"] < at_the_end["η = 1"]
    assert while_out["η = 4"] == at_the_end["η = 4"]
    assert all(s["over_eq3"] <= 0 for run in found.values() for s in run)
    assert max(s["oldest"] for s in found["η = 0"]) == 0
    for condition, bound in (("η = 1", 1), ("η = 4", 4)):
        assert max(s["oldest_in_other_groups"] for s in found[condition]) == bound
        assert max(s["oldest"] for s in found[condition]) > 2 * bound
    assert max(s["oldest_in_other_groups"] for s in found["η = ∞"]) > 16
    for condition in ("η = 4, drop", "η = 4, mask_tokens"):
        assert max(s["oldest"] for s in found[condition]) <= 4
    assert not any(s["slow_tokens"] for s in found["η = 4, drop"])


def test_a_finished_run_of_another_config_is_not_taken_for_this_one(tmp_path):
    overrides = {"trainer.steps": 7, "rollout.max_staleness": "inf"}
    config = common.resolved(["--config=configs/math.py", *(f"--config.{k}={v}" for k, v in overrides.items())])
    assert config["trainer.steps"] == 7
    (tmp_path / "config.json").write_text(json.dumps({"config": config | {"workdir": "elsewhere"}}))
    (tmp_path / "summary.json").write_text('{"heldout_after": 0.5}')
    assert common.run_main(tmp_path, "configs/math.py", overrides) == {"heldout_after": 0.5}
    for other in ({}, overrides | {"trainer.steps": 8}, overrides | {"loss.name": "ppo"}):
        with pytest.raises(RuntimeError, match="holds a run of another config: config"):
            common.run_main(tmp_path, "configs/math.py", other)
    with pytest.raises(RuntimeError, match="another config"):
        common.run_main(tmp_path, "configs/math.py:tiny-skill", overrides)


def test_a_run_under_way_is_left_alone(tmp_path):
    (tmp_path / "metrics.jsonl").write_text("")
    held = lock(tmp_path)
    with pytest.raises(RuntimeError, match="a run is under way"):
        common.run_main(tmp_path, "configs/math.py", {})
    assert (tmp_path / "metrics.jsonl").exists()
    held.close()


@pytest.mark.parametrize("pair", ["seed=1", "rollout.max_staleness=3", "loss.name=ppo", "workdir=x"])
def test_what_the_sweep_varies_cannot_be_set(monkeypatch, tmp_path, pair):
    with pytest.raises(SystemExit, match="this key is what the experiment varies"):
        sweep(monkeypatch, tmp_path, "refused", fake_run([]), "--set", pair)


def test_the_documented_commands_name_what_there_is(monkeypatch):
    """Of docs/ablations.md: they parse, as far as their first run."""
    text = (ROOT / "docs/ablations.md").read_text()
    commands = re.findall(r"^python -m experiments\.(\w+)((?:.*\\\n)*.*)$", text, re.M)
    assert len(commands) >= 4
    for name, arguments in commands:
        words = shlex.split(arguments.replace("\\\n", " "), comments=True)
        monkeypatch.setattr(sys, "argv", [name, *words])
        monkeypatch.setattr(common, "run_main", lambda *a, **k: (_ for _ in ()).throw(Begun))
        with pytest.raises(Begun):
            importlib.import_module(f"experiments.{name}").main()
