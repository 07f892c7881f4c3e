"""Every objective on the embedded default, at max_staleness 4, for the same steps: which of them hold?

    python -m experiments.objectives

runs the preset `tiny` (local topology: real asynchrony) once per objective and seed, each objective with the
defaults of configs/default.py and nothing tuned for it. Runs lie under --runs; a finished one is not run again. A seed
sets the warm start, the order of the problems and the sampling; within a seed all objectives start from one policy.
"""

from __future__ import annotations

import argparse
import pathlib
from typing import Any

from areal_jax.metrics import read_metrics
from experiments import common

CONDITIONS: dict[str, dict[str, Any]] = {
    **{name: {"loss.name": name} for name in ("ppo", "decoupled_ppo", "staleness_ppo")},
    "decoupled_ppo, loglinear": {"loss.name": "decoupled_ppo", "loss.proximal": "loglinear"},
    "decoupled_ppo, mask": {"loss.name": "decoupled_ppo", "loss.importance_weight": "mask"},
    **{name: {"loss.name": name} for name in ("gspo", "cispo", "sapo", "m2po", "topr", "dppo", "reinforce")},
    "reinforce, clamp": {"loss.name": "reinforce", "loss.importance_weight": "clamp"},
    "ppo, gae": {"loss.name": "ppo", "advantage.name": "gae", "advantage.whiten": True, "critic.kind": "head"},
}
SLACK = 0.05
"""An objective holds if no seed ends further than this under its own best point, or under where it began."""
COLUMNS = ("heldout_before", "heldout_after", "heldout_after_standard_error", "staleness_mean", "seconds_rl")
MEASURED = {
    "clip/zero_gradient_fraction": "tokens without gradient",
    "behaviour_kl/k3": "KL to the behaviour",
    "optimizer/grad_norm": "gradient norm",
}
"""Means over the steps of a run."""


def main() -> None:
    cli = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cli.add_argument("--output", type=pathlib.Path, default=common.RESULTS / "objectives")
    cli.add_argument("--runs", type=pathlib.Path, default=pathlib.Path("runs/objectives"))
    cli.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    cli.add_argument("--steps", type=int, default=60)
    options = cli.parse_args()
    shared = {"trainer.steps": options.steps, "rollout.max_staleness": 4}
    rows, curves = [], []
    for seed in options.seeds:
        for condition, overrides in CONDITIONS.items():
            workdir = (options.runs / f"{condition.replace(', ', '-').replace(' ', '-')}-{seed}").absolute()
            summary = common.run_main(workdir, "configs/math.py", {"seed": seed, **shared, **overrides})
            curve = common.evaluation_curve(workdir, condition=condition, seed=seed)
            steps = [r for r in read_metrics(workdir) if r["kind"] == "step"]
            rows.append(
                {"objective": condition, "seed": seed}
                | {c: summary[c] for c in COLUMNS}
                | {"best": max(c["sampled"] for c in curve)}
                | {label: sum(r[name] for r in steps) / len(steps) for name, label in MEASURED.items()}
            )
            print(rows[-1], flush=True)
            curves += curve
    common.write_csv(options.output / "runs.csv", rows)
    common.write_csv(options.output / "curves.csv", curves)
    plot(options.output, curves)
    report(options.output, rows, options)


def plot(directory: pathlib.Path, curves: list[dict[str, Any]]) -> None:
    """Held-out accuracy against training step: a panel per objective, every seed, the default behind it in grey."""
    plt = common.pyplot()
    columns = 5
    rows = -(-len(CONDITIONS) // columns)
    figure, panels = plt.subplots(rows, columns, figsize=(14, 3 * rows), sharex=True, sharey=True, layout="constrained")
    for panel in panels.flat[len(CONDITIONS) :]:
        panel.set_visible(False)
    for panel, condition in zip(panels.flat, CONDITIONS, strict=False):
        for seed in sorted({c["seed"] for c in curves}):
            for name, style in (("decoupled_ppo", {"color": "0.8"}), (condition, {"label": f"seed {seed}"})):
                mine = [c for c in curves if c["condition"] == name and c["seed"] == seed]
                common.draw_curve(panel, mine, seed, **style)
        panel.set(title=condition, ylim=(0, 1))
        panel.grid(alpha=0.3)
    panels.flat[0].legend(fontsize=8, loc="lower right")
    figure.supxlabel("training step (policy version)")
    figure.supylabel("held-out accuracy (temperature 1, ± 1 s.e.); grey: decoupled_ppo, the default")
    common.save_figure(figure, directory / "objectives")


def report(directory: pathlib.Path, rows: list[dict[str, Any]], options: argparse.Namespace) -> None:
    table = []
    for condition in CONDITIONS:
        mine = [r for r in rows if r["objective"] == condition]
        holds = all(r["heldout_after"] >= max(r["best"], r["heldout_before"]) - SLACK for r in mine)
        entry = {
            "objective": condition,
            "before": ", ".join(f"{r['heldout_before']:.3f}" for r in mine),
            "after": ", ".join(f"{r['heldout_after']:.3f}" for r in mine),
            "best": ", ".join(f"{r['best']:.3f}" for r in mine),
            "holds": "yes" if holds else "no",
            "staleness": _mean(mine, "staleness_mean"),
        }
        table.append(entry | {label: _mean(mine, label) for label in MEASURED.values()})
    seeds = ", ".join(map(str, options.seeds))
    body = (
        "Accuracy on 600 held-out problems at temperature 1 (standard error about .01), seeds "
        f"{seeds} in this order, after {options.steps} steps of 256 samples at max_staleness 4. Best: the highest of "
        f"the measurements on the way. An objective holds if no seed ends more than {SLACK} under its best or where it "
        "began. Staleness: mean age of the trained tokens in versions. The last columns are means over the steps, and "
        "over the seeds.\n\n" + common.markdown_table(table) + "\n\n![curves](objectives.png)\n"
    )
    command = f"python -m experiments.objectives --steps={options.steps} --seeds {' '.join(map(str, options.seeds))}"
    common.write_report(directory, "Objectives", command, body)


def _mean(rows: list[dict[str, Any]], name: str) -> float:
    return float(sum(r[name] for r in rows) / len(rows))


if __name__ == "__main__":
    main()
