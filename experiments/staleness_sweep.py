"""How stale is too stale, and what does each correction buy? A sweep over staleness, objectives and seeds.

    python -m experiments.staleness_sweep                                    # real asynchrony, the embedded task
    python -m experiments.staleness_sweep --mode=injected --parallel=2       # exact staleness, no timing in it
    python -m experiments.staleness_sweep --config=configs/math.py:qwen2.5-0.5b --set trainer.steps=100

Two modes. `async` runs the local topology with rollout.max_staleness = eta: how old tokens really become depends on who
is faster. `injected` draws every batch with weights exactly eta versions old, in one process: the effect of age alone.
A cell is one run; a finished one is not run again, so that a sweep that was killed goes on where it was, and one that
fails is reported and does not end the sweep.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import json
import math
import pathlib
import queue
import shlex
from typing import Any

from areal_jax.metrics import Record, read_metrics
from experiments import common
from experiments.objectives import CONDITIONS

OBJECTIVES: dict[str, dict[str, Any]] = CONDITIONS | {
    "decoupled_ppo, cap 1": {"loss.name": "decoupled_ppo", "loss.importance_cap": 1.0},
    "decoupled_ppo, no weight": {"loss.name": "decoupled_ppo", "loss.importance_weight": "none"},
    "decoupled_ppo, kl": {"loss.name": "decoupled_ppo", "loss.kl_coefficient": 0.01},
}  # fmt: skip
"""What --objectives may name."""
COLUMNS = ("heldout_before", "heldout_after", "heldout_after_standard_error", "staleness_mean", "staleness_max")
TIMES = ("trained_tokens_per_second", "trainer_busy", "sampler_busy", "seconds_rl")


@dataclasses.dataclass(frozen=True)
class Cell:
    """One run of the sweep."""

    mode: str
    eta: float
    objective: str
    seed: int

    def labels(self) -> dict[str, Any]:
        return {"mode": self.mode, "eta": f"{self.eta:g}", "objective": self.objective, "seed": self.seed}

    def directory(self, runs: pathlib.Path) -> pathlib.Path:
        name = self.objective.replace(", ", "-").replace(" ", "-")
        return (runs / f"{self.mode}-eta{self.eta:g}-{name}-seed{self.seed}").absolute()

    def overrides(self) -> dict[str, Any]:
        shared = {"seed": self.seed, **OBJECTIVES[self.objective]}
        if self.mode == "injected":
            exact = {"rollout.max_staleness": 0, "rollout.injected_staleness": int(self.eta)}
            return shared | exact | {"launch.kind": "colocated"}
        bound = {"rollout.max_staleness": self.eta, "rollout.queue_capacity": common.UNBOUNDED}
        return shared | bound | {"launch.kind": "local"}


def main() -> None:
    cli = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cli.add_argument("--config", default="configs/math.py")
    cli.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="overrides of every run's config")
    cli.add_argument("--mode", choices=("async", "injected"), default="async")
    cli.add_argument("--etas", type=float, nargs="+", help="default: 0 1 2 4 8 16, and inf in the mode async")
    objectives = ["reinforce", "ppo", "decoupled_ppo", "staleness_ppo"]
    cli.add_argument("--objectives", nargs="+", choices=list(OBJECTIVES), default=objectives)
    cli.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    cli.add_argument("--parallel", type=int, default=1, help="cells side by side, each on its share of cores or GPUs")
    cli.add_argument("--name", default="embedded", help="of the sweep: names its directories")
    cli.add_argument("--output", type=pathlib.Path, default=None)
    cli.add_argument("--runs", type=pathlib.Path, default=None)
    options = cli.parse_args()
    options.output = options.output or common.RESULTS / "staleness_sweep" / f"{options.name}-{options.mode}"
    options.runs = options.runs or pathlib.Path("runs/staleness_sweep") / options.name
    options.etas = options.etas or [0, 1, 2, 4, 8, 16] + [math.inf] * (options.mode == "async")
    if options.mode == "injected" and any(not float(eta).is_integer() for eta in options.etas):
        raise SystemExit(f"--etas={options.etas}: injected staleness is a number of versions, inf has no meaning there")
    cells = [Cell(options.mode, eta, o, s) for s in options.seeds for eta in options.etas for o in options.objectives]
    failures = run_cells(cells, options)
    finished = [c for c in cells if c not in failures]
    if not finished:
        raise SystemExit("no cell has finished, see above")
    rows, times, curves = [], [], []
    for cell in finished:
        summary = json.loads((cell.directory(options.runs) / "summary.json").read_text())
        curve = common.evaluation_curve(cell.directory(options.runs), **cell.labels())
        best = max(point["sampled"] for point in curve)
        rows.append(cell.labels() | {c: summary[c] for c in COLUMNS} | {"best": best})
        times.append(cell.labels() | {c: summary[c] for c in TIMES})
        curves += curve
    common.write_csv(options.output / "runs.csv", rows)
    common.write_csv(options.output / "times.csv", times)
    common.write_csv(options.output / "curves.csv", curves)
    plot_accuracy(options, rows, times, failures)
    plot_curves(options, curves)
    report(options, rows, times, failures)


def run_cells(cells: list[Cell], options: argparse.Namespace) -> dict[Cell, str]:
    """Runs what is not finished; returns the cells that failed, with the reason."""
    free: queue.Queue[dict[str, str]] = queue.Queue()
    for place in common.places(options.parallel):
        free.put(place)
    owned = {key for cell in cells for key in cell.overrides()}
    extra = common.parse_overrides(options.set, owned)

    def run(cell: Cell) -> str:
        workdir = cell.directory(options.runs)
        place = free.get()
        try:
            common.run_main(workdir, options.config, extra | cell.overrides(), place)
            check(read_metrics(workdir), cell)
        except (RuntimeError, AssertionError, LookupError, OSError, ValueError) as error:
            return f"{workdir}: {type(error).__name__}: {error}"
        finally:
            free.put(place)
        return ""

    failures = {}
    with concurrent.futures.ThreadPoolExecutor(options.parallel) as pool:
        running = {cell: pool.submit(run, cell) for cell in cells}
        try:
            for cell, future in running.items():
                error = future.result()
                print(cell, error or "done", flush=True)
                if error:
                    failures[cell] = error
        except BaseException:  # interrupted: no further cell is begun
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return failures


def check(records: list[Record], cell: Cell) -> None:
    """What must hold in a run's own record, or the cell counts as failed (AssertionError).

    Injected staleness is measured exactly; bounded asynchrony never starts more samples than Eq. 3 allows.
    """
    for r in (r for r in records if r["kind"] == "step"):
        if cell.mode == "injected":
            age = min(int(cell.eta), r["version"] - 1)
            counts = r["staleness/hist"]
            ages = [i for i, n in enumerate(counts) if n]
            assert ages == [age], f"step {r['version']}: tokens of ages {ages}, all should be {age} old"
        started = r["ledger/issued"] - r["ledger/dropped"]
        samples = r["ledger/trained"] / r["version"]
        bound = 0 if cell.mode == "injected" else cell.eta
        assert (started - 1) // samples <= r["version"] + bound, f"{started} samples started at version {r['version']}"
        ahead = r["staleness/started_ahead"]  # the gate's own account, of every start since the last step
        assert ahead <= bound, f"step {r['version']}: a sample started {ahead} batches ahead of the version"


def plot_accuracy(
    options: argparse.Namespace, rows: list[dict[str, Any]], times: list[dict[str, Any]], failures: dict[Cell, str]
) -> None:
    """Final accuracy, throughput and measured staleness against eta: a dot per seed, the mean and its interval."""
    plt = common.pyplot()
    figure, panels = plt.subplots(1, 3, figsize=(15, 4.6), layout="constrained")
    merged = [a | b for a, b in zip(rows, times, strict=True)]
    axes = (
        ("heldout_after", "held-out accuracy at the end (temperature 1)"),
        ("trained_tokens_per_second", "trained tokens per second"),
        ("staleness_mean", "mean age of trained tokens (versions)"),
    )
    for panel, (column, label) in zip(panels, axes, strict=True):
        for i, objective in enumerate(options.objectives):
            shift = (i - (len(options.objectives) - 1) / 2) * 0.15
            where, means, errors = [], [], []
            for x, eta in enumerate(options.etas):
                mine = [r for r in merged if r["objective"] == objective and r["eta"] == f"{eta:g}"]
                values = [r[column] for r in mine]
                panel.scatter([x + shift] * len(values), values, s=10, color=f"C{i}", alpha=0.6)
                if values:
                    low, high = common.bootstrap_interval(values)
                    mean = sum(values) / len(values)
                    where.append(x + shift)
                    means.append(mean)
                    errors.append((max(0.0, mean - low), max(0.0, high - mean)))
                lost = sum(c.objective == objective and c.eta == eta for c in failures) if panel is panels[0] else 0
                panel.scatter([x + shift] * lost, [0.0] * lost, marker="x", color=f"C{i}")
            lengths = list(zip(*errors, strict=True))
            panel.errorbar(where, means, yerr=lengths, color=f"C{i}", capsize=2, linewidth=1, label=objective)
        panel.set_xticks(range(len(options.etas)), ["∞" if math.isinf(e) else f"{e:g}" for e in options.etas])
        panel.set(
            xlabel="max_staleness η" if options.mode == "async" else "injected staleness (versions)", ylabel=label
        )
        panel.grid(alpha=0.3)
    panels[0].legend(fontsize=8)
    figure.suptitle(
        f"{options.name}, {options.mode}: every seed of {len(options.seeds)} a dot (a cross: it failed), means, 95 % "
        "bootstrap intervals"
    )
    common.save_figure(figure, options.output / "staleness")


def plot_curves(options: argparse.Namespace, curves: list[dict[str, Any]]) -> None:
    """Held-out accuracy against training step: a panel per objective and eta (the longer list across), every seed."""
    plt = common.pyplot()
    across = len(options.etas) >= len(options.objectives)
    shape = (len(options.objectives), len(options.etas)) if across else (len(options.etas), len(options.objectives))
    size = (2.3 * shape[1] + 1, 2.1 * shape[0] + 1)
    figure, panels = plt.subplots(*shape, figsize=size, sharex=True, sharey=True, squeeze=False, layout="constrained")
    for row, objective in zip(panels if across else panels.T, options.objectives, strict=True):
        for panel, eta in zip(row, options.etas, strict=True):
            for seed in options.seeds:
                labels = (objective, f"{eta:g}", seed)
                mine = [c for c in curves if (c["objective"], c["eta"], c["seed"]) == labels]
                common.draw_curve(panel, mine, seed, color=f"C{seed}")
            panel.set(ylim=(0, 1))
            panel.set_title(f"{objective}, {'η' if options.mode == 'async' else 'age'} {eta:g}", fontsize=8)
            panel.grid(alpha=0.3)
    figure.supxlabel("training step (policy version)")
    figure.supylabel("held-out accuracy (temperature 1)")
    common.save_figure(figure, options.output / "curves")


def report(
    options: argparse.Namespace, rows: list[dict[str, Any]], times: list[dict[str, Any]], failures: dict[Cell, str]
) -> None:
    tables = []
    for title, column, table in (
        ("Held-out accuracy at the end", "heldout_after", rows),
        ("Best on the way (the highest of some noisy measurements: compare it with itself alone)", "best", rows),
        ("Mean age of the trained tokens, in versions", "staleness_mean", rows),
        ("Trained tokens per second", "trained_tokens_per_second", times),
    ):
        lines = []
        for objective in options.objectives:
            line = {"objective": objective}
            for eta in options.etas:
                values = [r[column] for r in table if r["objective"] == objective and r["eta"] == f"{eta:g}"]
                line[f"{eta:g}"] = _cell(values, len(options.seeds))
            lines.append(line)
        tables.append(f"## {title}\n\n{common.markdown_table(lines)}")
    failed = "\n".join(f"- {cell}: {error}" for cell, error in failures.items()) or "None."
    command = ["python", "-m", "experiments.staleness_sweep", f"--mode={options.mode}", f"--name={options.name}"]
    command += [f"--parallel={options.parallel}"] if options.parallel > 1 else []
    command += [f"--config={options.config}"] if options.config != "configs/math.py" else []
    command += ["--etas", *(f"{e:g}" for e in options.etas), "--objectives", *options.objectives]
    command += ["--seeds", *map(str, options.seeds), *(["--set", *options.set] if options.set else [])]
    share = f" Each run had one of {options.parallel} equal parts of the machine." if options.parallel > 1 else ""
    meaning = "rollout.max_staleness" if options.mode == "async" else "injected staleness, exact"
    body = (
        f"Columns: {meaning}. Means over {len(options.seeds)} seeds with the 95 % bootstrap interval of the mean, "
        f"which of three values is their range; where seeds failed, the number of those that are left.{share}\n\n"
        "![accuracy](staleness.png)\n\n"
        + "\n\n".join(tables)
        + f"\n\n![curves](curves.png)\n\n## Cells that failed\n\n{failed}"
    )
    common.write_report(options.output, f"Staleness sweep: {options.name}, {options.mode}", shlex.join(command), body)


def _cell(values: list[float], seeds: int) -> str:
    if not values:
        return "all failed"
    digits = 3 if max(values) < 100 else 0
    text = f"{sum(values) / len(values):.{digits}f}"
    if len(values) > 1:
        low, high = common.bootstrap_interval(values)
        text += f" ({low:.{digits}f} to {high:.{digits}f})"
    return text + (f", {len(values)} of {seeds}" if len(values) < seeds else "")


if __name__ == "__main__":
    main()
