"""Policy objectives: pure functions of per-token arrays.

Notation, per token, float32: b behaviour log-prob (recorded at sampling), p proximal log-prob (the policy just before
this training step, held fixed for the whole step), t (theta) the policy being differentiated, A advantage,
d = trainer version - the token's version >= 0. r = exp(t - b), rho = exp(t - p), w = exp(p - b), so r = w * rho.
Losses are minimised. Nothing masked reaches a value or a gradient: log-ratios are set to 0 where the mask is 0 before
any exponential, and clamped to +-20.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

LOG_RATIO_BOUND = 20.0


@dataclasses.dataclass(frozen=True)
class LossConfig:
    """What a policy objective needs to know; the keys of `config.loss`."""

    name: str
    clip_low: float = 0.2
    clip_high: float = 0.2
    importance_weight: str = "clamp"
    """How w corrects the decoupled objectives: 'clamp' (min(w, cap)) or 'none'."""
    importance_cap: float = 5.0
    staleness_base: str = "decoupled_ppo"
    staleness_decay: float = 0.95
    staleness_floor: float = 0.1
    entropy_coefficient: float = 0.0


class TokenInputs(NamedTuple):
    """What an objective sees; every array [R, L]."""

    logprobs: Float[Array, "R L"]
    proximal_logprobs: Float[Array, "R L"]
    behaviour_logprobs: Float[Array, "R L"]
    advantages: Float[Array, "R L"]
    mask: Float[Array, "R L"]
    staleness: Int[Array, "R L"]


class TokenLosses(NamedTuple):
    """Per-token results; every array [R, L]."""

    loss: Float[Array, "R L"]
    clipped_low: Float[Array, "R L"]
    """1 where the lower bound decided the loss (A < 0, ratio below 1 - eps)."""
    clipped_high: Float[Array, "R L"]
    """1 where the upper bound decided the loss (A > 0, ratio above 1 + eps)."""
    epsilon: Float[Array, "R L"]
    """The clip range in force (the upper one)."""


def log_ratio(numerator: Float[Array, "R L"], denominator: Float[Array, "R L"], mask: Float[Array, "R L"]) -> Array:
    """numerator - denominator, 0 where masked, clamped to +-20 so that no exponential overflows."""
    difference = jnp.where(mask > 0, numerator, 0.0) - jnp.where(mask > 0, denominator, 0.0)
    return _clamp(difference, -LOG_RATIO_BOUND, LOG_RATIO_BOUND)


def ppo(x: TokenInputs, config: LossConfig) -> TokenLosses:
    """PPO (arXiv 1707.06347): max(-r A, -clip(r, 1 - eps_low, 1 + eps_high) A), trust region around the behaviour."""
    return _clipped_surrogate(x, x.behaviour_logprobs, config, jnp.ones_like(x.logprobs))


def decoupled_ppo(x: TokenInputs, config: LossConfig) -> TokenLosses:
    """Decoupled PPO (arXiv 2110.00641; AReaL 2505.24298 Eq. 5): sg(w) max(-rho A, -clip(rho) A).

    The trust region is around the proximal policy; w = exp(p - b) corrects for who sampled.
    """
    return _weighted(_clipped_surrogate(x, x.proximal_logprobs, config, jnp.ones_like(x.logprobs)), x, config)


def staleness_ppo(x: TokenInputs, config: LossConfig) -> TokenLosses:
    """`staleness_base` with a clip range that shrinks with each token's staleness: eps(d) = eps max(floor, decay^d)."""
    scale = jnp.maximum(config.staleness_floor, config.staleness_decay ** x.staleness.astype(jnp.float32))
    if config.staleness_base == "ppo":
        return _clipped_surrogate(x, x.behaviour_logprobs, config, scale)
    return _weighted(_clipped_surrogate(x, x.proximal_logprobs, config, scale), x, config)


def sft(x: TokenInputs, config: LossConfig) -> TokenLosses:
    """Supervised cross-entropy, -t: the warm start's objective."""
    del config
    zeros = jnp.zeros_like(x.logprobs)
    return TokenLosses(-jnp.where(x.mask > 0, x.logprobs, 0.0), zeros, zeros, zeros)


LOSSES: dict[str, Callable[[TokenInputs, LossConfig], TokenLosses]] = {
    "ppo": ppo,
    "decoupled_ppo": decoupled_ppo,
    "staleness_ppo": staleness_ppo,
    "sft": sft,
}


def uses_proximal(config: LossConfig) -> bool:
    """Whether the objective reads proximal_logprobs (else the proximal forward can be skipped)."""
    return config.name == "decoupled_ppo" or (
        config.name == "staleness_ppo" and config.staleness_base == "decoupled_ppo"
    )


def importance_weight(x: TokenInputs, config: LossConfig) -> Float[Array, "R L"]:
    """sg(min(exp(p - b), cap)), or 1 with importance_weight 'none'."""
    if config.importance_weight == "none":
        return jnp.ones_like(x.logprobs)
    weight = jnp.exp(log_ratio(x.proximal_logprobs, x.behaviour_logprobs, x.mask))
    return jax.lax.stop_gradient(jnp.minimum(weight, config.importance_cap))


def _weighted(losses: TokenLosses, x: TokenInputs, config: LossConfig) -> TokenLosses:
    return losses._replace(loss=importance_weight(x, config) * losses.loss)


def _clipped_surrogate(x: TokenInputs, anchor: Array, config: LossConfig, scale: Array) -> TokenLosses:
    """max(-ratio A, -clip(ratio, 1 - eps_low s, 1 + eps_high s) A) with ratio = exp(t - anchor)."""
    ratio = jnp.exp(log_ratio(x.logprobs, anchor, x.mask))
    advantages = jnp.where(x.mask > 0, x.advantages, 0.0)
    low, high = 1.0 - config.clip_low * scale, 1.0 + config.clip_high * scale
    unclipped = -ratio * advantages
    clipped = -_clamp(ratio, low, high) * advantages
    binds = (clipped > unclipped) & (x.mask > 0)
    return TokenLosses(
        loss=jnp.where(binds, clipped, unclipped),
        clipped_low=(binds & (advantages < 0)).astype(jnp.float32),
        clipped_high=(binds & (advantages > 0)).astype(jnp.float32),
        epsilon=config.clip_high * scale,
    )


def _clamp(x: Array, low: Array | float, high: Array | float) -> Array:
    """jnp.clip, but with gradient exactly 1 at the bounds (jnp.clip's is 1/2 there)."""
    return jnp.where(x < low, low, jnp.where(x > high, high, x))
