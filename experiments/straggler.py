"""What one very slow sample does to the staleness of what is trained on, under each staleness bound.

    python -m experiments.straggler

A simulated clock and simulated tokens around the real coordinator (admission, groups, queue, ledger): a sampler that
draws one token per slot and tick, a trainer that takes so many ticks a step, and every response equally long except for
one that is SLOW_FACTOR times longer. Deterministic, a few seconds.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import pathlib
from typing import Any

import numpy as np

from areal_jax.rollout.coordinator import Coordinator, CoordinatorConfig
from areal_jax.rollout.evaluation import EvaluationBoard
from areal_jax.transport.messages import Report, SamplerStats
from areal_jax.types import NO_VERSION, PROMPT_VERSION, Prompt, Trajectory
from experiments import common

GROUP, BATCH, SLOTS = 4, 16, 64
LENGTH, SLOW_SAMPLE, SLOW_FACTOR = 40, 100, 12
"""Tokens of a response; which sample is slow, and by how much."""
CHUNK, TRAIN_TICKS, TICKS = 4, 16, 1600
"""Ticks between two reports of the sampler, and of a training step, and of a run."""
CONDITIONS = {
    "η = 0": (0.0, "train"),
    "η = 1": (1.0, "train"),
    "η = 4": (4.0, "train"),
    "η = 4, drop": (4.0, "drop"),
    "η = 4, mask_tokens": (4.0, "mask_tokens"),
    "η = ∞": (math.inf, "train"),
}


def main() -> None:
    cli = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cli.add_argument("--output", type=pathlib.Path, default=common.RESULTS / "straggler")
    options = cli.parse_args()
    steps, table = [], []
    for condition, (eta, over_stale) in CONDITIONS.items():
        run = simulate(eta, over_stale)
        steps += [{"condition": condition, **step} for step in run]
        slow = [s for s in run if s["slow_tokens"]]
        duration = SLOW_FACTOR * LENGTH
        table.append(
            {
                "condition": condition,
                f"steps begun in the {duration} ticks while it is drawn": sum(s["slow_is_out"] for s in run),
                f"in the last {duration} ticks": sum(s["tick"] >= TICKS - duration for s in run),
                "longest wait for a batch": max(s["waited"] for s in run),
                "slow sample trained at step": slow[0]["step"] if slow else "never",
                "its oldest token in the loss": slow[0]["oldest"] if slow else "-",
                "its tokens in the loss": slow[0]["slow_tokens"] if slow else 0,
                "oldest token in other groups": max(s["oldest_in_other_groups"] for s in run),
                "most over Eq. 3": int(max(s["over_eq3"] for s in run)) if math.isfinite(eta) else "-",
            }
        )
    common.write_csv(options.output / "steps.csv", steps)
    plot(options.output, steps)
    body = (
        f"Batches of {BATCH} samples in groups of {GROUP}, {SLOTS} slots, {LENGTH} tokens a response, a step of "
        f"training as long as {TRAIN_TICKS} tokens; sample {SLOW_SAMPLE} has {SLOW_FACTOR * LENGTH} tokens. Ages are "
        "in policy versions, at consumption. The last column is the most that floor((started - 1) / batch) - version "
        "- η ever was: Eq. 3 (arXiv 2505.24298) holds where it is not over 0.\n\n"
        + common.markdown_table(table)
        + "\n\n![straggler](straggler.png)\n\n"
        "Eq. 3 bounds how many samples may start, and with it the age of samples that are consumed in the order of "
        "their start. A slow sample is overtaken by later ones; but it and its group, which waits for it, stay among "
        "the η + 1 batches that may be under way. At η = 0 training stands still until it is done; at η = 1 what is "
        "left of the allowance is too little for the pipeline, and training slows down; at η = 4 nothing is lost. When "
        "the group is done its first tokens are as old as the steps that went by meanwhile, which may be far more than "
        "η. `rollout.over_stale` says what is then done with them."
    )
    common.write_report(options.output, "One very slow sample", "python -m experiments.straggler", body)


def simulate(eta: float, over_stale: str) -> list[dict[str, Any]]:
    """One run; a record per training step."""
    coordinator = make_coordinator(eta, over_stale)
    sampler = Sampler(coordinator)
    steps: list[dict[str, Any]] = []
    batch: list[Trajectory] = []
    busy_until, idle_since, tick, over = 0, 0, 0, -math.inf
    while tick < TICKS:
        if tick % CHUNK == 0:
            sampler.report()
            counts = coordinator.counts()
            started = counts["issued"] - counts["dropped"]
            if math.isfinite(eta):
                over = max(over, (started - 1) // BATCH - coordinator.version - eta)
        if batch and tick >= busy_until:
            coordinator.trained(batch)
            coordinator.publish(coordinator.version + 1)
            batch, idle_since = [], tick
        if not batch and (taken := coordinator.take_batch(coordinator.version, timeout=0.0)) is not None:
            batch, busy_until = taken, tick + TRAIN_TICKS
            step = describe(batch, coordinator.version, tick, tick - idle_since)
            steps.append(step | {"over_eq3": over, "slow_is_out": sampler.is_drawing(SLOW_SAMPLE)})
            over = -math.inf
        sampler.draw()
        tick += 1
    return steps


def make_coordinator(eta: float, over_stale: str) -> Coordinator:
    numbers = iter(range(10**6))

    def source() -> tuple[Prompt, dict[str, Any]]:
        return Prompt(next(numbers), np.array([3], np.int32), "", ""), {}

    config = CoordinatorConfig(
        group_size=GROUP, batch_samples=BATCH, max_staleness=eta, over_stale=over_stale, max_refills=0,
        injected_staleness=0, queue_capacity=common.UNBOUNDED, lease_timeout_seconds=1e9, temperature=1.0,
        max_new_tokens=SLOW_FACTOR * LENGTH,
    )  # fmt: skip
    return Coordinator(config, source, EvaluationBoard([], (), 1))


@dataclasses.dataclass
class _Slot:
    sample_id: int
    prompt_id: int
    left: int
    versions: list[int] = dataclasses.field(default_factory=list)


class Sampler:
    """Continuous batching without a model: takes new weights and new samples at its reports."""

    def __init__(self, coordinator: Coordinator):
        self._coordinator = coordinator
        self._slots: list[_Slot] = []
        self._finished: list[Trajectory] = []
        self._waiting: list[_Slot] = []
        self._sequence, self._version, self._credit = 0, 0, SLOTS

    def report(self) -> None:
        self._sequence += 1
        free = SLOTS - len(self._slots) - len(self._waiting)
        reply = self._coordinator.exchange(
            Report(
                "sampler", "1", self._coordinator.run, self._sequence, self._version, NO_VERSION,
                min(max(free, 0), self._credit), 0, tuple(self._finished), SamplerStats(),
            )
        )  # fmt: skip
        self._finished, self._version, self._credit = [], reply.version, reply.credits
        for lease in reply.leases:
            for i in lease.sample_ids:
                length = LENGTH * (SLOW_FACTOR if i == SLOW_SAMPLE else 1)
                self._waiting.append(_Slot(i, lease.prompt.prompt_id, length))
        while self._waiting and len(self._slots) < SLOTS:
            self._slots.append(self._waiting.pop(0))

    def is_drawing(self, sample_id: int) -> bool:
        return any(slot.sample_id == sample_id for slot in self._slots)

    def draw(self) -> None:
        """A token in every slot."""
        for slot in self._slots:
            slot.versions.append(self._version)
            slot.left -= 1
        self._finished += [_trajectory(slot) for slot in self._slots if not slot.left]
        self._slots = [slot for slot in self._slots if slot.left]


def _trajectory(slot: _Slot) -> Trajectory:
    n = 1 + len(slot.versions)
    return Trajectory(
        sample_id=slot.sample_id,
        prompt_id=slot.prompt_id,
        tokens=np.full(n, 3, np.int32),
        behaviour_logprobs=np.zeros(n, np.float32),
        policy_versions=np.array([PROMPT_VERSION, *slot.versions], np.int32),
        loss_mask=np.array([0, *[1] * (n - 1)], np.float32),
        finish_reason="stop",
        reward=float(slot.sample_id % 2),
    )


def describe(batch: list[Trajectory], version: int, tick: int, waited: int) -> dict[str, Any]:
    """A training step's record: ages of the tokens that are in the loss."""
    ages = [(t, version - t.policy_versions[t.loss_mask > 0]) for t in batch]
    every = np.concatenate([a for _, a in ages])
    others = np.concatenate([a for t, a in ages if t.prompt_id != SLOW_SAMPLE // GROUP])
    return {
        "step": version + 1,
        "tick": tick,
        "waited": waited,
        "oldest": int(every.max()),
        "mean": float(every.mean()),
        "oldest_in_other_groups": int(others.max()),
        "slow_tokens": sum(len(a) for t, a in ages if t.sample_id == SLOW_SAMPLE),
    }


def plot(directory: pathlib.Path, steps: list[dict[str, Any]]) -> None:
    """Oldest and mean age at every step; when each step began."""
    plt = common.pyplot()
    figure, panels = plt.subplots(1, 3, figsize=(15, 4.4), layout="constrained")
    for i, condition in enumerate(CONDITIONS):
        mine = [s for s in steps if s["condition"] == condition]
        for panel, column in zip(panels, ("oldest", "mean", "tick"), strict=True):
            panel.plot(
                [s["step"] for s in mine], [s[column] for s in mine], color=f"C{i}", lw=6 - i,
                label=condition,
            )  # fmt: skip
    labels = ("oldest token of the batch (versions)", "mean age of its tokens (versions)", "began at (ticks)")
    for panel, label in zip(panels, labels, strict=True):
        panel.set(xlabel="training step", ylabel=label)
        panel.grid(alpha=0.3)
    panels[0].legend(fontsize=8)
    figure.suptitle(f"One response of {SLOW_FACTOR * LENGTH} tokens among responses of {LENGTH}")
    common.save_figure(figure, directory / "straggler")


if __name__ == "__main__":
    main()
