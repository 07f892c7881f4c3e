"""From the rewards of a batch to an advantage for every token: numpy on the host, outside the gradient.

Ragged arrays are lists of one array per trajectory, index t for token t; what is not counted (mask 0) is 0.
Groups are keyed by prompt id and may be ragged.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int
from scipy.signal import lfilter

Rewards = Float[np.ndarray, " n"]
GroupIds = Int[np.ndarray, " n"]
Ragged = list[np.ndarray]
"""n float32 arrays, the i-th [T_i]."""


@dataclasses.dataclass(frozen=True)
class AdvantageConfig:
    """The keys of `config.advantage`."""

    name: str = "group_norm"
    gamma: float = 1.0
    """Discount per token, of 'gae' and 'reinforce_pp'."""
    lam: float = 1.0
    """lambda of 'gae'."""
    group_baseline: bool = False
    """'reinforce_pp': take the group's mean off the rewards first."""
    whiten: bool = False
    """Whiten over the tokens of the batch afterwards."""


class Outcomes(NamedTuple):
    """What is known of a batch of n trajectories when their advantages are estimated."""

    rewards: Rewards
    """Shaped; each belongs to the last counted token."""
    group_ids: GroupIds
    masks: Ragged
    token_rewards: Ragged | None = None
    """Added at each token (a KL penalty)."""
    values: Ragged | None = None
    """The critic's estimate before each token is drawn."""


def group_norm(rewards: Rewards, group_ids: GroupIds) -> Rewards:
    """GRPO (arXiv 2402.03300): (R - group mean) / (group std + 1e-6), ddof 1.

    A group of one, or one whose rewards are all the same, gets exactly 0.
    """
    advantages = np.zeros(len(rewards), np.float64)
    for members in groups_with_signal(rewards, group_ids):
        group = rewards[members].astype(np.float64)
        advantages[members] = (group - group.mean()) / (group.std(ddof=1) + 1e-6)
    return advantages.astype(np.float32)


def dr_grpo(rewards: Rewards, group_ids: GroupIds) -> Rewards:
    """Dr. GRPO (arXiv 2503.20783): R - group mean, not divided by the deviation."""
    advantages = np.zeros(len(rewards), np.float64)
    for members in groups_with_signal(rewards, group_ids):
        group = rewards[members].astype(np.float64)
        advantages[members] = group - group.mean()
    return advantages.astype(np.float32)


def rloo(rewards: Rewards, group_ids: GroupIds) -> Rewards:
    """Leave one out (arXiv 2402.14740): (R - group mean) * G / (G - 1)."""
    advantages = np.zeros(len(rewards), np.float64)
    for members in groups_with_signal(rewards, group_ids):
        group = rewards[members].astype(np.float64)
        advantages[members] = (group - group.mean()) * len(group) / (len(group) - 1)
    return advantages.astype(np.float32)


def batch_norm(outcomes: Outcomes, config: AdvantageConfig) -> Ragged:
    """Rewards whitened over the tokens of the whole batch (the AReaL paper, section 5); all equal gives exactly 0."""
    del config
    return whiten(_constant(_sums(outcomes), outcomes.masks), outcomes.masks)


def gae(outcomes: Outcomes, config: AdvantageConfig) -> Ragged:
    """Generalised advantage estimation (arXiv 1506.02438): A_t = delta_t + gamma lambda A_t+1 with
    delta_t = r_t + gamma V_t+1 - V_t, over the counted tokens only; the reward is at the last of them and V is 0 after
    it. With gamma = lambda = 1, A_t = R - V_t. Raises ValueError without values."""
    if outcomes.values is None:
        raise ValueError("gae needs the values of a critic")
    advantages = []
    for rewards, values, mask in zip(_per_token(outcomes), outcomes.values, outcomes.masks, strict=True):
        counted = mask > 0
        v = values[counted].astype(np.float64)
        deltas = rewards[counted] + config.gamma * np.append(v[1:], 0.0)[: len(v)] - v
        advantages.append(_placed(_discounted(deltas, config.gamma * config.lam), counted))
    return advantages


def reinforce_pp(outcomes: Outcomes, config: AdvantageConfig) -> Ragged:
    """REINFORCE++ (arXiv 2501.03262): discounted returns of each token, whitened over the tokens of the batch.

    With `group_baseline` the mean of the group is taken off the rewards first.
    """
    if config.group_baseline:
        outcomes = outcomes._replace(rewards=dr_grpo(outcomes.rewards, outcomes.group_ids))
    return whiten(returns(outcomes, config.gamma), outcomes.masks)


def returns(outcomes: Outcomes, gamma: float) -> Ragged:
    """The discounted sum of the rewards from each counted token on."""
    counted = [m > 0 for m in outcomes.masks]
    return [_placed(_discounted(r[c], gamma), c) for r, c in zip(_per_token(outcomes), counted, strict=True)]


def per_sequence(estimate: Callable[[Rewards, GroupIds], Rewards]) -> Callable[[Outcomes, AdvantageConfig], Ragged]:
    """An estimator of one value per trajectory, given to each of its tokens; token rewards are summed into it."""

    def estimator(outcomes: Outcomes, config: AdvantageConfig) -> Ragged:
        del config
        return _constant(estimate(_sums(outcomes), outcomes.group_ids), outcomes.masks)

    return estimator


ADVANTAGES: dict[str, Callable[[Outcomes, AdvantageConfig], Ragged]] = {
    "group_norm": per_sequence(group_norm),
    "dr_grpo": per_sequence(dr_grpo),
    "rloo": per_sequence(rloo),
    "batch_norm": batch_norm,
    "reinforce_pp": reinforce_pp,
    "gae": gae,
}


def estimate(outcomes: Outcomes, config: AdvantageConfig) -> Ragged:
    """By the estimator that config.name says; not whitened yet, since a critic's returns follow from it."""
    return ADVANTAGES[config.name](outcomes, config)


def whiten(values: Sequence[np.ndarray], masks: Sequence[np.ndarray]) -> Ragged:
    """(x - mean) / (std + 1e-6) over all counted tokens; constants give 0."""
    counted = [m > 0 for m in masks]
    x = np.concatenate([v[c] for v, c in zip(values, counted, strict=True)]).astype(np.float64)
    if len(x) == 0 or np.all(x == x[0]):
        return [np.zeros(len(m), np.float32) for m in masks]
    mean, scale = x.mean(), x.std() + 1e-6
    return [np.where(c, (v - mean) / scale, 0.0).astype(np.float32) for v, c in zip(values, counted, strict=True)]


def groups_with_signal(rewards: Rewards, group_ids: GroupIds) -> list[np.ndarray]:
    """Index arrays of the groups that carry a signal: more than one member, not all rewards equal."""
    groups = (np.flatnonzero(group_ids == g) for g in np.unique(group_ids))
    return [m for m in groups if len(m) > 1 and np.any(rewards[m] != rewards[m[0]])]


def _sums(outcomes: Outcomes) -> Rewards:
    """Each trajectory's reward, its token rewards included."""
    if outcomes.token_rewards is None:
        return outcomes.rewards
    extra = [np.sum(r[m > 0], dtype=np.float64) for r, m in zip(outcomes.token_rewards, outcomes.masks, strict=True)]
    return (outcomes.rewards + np.array(extra)).astype(np.float32)


def _per_token(outcomes: Outcomes) -> Ragged:
    """Rewards where they are given: the trajectory's at its last counted token."""
    rewards = []
    for i, mask in enumerate(outcomes.masks):
        token = np.zeros(len(mask)) if outcomes.token_rewards is None else outcomes.token_rewards[i].astype(np.float64)
        counted = np.flatnonzero(mask > 0)
        if len(counted):
            token[counted[-1]] += outcomes.rewards[i]
        rewards.append(token)
    return rewards


def _discounted(x: np.ndarray, factor: float) -> np.ndarray:
    """y_t = x_t + factor y_t+1."""
    return lfilter([1.0], [1.0, -factor], x[::-1])[::-1] if len(x) else x


def _placed(values: np.ndarray, counted: np.ndarray) -> np.ndarray:
    out = np.zeros(len(counted), np.float32)
    out[counted] = values
    return out


def _constant(values: Rewards, masks: Sequence[np.ndarray]) -> Ragged:
    return [np.where(m > 0, v, 0.0).astype(np.float32) for v, m in zip(values, masks, strict=True)]
