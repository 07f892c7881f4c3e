"""The sweep's own logic, with a stand-in for the runs: killed and continued, failing cells, checks that can fail."""

import json
import sys

import pytest

from experiments import common, staleness_sweep, straggler
from experiments.staleness_sweep import Cell


def fake_run(calls, fail=(), interrupt_at=None):
    """Writes what a run leaves, determined by its overrides; a finished one is only read, as by `common.run_main`."""

    def run_main(workdir, config, overrides, place=None):
        summary = workdir / "summary.json"
        if summary.exists():
            return json.loads(summary.read_text())
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
            counts |= {"staleness/hist": [0] * age + [50], "staleness/started_ahead": 0}
            records.append({"kind": "step", "version": version, **counts})
        accuracy = {"heldout/sampled_accuracy": 0.9 - 0.1 * eta - 0.01 * seed, "heldout/sampled_standard_error": 0.01}
        records.append({"kind": "evaluation", "version": 3, "seconds": 1.0, "heldout/greedy_accuracy": 1.0, **accuracy})
        (workdir / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
        names = (*staleness_sweep.COLUMNS, *staleness_sweep.TIMES)
        summary.write_text(json.dumps(dict.fromkeys(names, 0.5) | {"heldout_after": 0.9 - 0.1 * eta - 0.01 * seed}))
        return json.loads(summary.read_text())

    return run_main


def sweep(monkeypatch, tmp_path, name, run_main):
    monkeypatch.setattr(common, "run_main", run_main)
    arguments = ["--mode=injected", "--etas", "0", "2", "--objectives", "ppo", "reinforce", "--seeds", "0", "1"]
    places = ["--output", str(tmp_path / name / "out"), "--runs", str(tmp_path / name / "runs")]
    monkeypatch.setattr(sys, "argv", ["staleness_sweep", *arguments, *places])
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


def test_a_slow_sample_is_waited_for_only_where_nothing_else_may_start_and_is_as_old_as_it_took():
    found = {condition: straggler.simulate(*bound) for condition, bound in straggler.CONDITIONS.items()}
    slow = straggler.SLOW_FACTOR * straggler.LENGTH
    assert all(s["over_eq3"] <= 0 for run in found.values() for s in run)
    assert max(s["waited"] for s in found["η = 0"]) >= slow
    assert all(max(s["waited"] for s in run) < slow / 8 for c, run in found.items() if c != "η = 0")
    assert max(s["oldest"] for s in found["η = 0"]) == 0
    for condition, bound in (("η = 1", 1), ("η = 4", 4)):
        assert (
            max(s["oldest_in_other_groups"] for s in found[condition])
            <= bound
            < max(s["oldest"] for s in found[condition])
        )
    for condition in ("η = 4, drop", "η = 4, mask_tokens"):
        assert max(s["oldest"] for s in found[condition]) <= 4
    assert not any(s["slow_tokens"] for s in found["η = 4, drop"])
