"""The queue of groups: samples of one prompt are trained on together, once all of them are in."""

from __future__ import annotations

import collections
import dataclasses
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
