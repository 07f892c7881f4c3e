"""What happens to rewards between the grader and the advantages."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
from jaxtyping import Float

from areal_jax.rl.advantages import groups_with_signal
from areal_jax.types import Trajectory


@dataclasses.dataclass(frozen=True)
class ShapingConfig:
    """The keys of `config.reward` that shape; the defaults change nothing but a reward over 20."""

    bias: float = 0.0
    scale: float = 1.0
    clip: float = 20.0
    overlong_buffer: int = 0
    """Tokens before the limit in which a response is penalised more and more; 0 is off."""
    overlong_factor: float = 1.0
    """The penalty at the limit."""
    truncated: str = "keep"
    """Of samples cut at their limit: 'keep' the reward, 'zero_reward', or 'mask' (their tokens leave the loss)."""
    max_response_length: int = 1


def shape(trajectories: Sequence[Trajectory], config: ShapingConfig) -> Float[np.ndarray, " n"]:
    """clip((R + penalty + bias) scale, +-clip), in AReaL's order; then 0 for truncated samples with 'zero_reward'.

    The overlong penalty (DAPO, arXiv 2503.14476): min(0, -(L - (L_max - L_buffer)) / L_buffer * factor).
    """
    rewards = np.array([t.reward for t in trajectories], np.float64)
    if config.overlong_buffer:
        lengths = np.array([t.response_length for t in trajectories])
        over = lengths - (config.max_response_length - config.overlong_buffer)
        rewards += np.minimum(0.0, -over / config.overlong_buffer * config.overlong_factor)
    shaped = np.clip((rewards + config.bias) * config.scale, -config.clip, config.clip)
    if config.truncated == "zero_reward":
        shaped = np.where([is_truncated(t) for t in trajectories], 0.0, shaped)
    return shaped.astype(np.float32)


def mask_truncated(trajectories: Sequence[Trajectory], config: ShapingConfig) -> list[Trajectory]:
    """With 'mask', truncated samples without a token that counts: they inform their group's baseline and nothing else
    (DAPO's overlong filtering)."""
    return [masked(t) if config.truncated == "mask" and is_truncated(t) else t for t in trajectories]


def mask_zero_variance(trajectories: Sequence[Trajectory]) -> list[Trajectory]:
    """Groups whose rewards are all the same, without a token that counts: they leave numerator and denominator."""
    rewards = np.array([t.reward for t in trajectories])
    groups = np.array([t.prompt_id for t in trajectories])
    kept = {i for members in groups_with_signal(rewards, groups) for i in members}
    return [t if i in kept else masked(t) for i, t in enumerate(trajectories)]


def is_truncated(trajectory: Trajectory) -> bool:
    return trajectory.finish_reason == "length"


def masked(trajectory: Trajectory) -> Trajectory:
    return dataclasses.replace(trajectory, loss_mask=np.zeros_like(trajectory.loss_mask))


def kl_reward(trajectory: Trajectory, reference_logprobs: np.ndarray, coefficient: float) -> Float[np.ndarray, " T"]:
    """-coefficient (b - ref) at each counted token, 0 elsewhere: the k1 estimate of KL(behaviour || reference), whose
    samples the tokens are."""
    counted = trajectory.loss_mask > 0
    difference = np.where(counted, trajectory.behaviour_logprobs - reference_logprobs, 0.0)
    return (-coefficient * difference).astype(np.float32)
