"""Conditions that take turns, round after round, so that a noisy machine slows them alike: what such experiments share.

A round has a seed of its own, and all conditions train the same number of samples in the same number of steps, so that
a ratio of times is one of throughputs. Runs lie under --runs; a finished one is not run again.
"""

from __future__ import annotations

import argparse
import pathlib
import re
import shlex
import statistics
from collections.abc import Sequence
from typing import Any

from areal_jax.metrics import read_lines
from experiments import common

GANTT_SECONDS = 12.0
SHARED: dict[str, Any] = {
    "launch.kind": "local",
    "rollout.queue_capacity": common.UNBOUNDED,
    "evaluation.every_steps": 20,  # an evaluation takes a sampler as long as several batches
    "checkpoint.every_steps": 0,
}


def parser(doc: str | None, rounds: int) -> argparse.ArgumentParser:
    cli = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    cli.add_argument("--config", default="configs/math.py")
    cli.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="overrides of every run's config")
    cli.add_argument("--rounds", type=int, default=rounds)
    cli.add_argument("--name", default="embedded", help="of this comparison: names its directories")
    cli.add_argument("--output", type=pathlib.Path, default=None)
    cli.add_argument("--runs", type=pathlib.Path, default=None)
    return cli


class Comparison:
    """Runs the conditions and writes tables, pictures and the report; ratios are against the first condition."""

    def __init__(
        self,
        options: argparse.Namespace,
        experiment: str,
        conditions: dict[str, dict[str, Any]],
        columns: Sequence[str],
        arguments: Sequence[str] = (),
    ):
        """columns: of the runs' summaries. arguments: of the experiment's own, for the command in the report."""
        self._options, self._conditions, self._columns = options, conditions, ("seconds_rl", *columns)
        self._output = options.output or common.RESULTS / experiment / options.name
        self._runs = options.runs or pathlib.Path("runs") / experiment / options.name
        command = ["python", "-m", f"experiments.{experiment}", f"--rounds={options.rounds}", f"--name={options.name}"]
        command += [f"--config={options.config}"] if options.config != "configs/math.py" else []
        self._command = [*command, *arguments, *(["--set", *options.set] if options.set else [])]

    def run(self, title: str, words: str) -> None:
        """words: what the report says before its table."""
        owned = {key for overrides in self._conditions.values() for key in overrides}
        shared = SHARED | common.parse_overrides(self._options.set, {*owned, "launch.kind", "rollout.queue_capacity"})
        rows, curves = [], []
        for i in range(self._options.rounds):
            for condition, overrides in self._conditions.items():
                workdir = self._workdir(condition, i)
                summary = common.run_main(workdir, self._options.config, {"seed": i} | shared | overrides)
                rows.append({"round": i, "condition": condition, **{c: summary[c] for c in self._columns}})
                curves += common.evaluation_curve(workdir, condition=condition, seed=i)
                print(rows[-1], flush=True)
        common.write_csv(self._output / "runs.csv", rows)
        common.write_csv(self._output / "curves.csv", curves)
        self._plot_timeline()
        self._plot_accuracy(curves)
        self._report(title, words, rows)

    def _workdir(self, condition: str, i: int) -> pathlib.Path:
        name = re.sub(r"[^a-z0-9]+", "-", condition.replace("η", "eta").lower())
        return (self._runs / f"{name}-{i}").absolute()

    def _plot_timeline(self) -> None:
        """When trainer and samplers worked, in the middle of the last round's run of each condition."""
        plt = common.pyplot()
        count = len(self._conditions)
        figure, panels = plt.subplots(count, 1, figsize=(11, 1.35 * count + 0.6), layout="constrained")
        for panel, condition in zip(panels, self._conditions, strict=True):
            lines = read_lines(self._workdir(condition, self._options.rounds - 1) / "timeline.jsonl")
            roles = sorted({s["role"] for s in lines}, key=lambda role: role != "trainer")
            middle = max(s["end"] for s in lines) / 2
            for y, role in enumerate(roles):
                bars = [(s["start"] - middle, s["end"] - s["start"]) for s in lines if s["role"] == role]
                panel.broken_barh(bars, (y - 0.38, 0.76), color=f"C{min(y, 1)}")
            panel.set(xlim=(0, GANTT_SECONDS), ylim=(len(roles) - 0.5, -0.5), yticks=range(len(roles)))
            panel.set_yticklabels(roles)
            panel.set_title(condition, fontsize=9, loc="left")
        panels[-1].set_xlabel("seconds, from the middle of the run; a bar is work, a gap is waiting")
        common.save_figure(figure, self._output / "timeline")

    def _plot_accuracy(self, curves: list[dict[str, Any]]) -> None:
        """Held-out accuracy against wall time, a line per condition and round."""
        plt = common.pyplot()
        figure, panel = plt.subplots(figsize=(8, 5), layout="constrained")
        for i, condition in enumerate(self._conditions):
            for r in sorted({c["seed"] for c in curves}):
                mine = [c for c in curves if c["condition"] == condition and c["seed"] == r]
                label = condition if r == 0 else None
                panel.plot([c["seconds"] for c in mine], [c["sampled"] for c in mine], color=f"C{i}", lw=1, label=label)
        panel.set(xlabel="seconds of RL", ylabel="held-out accuracy (temperature 1)", ylim=(0, 1))
        panel.grid(alpha=0.3)
        panel.legend(fontsize=8, loc="lower right")
        common.save_figure(figure, self._output / "accuracy")

    def _report(self, title: str, words: str, rows: list[dict[str, Any]]) -> None:
        first = next(iter(self._conditions))
        base = [r for r in rows if r["condition"] == first]
        table = []
        for condition in self._conditions:
            mine = [r for r in rows if r["condition"] == condition]
            faster = [b["seconds_rl"] / r["seconds_rl"] for r, b in zip(mine, base, strict=True)]
            better = [r["heldout_after"] - b["heldout_after"] for r, b in zip(mine, base, strict=True)]
            entry: dict[str, Any] = {"condition": condition}
            entry |= {c: round(float(statistics.median(r[c] for r in mine)), 3) for c in self._columns}
            table.append(entry | {"times as fast": _mean(faster, ".2f"), "accuracy more": _mean(better, "+.3f")})
        body = (
            f"{words} Medians over {self._options.rounds} interleaved rounds, a seed each. The last columns compare "
            f"with '{first}' in the same round, whose samples and steps are as many: the ratio of times, and the "
            "difference of the held-out accuracies at the end; means with their 95 % bootstrap intervals.\n\n"
            + common.markdown_table(table)
            + "\n\n![timeline](timeline.png)\n\n![accuracy](accuracy.png)"
        )
        common.write_report(self._output, f"{title}: {self._options.name}", shlex.join(self._command), body)


def _mean(values: list[float], digits: str) -> str:
    low, high = common.bootstrap_interval(values)
    return f"{statistics.fmean(values):{digits}} ({low:{digits}} to {high:{digits}})"
