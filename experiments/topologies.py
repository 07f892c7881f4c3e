"""What overlap buys: trained tokens per second of `local` at max_staleness 4 and 0, and of `colocated`.

    python -m experiments.topologies

The three take turns, round after round, so that a noisy machine slows them alike; medians over rounds, and the ratio
within each round. The warm start is taken from the cache (made by the first run).
"""

from __future__ import annotations

import argparse
import pathlib
import statistics
import tempfile
from typing import Any

from experiments import common

CONDITIONS: dict[str, dict[str, Any]] = {
    "local, max_staleness 4": {"launch.kind": "local", "rollout.max_staleness": 4},
    "local, max_staleness 0": {"launch.kind": "local", "rollout.max_staleness": 0},
    "colocated, max_staleness 4": {"launch.kind": "colocated", "rollout.max_staleness": 4},
}
COLUMNS = (
    "trained_tokens_per_second",
    "generated_tokens_per_second",
    "trainer_busy",
    "sampler_busy",
    "slots_useful",
    "swap_pause_seconds_mean",
    "staleness_mean",
    "heldout_after",
    "seconds_rl",
)


def main() -> None:
    cli = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cli.add_argument("--output", type=pathlib.Path, default=common.RESULTS / "topologies")
    cli.add_argument("--rounds", type=int, default=5)
    cli.add_argument("--steps", type=int, default=30)
    options = cli.parse_args()
    shared = {"trainer.steps": options.steps, "evaluation.every_steps": 0, "checkpoint.every_steps": 0}
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        common.run_main(pathlib.Path(scratch) / "warm", "configs/math.py", shared | {"trainer.steps": 1})
        for i in range(options.rounds):
            for condition, overrides in CONDITIONS.items():
                workdir = pathlib.Path(scratch) / f"{i}-{list(CONDITIONS).index(condition)}"
                summary = common.run_main(workdir, "configs/math.py", shared | overrides)
                rows.append({"round": i, "condition": condition, **{c: summary[c] for c in COLUMNS}})
                print(rows[-1], flush=True)
    common.write_csv(options.output / "runs.csv", rows)
    report(options, rows)


def report(options: argparse.Namespace, rows: list[dict[str, Any]]) -> None:
    names = list(CONDITIONS)
    table = []
    for name in names:
        mine = [r for r in rows if r["condition"] == name]
        ratios = [
            r["trained_tokens_per_second"] / b["trained_tokens_per_second"]
            for r, b in zip([r for r in rows if r["condition"] == names[0]], mine, strict=True)
        ]
        entry: dict[str, Any] = {"condition": name}
        entry |= {c: round(float(statistics.median(r[c] for r in mine)), 3) for c in COLUMNS}
        low, high = common.bootstrap_interval(ratios)
        entry["first condition is faster by"] = f"{statistics.median(ratios):.2f}x ({low:.2f} to {high:.2f})"
        table.append(entry)
    body = (
        f"Medians over {options.rounds} interleaved rounds of {options.steps} steps; the last column is the median "
        "ratio within a round, with the 95 % bootstrap interval of its mean.\n\n" + common.markdown_table(table)
    )
    command = f"python -m experiments.topologies --rounds={options.rounds} --steps={options.steps}"
    common.write_report(options.output, "Topologies", command, body)


if __name__ == "__main__":
    main()
