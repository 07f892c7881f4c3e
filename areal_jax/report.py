"""What a run leaves for a person: the learning curve, the summary and the closing words."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Sequence
from typing import Any

from areal_jax.metrics import Record, replace_text


def write_summary(workdir: pathlib.Path, summary: dict[str, Any]) -> None:
    replace_text(workdir / "summary.json", json.dumps(summary, indent=1) + "\n")


def plot_learning_curve(path: pathlib.Path, records: Sequence[Record], reference: float | None) -> None:
    """Held-out accuracy, response length and staleness against time, one above the other."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    steps = [r for r in records if r["kind"] == "step"]
    evaluations = [r for r in records if r["kind"] == "evaluation"]
    figure, (top, middle, bottom) = plt.subplots(3, 1, figsize=(7.5, 8), sharex=True, layout="constrained")
    times = [r["seconds"] for r in evaluations]
    for name, label, style in (
        ("sampled", "held-out, temperature 1 (± 1 s.e.)", "o-"),
        ("greedy", "held-out, greedy", "s--"),
    ):
        values = [r[f"heldout/{name}_accuracy"] for r in evaluations]
        errors = [r[f"heldout/{name}_standard_error"] for r in evaluations]
        top.errorbar(times, values, yerr=errors, fmt=style, markersize=4, capsize=2, label=label)
    top.plot(
        [r["seconds"] for r in steps],
        [r["reward/mean"] for r in steps],
        color="0.7",
        label="reward of the batch",
        zorder=0,
    )
    if reference is not None:
        top.axhline(reference, color="tab:green", linestyle=":", label="skill taught by the warm start (validation)")
    top.set(ylabel="accuracy", ylim=(0, 1))
    top.legend(fontsize=8, loc="lower right")
    middle.plot([r["seconds"] for r in steps], [r["length/mean"] for r in steps], color="tab:purple")
    middle.set(ylabel="mean response length (tokens)")
    seconds = [r["seconds"] for r in steps]
    bottom.plot(seconds, [r["staleness/token_mean"] for r in steps], color="tab:red", label="mean over tokens")
    bottom.plot(seconds, [r["staleness/token_max"] for r in steps], color="tab:red", linestyle=":", label="maximum")
    bottom.set(ylabel="staleness (policy versions)", xlabel="seconds of RL")
    bottom.legend(fontsize=8)
    for axis in (top, middle, bottom):
        axis.grid(alpha=0.3)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def closing_words(summary: dict[str, Any], examples: Sequence[dict[str, str]], workdir: pathlib.Path) -> str:
    """What was learnt, three problems before and after, and where things lie."""
    before, after = summary["heldout_before"], summary["heldout_after"]
    error = summary["heldout_after_standard_error"]
    lines = [
        f"Held-out accuracy (temperature 1, {summary['heldout_problems']} problems): {before:.2f} before RL, "
        f"{after:.2f} after {summary['steps']} steps (standard error {error:.2f}); greedy "
        f"{summary['heldout_greedy_before']:.2f} to {summary['heldout_greedy_after']:.2f}.",
        f"Mean response: {summary['response_length_before']:.0f} tokens before, "
        f"{summary['response_length_after']:.0f} after. {_reading(summary)}",
        f"Staleness of the trained tokens: mean {summary['staleness_mean']:.2f}, at most "
        f"{summary['staleness_max']:.0f} policy versions. Busy: trainer {summary['trainer_busy']:.0%}, sampler "
        f"{summary['sampler_busy']:.0%}.",
        "",
        "Three held-out problems (the first three, not chosen):",
    ]
    for e in examples:
        lines += [f"  {_tail(e['prompt'])}", f"    before: {_tail(e['before'])}", f"    after:  {_tail(e['after'])}"]
    lines += [
        "",
        f"Everything is in {workdir}: learning_curve.png, summary.json, metrics.jsonl, samples.jsonl, checkpoints/.",
    ]
    return "\n".join(lines)


def _tail(text: str, characters: int = 90) -> str:
    """The end of a text on one line: of a long prompt or response the end says most."""
    line = " ".join(text.split())
    return line if len(line) <= characters else "... " + line[-characters:]


def _reading(summary: dict[str, Any]) -> str:
    rise = summary["heldout_after"] - summary["heldout_before"]
    margin = 3 * summary["heldout_after_standard_error"]
    if rise <= margin:
        return "The difference is within the noise of the measurement: nothing was learnt that this run can show."
    if summary["response_length_after"] > 1.3 * summary["response_length_before"]:
        return "The model learnt to show its work: the skill was taught by the warm start, RL brought it out."
    return "The model answers more of the problems correctly."
