"""What the experiments share: runs of the main program, intervals, and reports."""

from __future__ import annotations

import csv
import importlib.metadata
import json
import os
import pathlib
import platform
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from absl import flags
from ml_collections import config_flags

from areal_jax.config import flatten
from areal_jax.launch.local import accelerators
from areal_jax.metrics import read_metrics
from areal_jax.types import UserError
from areal_jax.workdir import difference, lock, recorded

UNBOUNDED = 10**6
"""Samples that may wait for the trainer: so many that max_staleness alone bounds their age."""

ROOT = pathlib.Path(__file__).parent.parent
RESULTS = pathlib.Path(__file__).parent / "results"


def run_main(
    workdir: pathlib.Path, config: str, overrides: dict[str, Any], place: dict[str, str] | None = None
) -> dict[str, Any]:
    """One run of the main program; a finished one is not run again, an unfinished one is begun anew. Its summary.

    place: environment variables that give it a part of the machine (`places`).
    Raises RuntimeError with the program's message when it fails, or when the workdir holds a run of another config.
    """
    summary = workdir / "summary.json"
    arguments = [f"--config={config}", *(f"--config.{k}={v}" for k, v in (overrides | {"workdir": workdir}).items())]
    if summary.exists():
        if other := difference(resolved(arguments), recorded(workdir)):
            raise RuntimeError(f"{workdir} holds a run of another config: {other}. Delete it, or choose other --runs")
        return dict(json.loads(summary.read_text()))
    if workdir.exists():  # times and shares of a resumed run would be of its last part
        try:
            with lock(workdir):
                shutil.rmtree(workdir)
        except UserError as error:
            raise RuntimeError(str(error)) from error
    command = [sys.executable, "-m", "areal_jax.main", *arguments]
    if place and "CORES" in place:
        command = ["taskset", "--cpu-list", place["CORES"], *command]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=os.environ | (place or {}))
    if done.returncode:
        raise RuntimeError(f"{shlex.join(command)} failed: {done.stderr.strip()[-2000:]}")
    return dict(json.loads(summary.read_text()))


def resolved(arguments: Sequence[str]) -> dict[str, Any]:
    """The config, flattened, that the main program makes of these arguments."""
    values = flags.FlagValues()
    argv = ["main", *arguments]
    config_flags.DEFINE_config_file("config", flag_values=values, sys_argv=argv)
    values(argv)
    return dict(json.loads(json.dumps(flatten(values.config))))


def places(count: int) -> list[dict[str, str]]:
    """`count` equal parts of this machine for runs side by side: of its visible GPUs, or else of its cores.

    Raises SystemExit if there are fewer of them.
    """
    devices = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    if not devices and (found := accelerators()):
        devices = ",".join(map(str, range(found)))
    key, whole = ("CUDA_VISIBLE_DEVICES", devices.split(",")) if devices else ("CORES", [])
    whole = whole or [str(core) for core in sorted(os.sched_getaffinity(0))]
    size = len(whole) // count
    if count < 1 or not size:
        raise SystemExit(f"--parallel={count}: this machine has {len(whole)} of {key}, at least one is needed for each")
    return [{key: ",".join(whole[i * size : (i + 1) * size])} for i in range(count)] if count > 1 else [{}]


def parse_overrides(pairs: Sequence[str], owned: Iterable[str] = ()) -> dict[str, str]:
    """['a.b=3'] -> {'a.b': '3'}.

    owned: keys that the experiment sets itself. Raises SystemExit for those, and for what has no '='.
    """
    for pair in pairs:
        if "=" not in pair:
            raise SystemExit(f"--set {pair}: expected KEY=VALUE")
        if pair.split("=", 1)[0] in {"workdir", "seed", *owned}:
            raise SystemExit(f"--set {pair}: this key is what the experiment varies; leave it out")
    return dict(pair.split("=", 1) for pair in pairs)


def evaluation_curve(workdir: pathlib.Path, **labels: Any) -> list[dict[str, Any]]:
    """The held-out measurements of a run, in order, each with the labels; `seconds` are those at which the policy was
    there, not those at which its measurement was done."""
    records = read_metrics(workdir)
    published = {r["version"]: r["seconds"] for r in records if r["kind"] == "step"}
    return [
        {
            **labels,
            "version": r["version"],
            "seconds": published.get(r["version"], 0.0),
            "sampled": r["heldout/sampled_accuracy"],
            "standard_error": r["heldout/sampled_standard_error"],
            "greedy": r["heldout/greedy_accuracy"],
        }
        for r in records
        if r["kind"] == "evaluation"
    ]


def pyplot() -> Any:
    """matplotlib.pyplot, which draws to files and needs no display."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot

    return matplotlib.pyplot


def save_figure(figure: Any, path: pathlib.Path) -> None:
    """Writes `path`.png and .svg, and is done with the figure."""
    path.parent.mkdir(parents=True, exist_ok=True)
    for suffix in (".png", ".svg"):
        figure.savefig(path.with_suffix(suffix), dpi=120)
    pyplot().close(figure)


def draw_curve(panel: Any, points: Sequence[dict[str, Any]], seed: int, **style: Any) -> None:
    """Held-out accuracy at temperature 1, with its standard error, against the policy version; a marker per seed."""
    panel.errorbar(
        [c["version"] for c in points],
        [c["sampled"] for c in points],
        yerr=[c["standard_error"] for c in points],
        marker="osd"[seed % 3],
        markersize=3,
        linewidth=1,
        **style,
    )


def bootstrap_interval(values: Sequence[float], level: float = 0.95, draws: int = 10_000) -> tuple[float, float]:
    """Percentile bootstrap interval of the mean. Of two or three values it is their range: show the values too."""
    samples = np.random.default_rng(0).choice(np.asarray(values), (draws, len(values))).mean(axis=1)
    low, high = np.quantile(samples, [(1 - level) / 2, (1 + level) / 2])
    mean = float(np.mean(values))  # within the interval, whatever the rounding of equal values
    return min(float(low), mean), max(float(high), mean)


def machine() -> str:
    """The machine and the versions that a figure belongs to."""
    packages = ", ".join(f"{p} {importlib.metadata.version(p)}" for p in ("jax", "flax", "optax", "orbax-checkpoint"))
    cores, devices = len(os.sched_getaffinity(0)), accelerators()
    return (f"{devices} accelerators, " if devices else "") + (
        f"{cores} CPU cores ({platform.machine()}), Python {platform.python_version()}, {packages}"
    )


def write_csv(path: pathlib.Path, rows: Sequence[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def markdown_table(rows: Sequence[dict[str, Any]]) -> str:
    def cell(value: Any) -> str:
        return f"{value:.3f}" if isinstance(value, float) else str(value)

    names = list(rows[0])
    lines = ["| " + " | ".join(names) + " |", "|" + "---|" * len(names)]
    return "\n".join(lines + ["| " + " | ".join(cell(r[n]) for n in names) + " |" for r in rows])


def write_report(directory: pathlib.Path, title: str, command: str, body: str) -> None:
    text = f"# {title}\n\nCommand: `{command}`\n\nMachine: {machine()}\n\n{body.strip()}\n"
    (directory / "report.md").write_text(text)
