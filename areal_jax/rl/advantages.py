"""Advantages from the rewards of a batch: pure numpy functions of (rewards [n], group ids [n]).

One value per trajectory; groups are keyed by prompt id and may be ragged. They live outside the gradient.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from jaxtyping import Float, Int

Rewards = Float[np.ndarray, " n"]
GroupIds = Int[np.ndarray, " n"]


def group_norm(rewards: Rewards, group_ids: GroupIds) -> Rewards:
    """GRPO (arXiv 2402.03300): (R - group mean) / (group std + 1e-6), ddof 1.

    A group of one, or one whose rewards are all the same, gets exactly 0.
    """
    advantages = np.zeros(len(rewards), np.float64)
    for members in _groups(rewards, group_ids):
        group = rewards[members].astype(np.float64)
        advantages[members] = (group - group.mean()) / (group.std(ddof=1) + 1e-6)
    return advantages.astype(np.float32)


def dr_grpo(rewards: Rewards, group_ids: GroupIds) -> Rewards:
    """Dr. GRPO (arXiv 2503.20783): R - group mean, not divided by the deviation."""
    advantages = np.zeros(len(rewards), np.float64)
    for members in _groups(rewards, group_ids):
        group = rewards[members].astype(np.float64)
        advantages[members] = group - group.mean()
    return advantages.astype(np.float32)


def rloo(rewards: Rewards, group_ids: GroupIds) -> Rewards:
    """Leave one out (arXiv 2402.14740): (R - group mean) * G / (G - 1)."""
    advantages = np.zeros(len(rewards), np.float64)
    for members in _groups(rewards, group_ids):
        group = rewards[members].astype(np.float64)
        advantages[members] = (group - group.mean()) * len(group) / (len(group) - 1)
    return advantages.astype(np.float32)


def batch_norm(rewards: Rewards, group_ids: GroupIds) -> Rewards:
    """Rewards whitened over the whole batch (the AReaL paper, section 5); all equal gives exactly 0."""
    del group_ids
    return whiten(rewards)


ADVANTAGES: dict[str, Callable[[Rewards, GroupIds], Rewards]] = {
    "group_norm": group_norm,
    "dr_grpo": dr_grpo,
    "rloo": rloo,
    "batch_norm": batch_norm,
}


def whiten(values: Rewards, weights: Rewards | None = None) -> Rewards:
    """(x - mean) / (std + 1e-6), the moments weighted (by each sequence's token count, say); constants give 0."""
    if len(values) == 0 or np.all(values == values[0]):
        return np.zeros(len(values), np.float32)
    x = values.astype(np.float64)
    mean = np.average(x, weights=weights)
    std = np.sqrt(np.average(np.square(x - mean), weights=weights))
    return ((x - mean) / (std + 1e-6)).astype(np.float32)


def _groups(rewards: Rewards, group_ids: GroupIds) -> list[np.ndarray]:
    """Index arrays of the groups that carry a signal: more than one member, not all rewards equal."""
    groups = (np.flatnonzero(group_ids == g) for g in np.unique(group_ids))
    return [m for m in groups if len(m) > 1 and np.any(rewards[m] != rewards[m[0]])]
