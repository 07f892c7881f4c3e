"""What the experiments share: runs of the main program, intervals, and reports."""

from __future__ import annotations

import csv
import importlib.metadata
import json
import os
import pathlib
import platform
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from areal_jax.metrics import read_metrics

ROOT = pathlib.Path(__file__).parent.parent
RESULTS = pathlib.Path(__file__).parent / "results"


def run_main(
    workdir: pathlib.Path, config: str, overrides: dict[str, Any], place: dict[str, str] | None = None
) -> dict[str, Any]:
    """One run of the main program; a finished one is not run again. Returns its summary.

    place: environment variables that give it a part of the machine (`places`).
    Raises RuntimeError with the program's message when it fails.
    """
    summary = workdir / "summary.json"
    if not summary.exists():
        flags = [f"--config.{k}={v}" for k, v in ({"workdir": workdir} | overrides).items()]
        command = [sys.executable, "-m", "areal_jax.main", f"--config={config}", *flags]
        if place and "CORES" in place:
            command = ["taskset", "--cpu-list", place["CORES"], *command]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=os.environ | (place or {}))
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)} failed: {done.stderr.strip()[-2000:]}")
    return dict(json.loads(summary.read_text()))


def places(count: int) -> list[dict[str, str]]:
    """`count` equal parts of this machine for runs side by side: of its visible GPUs, or else of its cores.

    Raises SystemExit if there are fewer of them.
    """
    devices = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    key, whole = ("CUDA_VISIBLE_DEVICES", devices.split(",")) if devices else ("CORES", [])
    whole = whole or [str(core) for core in sorted(os.sched_getaffinity(0))]
    size = len(whole) // count
    if count < 1 or not size:
        raise SystemExit(f"--parallel={count}: this machine has {len(whole)} of {key}, at least one is needed for each")
    return [{key: ",".join(whole[i * size : (i + 1) * size])} for i in range(count)] if count > 1 else [{}]


def parse_overrides(pairs: Sequence[str]) -> dict[str, str]:
    """['a.b=3'] -> {'a.b': '3'}. Raises SystemExit for what has no '='."""
    for pair in pairs:
        if "=" not in pair:
            raise SystemExit(f"--set {pair}: expected KEY=VALUE")
    return dict(pair.split("=", 1) for pair in pairs)


def evaluation_curve(workdir: pathlib.Path, **labels: Any) -> list[dict[str, Any]]:
    """The held-out measurements of a run, in order, each with the labels."""
    return [
        {
            **labels,
            "version": r["version"],
            "seconds": r["seconds"],
            "sampled": r["heldout/sampled_accuracy"],
            "standard_error": r["heldout/sampled_standard_error"],
            "greedy": r["heldout/greedy_accuracy"],
        }
        for r in read_metrics(workdir)
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
    """Percentile bootstrap interval of the mean; with few values it is narrow by nature: show the values too."""
    samples = np.random.default_rng(0).choice(np.asarray(values), (draws, len(values))).mean(axis=1)
    low, high = np.quantile(samples, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


def machine() -> str:
    """The machine and the versions that a figure belongs to."""
    packages = ", ".join(f"{p} {importlib.metadata.version(p)}" for p in ("jax", "flax", "optax", "orbax-checkpoint"))
    cores = len(os.sched_getaffinity(0))
    return f"{cores} CPU cores ({platform.machine()}), Python {platform.python_version()}, {packages}"


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
