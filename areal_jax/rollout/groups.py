"""The queue of groups: samples of one prompt are trained on together, once all of them are in."""

from __future__ import annotations

import collections
import dataclasses
import time
from typing import Any

import numpy as np

from areal_jax.rollout.ledger import Ledger
from areal_jax.types import Prompt, Trajectory


@dataclasses.dataclass
class Group:
    """A prompt whose samples are being drawn, or wait for the trainer."""

    prompt: Prompt
    sample_ids: tuple[int, ...]
    arrived: list[Trajectory] = dataclasses.field(default_factory=list)
    completed: float = 0.0
    """time.monotonic() when the last of its samples arrived."""

    def has_signal(self) -> bool:
        """Whether its samples differ in reward."""
        return any(t.reward != self.arrived[0].reward for t in self.arrived)

    def save(self) -> dict[str, Any]:
        """JSON-able; what has arrived is not saved, but drawn again."""
        prompt = dataclasses.asdict(self.prompt) | {"tokens": self.prompt.tokens.tolist()}
        return {"prompt": prompt, "sample_ids": list(self.sample_ids)}

    @classmethod
    def restore(cls, saved: dict[str, Any]) -> Group:
        prompt = Prompt(**saved["prompt"] | {"tokens": np.asarray(saved["prompt"]["tokens"], np.int32)})
        return cls(prompt, tuple(saved["sample_ids"]))


class GroupQueue:
    """Open groups, and the complete ones in the order of their completion. Not thread-safe: its owner locks."""

    def __init__(self, ledger: Ledger):
        self._ledger = ledger
        self._open: dict[int, Group] = {}
        self._complete: collections.deque[Group] = collections.deque()
        self.samples = 0
        """In complete groups."""

    def open(self, group: Group) -> None:
        self._open[group.prompt.prompt_id] = group

    def arrive(self, trajectory: Trajectory) -> None:
        """Takes in a leased sample; its group is queued when it is the last."""
        self._ledger.finish(trajectory.sample_id)
        group = self._open[trajectory.prompt_id]
        group.arrived.append(trajectory)
        if len(group.arrived) == len(group.sample_ids):
            self._ledger.queue(group.sample_ids)
            group.completed = time.monotonic()
            self._complete.append(self._open.pop(trajectory.prompt_id))
            self.samples += len(group.sample_ids)

    def take(self) -> Group | None:
        """The group that has been complete for longest."""
        if not self._complete:
            return None
        group = self._complete.popleft()
        self.samples -= len(group.sample_ids)
        return group

    def groups(self) -> list[Group]:
        """All that have not been taken."""
        return [*self._complete, *self._open.values()]


@dataclasses.dataclass
class Intake:
    """A batch being put together from groups, and what was left out of it."""

    max_staleness: float
    over_stale: str
    """As `handle_over_stale` has it."""
    most_without_signal: float
    """Dynamic sampling: so many samples of groups whose rewards are all the same are passed over; 0 takes them all."""
    samples: list[Trajectory] = dataclasses.field(default_factory=list)
    ages: list[float] = dataclasses.field(default_factory=list)
    """Seconds that each group waited in the queue."""
    over_stale_ids: list[int] = dataclasses.field(default_factory=list)
    """Ids of samples dropped for their age,"""
    without_signal: list[int] = dataclasses.field(default_factory=list)
    """and of those in groups passed over for others, whose rewards differ."""

    def add(self, group: Group, version: int) -> dict[str, list[int]]:
        """Takes a group for training at `version`; returns the ids left out, by reason."""
        self.ages.append(time.monotonic() - group.completed)
        if not group.has_signal() and len(self.without_signal) + len(group.arrived) <= self.most_without_signal:
            self.without_signal += group.sample_ids
            return {"zero_variance": list(group.sample_ids)}
        kept = [handle_over_stale(t, version, self.max_staleness, self.over_stale) for t in group.arrived]
        left_out = [t.sample_id for t, k in zip(group.arrived, kept, strict=True) if k is None]
        self.samples += [t for t in kept if t is not None]
        self.over_stale_ids += left_out
        return {"over_stale": left_out}

    def metrics(self) -> dict[str, float]:
        taken = len(self.samples) + len(self.over_stale_ids) + len(self.without_signal)
        return {
            "staleness/dropped_fraction": len(self.over_stale_ids) / max(1, taken),
            "staleness/queue_age_seconds": float(np.mean(self.ages)) if self.ages else 0.0,
            "group/refilled_fraction": len(self.without_signal) / max(1, taken),
        }


def handle_over_stale(trajectory: Trajectory, version: int, bound: float, policy: str) -> Trajectory | None:
    """The trajectory as it is to be trained on at `version`; None if it is dropped.

    policy: 'train' leaves it as it is; 'drop' drops it if any token is older than `bound`; 'mask_tokens' takes the
    tokens older than `bound` out of the loss.
    """
    if policy == "train" or version - trajectory.oldest_version() <= bound:
        return trajectory
    if policy == "drop":
        return None
    fresh = version - trajectory.policy_versions <= bound
    return dataclasses.replace(trajectory, loss_mask=trajectory.loss_mask * fresh)
