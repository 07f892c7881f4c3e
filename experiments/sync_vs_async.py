"""What asynchrony buys with the same compute and the same number of samples: time, throughput, busy shares, accuracy.

    python -m experiments.sync_vs_async

The conditions take turns, round after round (a seed each), so that a noisy machine slows them alike: synchronous with
static batches (no slot is filled until all are done), synchronous with continuous batching, asynchronous with
max_staleness from --etas; all in the local topology, and each trains the same number of samples in the same number of
steps. A ratio is one of times within a round. Runs lie under --runs; a finished one is not run again.
"""

from __future__ import annotations

import argparse
import pathlib
import shlex
import statistics
from typing import Any

from areal_jax.metrics import read_lines
from experiments import common

STATIC = "synchronous, static"
SYNCHRONOUS: dict[str, dict[str, Any]] = {
    STATIC: {"rollout.max_staleness": 0, "rollout.batching": "static"},
    "synchronous, continuous": {"rollout.max_staleness": 0},
}
SHARED: dict[str, Any] = {
    "launch.kind": "local",
    "rollout.queue_capacity": common.UNBOUNDED,
    "evaluation.every_steps": 20,  # an evaluation takes a sampler as long as several batches
    "checkpoint.every_steps": 0,
}
OWNED = ("rollout.max_staleness", "rollout.batching", "rollout.queue_capacity", "launch.kind")
COLUMNS = (
    "seconds_rl",
    "trained_tokens_per_second",
    "trainer_busy",
    "sampler_busy",
    "slots_useful",
    "staleness_mean",
    "heldout_after",
    "heldout_after_standard_error",
)
GANTT_SECONDS = 12.0


def main() -> None:
    cli = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cli.add_argument("--config", default="configs/math.py")
    cli.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="overrides of every run's config")
    cli.add_argument("--etas", type=int, nargs="+", default=[1, 2, 4, 8])
    cli.add_argument("--rounds", type=int, default=5)
    cli.add_argument("--name", default="embedded")
    cli.add_argument("--output", type=pathlib.Path, default=None)
    cli.add_argument("--runs", type=pathlib.Path, default=None)
    options = cli.parse_args()
    options.output = options.output or common.RESULTS / "sync_vs_async" / options.name
    options.runs = options.runs or pathlib.Path("runs/sync_vs_async") / options.name
    shared = SHARED | common.parse_overrides(options.set, OWNED)
    conditions = SYNCHRONOUS | {f"asynchronous, η = {e}": {"rollout.max_staleness": e} for e in options.etas}
    rows, curves = [], []
    for i in range(options.rounds):
        for condition, overrides in conditions.items():
            workdir = workdir_of(options, condition, i)
            summary = common.run_main(workdir, options.config, {"seed": i} | shared | overrides)
            rows.append({"round": i, "condition": condition, **{c: summary[c] for c in COLUMNS}})
            curves += common.evaluation_curve(workdir, condition=condition, seed=i)
            print(rows[-1], flush=True)
    common.write_csv(options.output / "runs.csv", rows)
    common.write_csv(options.output / "curves.csv", curves)
    spans = {c: read_lines(workdir_of(options, c, options.rounds - 1) / "timeline.jsonl") for c in conditions}
    plot_timeline(options.output, spans)
    plot_accuracy(options.output, curves)
    report(options, rows)


def workdir_of(options: argparse.Namespace, condition: str, i: int) -> pathlib.Path:
    name = condition.replace(", ", "-").replace(" = ", "").replace("η", "eta")
    return (options.runs / f"{name}-{i}").absolute()


def plot_timeline(directory: pathlib.Path, spans: dict[str, list[dict[str, Any]]]) -> None:
    """When trainer and samplers worked, in the middle of the last round's run of each condition."""
    plt = common.pyplot()
    figure, panels = plt.subplots(len(spans), 1, figsize=(11, 1.35 * len(spans) + 0.6), layout="constrained")
    for panel, (condition, lines) in zip(panels, spans.items(), strict=True):
        roles = sorted({s["role"] for s in lines}, key=lambda role: role != "trainer")
        middle = max(s["end"] for s in lines) / 2
        for y, role in enumerate(roles):
            bars = [(s["start"] - middle, s["end"] - s["start"]) for s in lines if s["role"] == role]
            panel.broken_barh(bars, (y - 0.38, 0.76), color=f"C{min(y, 1)}")
        panel.set(xlim=(0, GANTT_SECONDS), ylim=(len(roles) - 0.5, -0.5), yticks=range(len(roles)))
        panel.set_yticklabels(roles)
        panel.set_title(condition, fontsize=9, loc="left")
    panels[-1].set_xlabel("seconds, from the middle of the run; a bar is work, a gap is waiting")
    common.save_figure(figure, directory / "timeline")


def plot_accuracy(directory: pathlib.Path, curves: list[dict[str, Any]]) -> None:
    """Held-out accuracy against wall time, a line per condition and round."""
    plt = common.pyplot()
    figure, panel = plt.subplots(figsize=(8, 5), layout="constrained")
    for i, condition in enumerate(dict.fromkeys(c["condition"] for c in curves)):
        for r in sorted({c["seed"] for c in curves}):
            mine = [c for c in curves if c["condition"] == condition and c["seed"] == r]
            label = condition if r == 0 else None
            panel.plot([c["seconds"] for c in mine], [c["sampled"] for c in mine], color=f"C{i}", lw=1, label=label)
    panel.set(xlabel="seconds of RL", ylabel="held-out accuracy (temperature 1)", ylim=(0, 1))
    panel.grid(alpha=0.3)
    panel.legend(fontsize=8, loc="lower right")
    common.save_figure(figure, directory / "accuracy")


def report(options: argparse.Namespace, rows: list[dict[str, Any]]) -> None:
    base = [r for r in rows if r["condition"] == STATIC]
    table = []
    for condition in dict.fromkeys(r["condition"] for r in rows):
        mine = [r for r in rows if r["condition"] == condition]
        faster = [b["seconds_rl"] / r["seconds_rl"] for r, b in zip(mine, base, strict=True)]
        better = [r["heldout_after"] - b["heldout_after"] for r, b in zip(mine, base, strict=True)]
        entry: dict[str, Any] = {"condition": condition}
        entry |= {c: round(float(statistics.median(r[c] for r in mine)), 3) for c in COLUMNS}
        table.append(entry | {"times as fast": _mean(faster, ".2f"), "accuracy more": _mean(better, "+.3f")})
    body = (
        f"Medians over {options.rounds} interleaved rounds, a seed each. The last columns compare with the static "
        "batches of the same round, whose samples and steps are as many: the ratio of times, and the difference of the "
        "held-out accuracies at the end; means with their 95 % bootstrap intervals.\n\n"
        + common.markdown_table(table)
        + "\n\n![timeline](timeline.png)\n\n![accuracy](accuracy.png)"
    )
    command = ["python", "-m", "experiments.sync_vs_async", f"--rounds={options.rounds}", f"--name={options.name}"]
    command += [f"--config={options.config}"] if options.config != "configs/math.py" else []
    command += ["--etas", *map(str, options.etas), *(["--set", *options.set] if options.set else [])]
    common.write_report(options.output, f"Synchronous against asynchronous: {options.name}", shlex.join(command), body)


def _mean(values: list[float], digits: str) -> str:
    low, high = common.bootstrap_interval(values)
    return f"{statistics.fmean(values):{digits}} ({low:{digits}} to {high:{digits}})"


if __name__ == "__main__":
    main()
