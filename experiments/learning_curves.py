"""Does it learn, and is it the reward that does it? All seeds of the presets `tiny` and `tiny-skill`, and a control.

    python -m experiments.learning_curves

runs, one after another on the whole machine: `tiny`, `tiny` with the rewards of each batch shuffled (the control),
`tiny` with adapters of rank 8 alone trained, and `tiny-skill`, each for the seeds 0, 1 and 2 (a seed sets the warm
start, the order of the problems and the sampling).
Runs lie under --runs; a finished one is not run again.
"""

from __future__ import annotations

import argparse
import pathlib
from typing import Any

from experiments import common

CONDITIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "tiny": ("configs/math.py", {}),
    "tiny, shuffled rewards": ("configs/math.py", {"reward.shuffle": True}),
    "tiny, LoRA": (
        "configs/math.py",
        {"model.lora.rank": 8, "optimizer.learning_rate": 1e-3, "optimizer.final_learning_rate": 1e-3},
    ),
    "tiny-skill": ("configs/math.py:tiny-skill", {}),
}
COLUMNS = (
    "heldout_before",
    "heldout_after",
    "heldout_after_standard_error",
    "heldout_greedy_before",
    "heldout_greedy_after",
    "response_length_before",
    "response_length_after",
    "warm_start_skill_accuracy",
    "steps",
    "seconds_total",
    "seconds_warm_start",
    "trained_tokens_per_second",
    "trainer_busy",
    "sampler_busy",
    "staleness_mean",
    "staleness_max",
    "compiles_after_warmup",
)


def main() -> None:
    cli = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cli.add_argument("--output", type=pathlib.Path, default=common.RESULTS / "learning_curves")
    cli.add_argument("--runs", type=pathlib.Path, default=pathlib.Path("runs/learning_curves"))
    cli.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    options = cli.parse_args()
    rows, curves = [], []
    for condition, (config, overrides) in CONDITIONS.items():
        for seed in options.seeds:
            workdir = (options.runs / f"{condition.replace(', ', '-').replace(' ', '-')}-{seed}").absolute()
            summary = common.run_main(workdir, config, {"seed": seed, **overrides})
            rows.append({"condition": condition, "seed": seed, **{c: summary[c] for c in COLUMNS}})
            print(rows[-1], flush=True)
            curves += common.evaluation_curve(workdir, condition=condition, seed=seed)
    common.write_csv(options.output / "runs.csv", rows)
    common.write_csv(options.output / "curves.csv", curves)
    plot(options.output, rows, curves)
    report(options.output, rows, curves)


def plot(directory: pathlib.Path, rows: list[dict[str, Any]], curves: list[dict[str, Any]]) -> None:
    """Held-out accuracy against training step, a panel per preset, every seed."""
    plt = common.pyplot()
    figure, panels = plt.subplots(1, 2, figsize=(10, 5), sharey=True, layout="constrained")
    styles = {"tiny": (0, "tab:blue", "-"), "tiny, shuffled rewards": (0, "tab:gray", "--")}
    styles["tiny, LoRA"] = (0, "tab:purple", "-.")
    styles["tiny-skill"] = (1, "tab:green", "-")
    for condition, (panel, color, line) in styles.items():
        for seed in sorted({r["seed"] for r in rows}):
            mine = [c for c in curves if c["condition"] == condition and c["seed"] == seed]
            common.draw_curve(panels[panel], mine, seed, color=color, linestyle=line, label=f"{condition}, seed {seed}")
    taught = [r["warm_start_skill_accuracy"] for r in rows if r["condition"] == "tiny"]
    for value in taught:
        panels[0].axhline(value, color="tab:orange", linewidth=0.8, linestyle=":")
    panels[0].plot([], [], color="tab:orange", linestyle=":", label="taught, then hidden, by the warm start")
    panels[0].set(title="tiny: RL brings out a hidden skill", ylabel="held-out accuracy (temperature 1, ± 1 s.e.)")
    panels[1].set(title="tiny-skill: RL adds to a skill in the open")
    for panel in panels:
        panel.set(xlabel="training step (policy version)", ylim=(0, 1))
        panel.grid(alpha=0.3)
        panel.legend(fontsize=7, loc="upper center", bbox_to_anchor=(0.5, -0.14), ncol=2, frameon=False)
    common.save_figure(figure, directory / "learning_curves")


def report(directory: pathlib.Path, rows: list[dict[str, Any]], curves: list[dict[str, Any]]) -> None:
    lines = []
    for condition in CONDITIONS:
        gains = [r["heldout_after"] - r["heldout_before"] for r in rows if r["condition"] == condition]
        low, high = common.bootstrap_interval(gains)
        highest = ", ".join(
            f"{max(c['sampled'] for c in curves if (c['condition'], c['seed']) == (condition, r['seed'])):.3f}"
            for r in rows
            if r["condition"] == condition
        )
        each = ", ".join(f"{g:+.3f}" for g in gains)
        lines.append(
            f"- {condition}: gain in held-out accuracy {each} by seed; mean {sum(gains) / len(gains):+.3f}, 95 % "
            f"bootstrap interval over seeds {low:+.3f} to {high:+.3f}; highest point of each curve {highest}."
        )
    body = "\n".join(lines) + "\n\n![curves](learning_curves.png)\n\n" + common.markdown_table(rows)
    common.write_report(directory, "Learning curves", "python -m experiments.learning_curves", body)


if __name__ == "__main__":
    main()
