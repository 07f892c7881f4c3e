"""Policy objectives: pure functions of per-token arrays, and what they have in common.

Notation, per token, float32: b behaviour log-prob (recorded at sampling), p proximal log-prob (the policy just before
this training step, held fixed for the whole step), t (theta) the policy being differentiated, A advantage,
d = trainer version - the token's version >= 0. r = exp(t - b), rho = exp(t - p), w = exp(p - b), so r = w rho; sg is
stop_gradient. Losses are minimised. docs/algorithms.md is the table of all of them.

`policy_loss` is the way in: it sets everything masked to 0 before any exponential, so that nothing masked reaches a
value or a gradient, and applies what is orthogonal to the objective (`corrections.py`). Log-ratios are clamped to +-20.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from areal_jax.rl import sequences

LOG_RATIO_BOUND = 20.0


@dataclasses.dataclass(frozen=True)
class LossConfig:
    """What a policy objective needs to know: the keys of `config.loss`, 'auto' resolved (`resolve`)."""

    name: str
    aggregation: str = "token_mean"
    """A name in `corrections.AGGREGATIONS`."""
    constant_length: int = 1
    """Tokens: what 'constant' divides each sequence's sum by."""
    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float = 0.0
    """c of dual clip; 0 is off."""
    proximal: str = "auto"
    """'recompute', 'loglinear' or 'behaviour'."""
    proximal_check: bool = False
    """With 'loglinear': recompute it as well, to measure how far off it is."""
    importance_weight: str = "auto"
    """How w corrects: 'clamp' (min(w, cap)), 'mask' (w where low <= w <= cap, else 0) or 'none'."""
    importance_level: str = "token"
    """'token', or 'sequence': the geometric mean of w over the sequence."""
    importance_cap: float = 5.0
    importance_low: float = 0.5
    opsm_threshold: float = 0.0
    """Mean of b - t over a sequence above which its tokens with A < 0 are rejected; 0 is off."""
    staleness_base: str = "decoupled_ppo"
    staleness_scope: str = "token"
    """Whose staleness narrows the clip range: 'token', 'sequence' (the mean of its tokens) or 'batch' (the mean)."""
    staleness_decay: float = 0.95
    staleness_floor: float = 0.1
    gspo_clip_low: float = 3e-4
    gspo_clip_high: float = 4e-4
    cispo_low: float = 0.0
    cispo_high: float = 5.0
    sapo_positive: float = 1.0
    sapo_negative: float = 1.05
    m2po_threshold: float = 0.04
    dppo_threshold: float = 0.2
    dppo_penalty: float = 1e-3
    kl_coefficient: float = 0.0
    kl_estimator: str = "k3"
    entropy_coefficient: float = 0.0


class TokenInputs(NamedTuple):
    """What an objective sees; every array [R, L] but the last. Inside an objective all are 0 where masked."""

    logprobs: Float[Array, "R L"]
    proximal_logprobs: Float[Array, "R L"]
    behaviour_logprobs: Float[Array, "R L"]
    advantages: Float[Array, "R L"]
    mask: Float[Array, "R L"]
    staleness: Int[Array, "R L"]
    """Versions, >= 0."""
    segment_ids: Int[Array, "R L"]
    """1, 2, ... within a row; 0 is padding."""
    statistic: Float[Array, ""]
    """The objective's statistic of the whole optimiser batch (`Objective.statistic`); 0 for those without."""


class TokenLosses(NamedTuple):
    """Per-token results; every array [R, L]."""

    loss: Float[Array, "R L"]
    clipped_low: Float[Array, "R L"]
    """1 where the lower bound decided the loss (PPO: A < 0, ratio below 1 - eps)."""
    clipped_high: Float[Array, "R L"]
    """1 where the upper bound decided the loss (PPO: A > 0, ratio above 1 + eps)."""
    epsilon: Float[Array, "R L"]
    """The clip range in force (the upper one); 0 without one."""


Statistic = Callable[[TokenInputs, LossConfig], Float[Array, ""]]


class Objective(NamedTuple):
    """An entry of LOSSES: the function and what the rest must know about it."""

    per_token: Callable[[TokenInputs, LossConfig], TokenLosses]
    anchor: str
    """Whose log-probs the ratio is against: 'behaviour' (the ratio itself corrects for who sampled), 'proximal', 'none'
    (no ratio), or 'staleness_base' (that of the objective named there)."""
    surrogate: bool = False
    """Whether the loss is -ratio A, clipped or not, which dual clip can bound."""
    statistic: Statistic | None = None
    """Of the whole optimiser batch, whatever the micro-batches; the arrays given have any shape."""
    statistic_of_policy: bool = False
    """Whether the statistic reads the log-probs of the policy: that costs a forward of the minibatch."""
    reads: tuple[str, ...] = ()
    """The keys of LossConfig that it has to itself, or shares with some objectives only."""


# --- objectives ---


def ppo(x: TokenInputs, config: LossConfig) -> TokenLosses:
    """PPO (arXiv 1707.06347): max(-r A, -clip(r, 1 - eps_low, 1 + eps_high) A), trust region around the behaviour."""
    return _clipped(jnp.exp(log_ratio(x.logprobs, x.behaviour_logprobs)), x, config.clip_low, config.clip_high)


def decoupled_ppo(x: TokenInputs, config: LossConfig) -> TokenLosses:
    """Decoupled PPO (arXiv 2110.00641; AReaL 2505.24298 Eq. 5): max(-rho A, -clip(rho) A), to be weighted by sg(w).

    The trust region is around the proximal policy; w = exp(p - b) corrects for who sampled.
    """
    return _clipped(jnp.exp(log_ratio(x.logprobs, x.proximal_logprobs)), x, config.clip_low, config.clip_high)


def staleness_ppo(x: TokenInputs, config: LossConfig) -> TokenLosses:
    """`staleness_base` with a clip range that shrinks with staleness: eps(d) = eps max(floor, decay^d)."""
    d = x.staleness.astype(jnp.float32)
    if config.staleness_scope == "sequence":
        d = sequences.sequence_means(d, x.mask, x.segment_ids)
    if config.staleness_scope == "batch":
        d = jnp.full_like(d, x.statistic)
    scale = jnp.maximum(config.staleness_floor, config.staleness_decay**d)
    anchor = x.behaviour_logprobs if config.staleness_base == "ppo" else x.proximal_logprobs
    return _clipped(jnp.exp(log_ratio(x.logprobs, anchor)), x, config.clip_low * scale, config.clip_high * scale)


def mean_staleness(x: TokenInputs, config: LossConfig) -> Float[Array, ""]:
    """Of the batch's tokens, in versions."""
    del config
    return jnp.sum(x.staleness * x.mask) / jnp.maximum(jnp.sum(x.mask), 1.0)


def gspo(x: TokenInputs, config: LossConfig) -> TokenLosses:
    """GSPO (arXiv 2507.18071): PPO's clip of the sequence's ratio s = exp(mean(t - b)).

    In its token form exp(t - sg(t) + sg(log s)): the value is s, and each token's gradient is s times its own.
    """
    log_s = sequences.sequence_means(log_ratio(x.logprobs, x.behaviour_logprobs), x.mask, x.segment_ids)
    ratio = jnp.exp(x.logprobs - _sg(x.logprobs) + _sg(log_s))
    return _clipped(ratio, x, config.gspo_clip_low, config.gspo_clip_high)


def cispo(x: TokenInputs, config: LossConfig) -> TokenLosses:
    """CISPO (arXiv 2506.13585): -sg(clip(r, low, high)) A t. The weight is clipped, no token loses its gradient."""
    ratio = _sg(jnp.exp(log_ratio(x.logprobs, x.behaviour_logprobs)))
    loss = -clamp(ratio, config.cispo_low, config.cispo_high) * x.advantages * x.logprobs
    counted = x.mask > 0
    return _unclipped(loss)._replace(
        clipped_low=((ratio < config.cispo_low) & counted).astype(jnp.float32),
        clipped_high=((ratio > config.cispo_high) & counted).astype(jnp.float32),
    )


def sapo(x: TokenInputs, config: LossConfig) -> TokenLosses:
    """SAPO (arXiv 2511.20347): -(4 / tau) sigmoid(tau (r - 1)) A, tau by the sign of A: a soft gate for the clip."""
    ratio = jnp.exp(log_ratio(x.logprobs, x.behaviour_logprobs))
    tau = jnp.where(x.advantages > 0, config.sapo_positive, config.sapo_negative)
    return _unclipped(-(4.0 / tau) * jax.nn.sigmoid(tau * (ratio - 1.0)) * x.advantages)


def m2po(x: TokenInputs, config: LossConfig) -> TokenLosses:
    """M2PO (arXiv 2510.01161): -M r A without a clip; M = 0 where (log r)^2 is over the statistic `m2po_bound` among
    the tokens whose ratio has moved the way that A pushes it (A > 0, r > 1; A < 0, r < 1)."""
    del config
    log_r = log_ratio(x.logprobs, x.behaviour_logprobs)
    dropped = _sg(_pushed(x, log_r) & (jnp.square(log_r) > x.statistic))
    loss = jnp.where(dropped, 0.0, -jnp.exp(log_r) * x.advantages)
    return _unclipped(loss)._replace(
        clipped_low=(dropped & (x.advantages < 0)).astype(jnp.float32),
        clipped_high=(dropped & (x.advantages > 0)).astype(jnp.float32),
    )


def m2po_bound(x: TokenInputs, config: LossConfig) -> Float[Array, ""]:
    """The largest (log r)^2 that may stay: the mean of all that are not larger is at most `m2po_threshold`.

    Over the pushed tokens of the batch (see `m2po`); infinity if none is over it.
    """
    log_r = log_ratio(x.logprobs, x.behaviour_logprobs)
    squares = jnp.where(_pushed(x, log_r), jnp.square(log_r), jnp.inf)
    ordered = jnp.sort(squares.ravel())
    count = jnp.arange(1, ordered.size + 1, dtype=jnp.float32)
    means = jnp.cumsum(jnp.where(jnp.isfinite(ordered), ordered, 0.0)) / count  # nondecreasing
    # equal values stay or go together: a value stays if the mean up to its last occurrence does
    stays = jnp.isfinite(ordered) & (
        means[jnp.searchsorted(ordered, ordered, side="right") - 1] <= config.m2po_threshold
    )
    none_over = jnp.all(stays | ~jnp.isfinite(ordered))
    return jnp.where(none_over, jnp.inf, jnp.max(jnp.where(stays, ordered, -1.0)))


def topr(x: TokenInputs, config: LossConfig) -> TokenLosses:
    """TOPR (arXiv 2503.14286): A >= 0: -A t; A < 0: -sg(clip(exp(sum(t - b)), 0, 1)) A t, the sum over the sequence.

    Good samples are learnt whoever drew them; bad ones count less the less the policy would still draw them.
    """
    del config
    log_r = jnp.where(x.mask > 0, log_ratio(x.logprobs, x.behaviour_logprobs), 0.0)
    total = sequences.spread(sequences.sequence_sums(log_r, x.segment_ids), x.segment_ids)
    taper = _sg(jnp.exp(clamp(total, -LOG_RATIO_BOUND, 0.0)))
    return _unclipped(-jnp.where(x.advantages < 0, taper, 1.0) * x.advantages * x.logprobs)


def dppo(x: TokenInputs, config: LossConfig) -> TokenLosses:
    """DPPO with binary total variation (arXiv 2602.04879): -r A, but 0 where the token's probability has moved the way
    that A pushes it by more than the threshold; plus penalty * (t - b)^2 everywhere, which is not the paper's but that
    of Kimi K2.5 (arXiv 2602.02276); threshold and penalty are prime-rl's defaults."""
    log_r = log_ratio(x.logprobs, x.behaviour_logprobs)
    moved = jnp.exp(x.logprobs) - jnp.exp(x.behaviour_logprobs)
    high = _sg((x.advantages > 0) & (moved > config.dppo_threshold) & (x.mask > 0))
    low = _sg((x.advantages < 0) & (moved < -config.dppo_threshold) & (x.mask > 0))
    loss = jnp.where(high | low, 0.0, -jnp.exp(log_r) * x.advantages) + config.dppo_penalty * jnp.square(log_r)
    return _unclipped(loss)._replace(clipped_low=low.astype(jnp.float32), clipped_high=high.astype(jnp.float32))


def reinforce(x: TokenInputs, config: LossConfig) -> TokenLosses:
    """Policy gradient (Williams 1992): -A t. Uncorrected unless an importance weight is asked for."""
    del config
    return _unclipped(-x.advantages * x.logprobs)


def sft(x: TokenInputs, config: LossConfig) -> TokenLosses:
    """Supervised cross-entropy, -t: the warm start's objective."""
    del config
    return _unclipped(-x.logprobs)


CLIP = ("clip_low", "clip_high")
STALENESS = ("staleness_base", "staleness_scope", "staleness_decay", "staleness_floor")

LOSSES: dict[str, Objective] = {
    "ppo": Objective(ppo, "behaviour", surrogate=True, reads=CLIP),
    "decoupled_ppo": Objective(decoupled_ppo, "proximal", surrogate=True, reads=CLIP),
    "staleness_ppo": Objective(
        staleness_ppo, "staleness_base", surrogate=True, statistic=mean_staleness, reads=CLIP + STALENESS
    ),
    "gspo": Objective(gspo, "behaviour", surrogate=True, reads=("gspo_clip_low", "gspo_clip_high")),
    "cispo": Objective(cispo, "behaviour", reads=("cispo_low", "cispo_high")),
    "sapo": Objective(sapo, "behaviour", reads=("sapo_positive", "sapo_negative")),
    "m2po": Objective(
        m2po, "behaviour", surrogate=True, statistic=m2po_bound, statistic_of_policy=True, reads=("m2po_threshold",)
    ),
    "topr": Objective(topr, "behaviour"),
    "dppo": Objective(dppo, "behaviour", reads=("dppo_threshold", "dppo_penalty")),
    "reinforce": Objective(reinforce, "none"),
    "sft": Objective(sft, "none"),
}
"""name -> the objective; a config file may enter its own."""


# --- which log-probs an objective needs ---


def anchor(config: LossConfig) -> str:
    """'behaviour', 'proximal' or 'none': whose log-probs the objective's ratio is against."""
    found = LOSSES[config.name].anchor
    return LOSSES[config.staleness_base].anchor if found == "staleness_base" else found


def resolve(config: LossConfig) -> LossConfig:
    """The same with 'auto' decided: objectives around the proximal policy recompute it and clamp their weights."""
    weight = config.importance_weight
    if weight == "auto":
        weight = "clamp" if anchor(config) == "proximal" else "none"
    proximal = config.proximal
    if proximal == "auto":
        proximal = "recompute"
    return dataclasses.replace(config, importance_weight=weight, proximal=proximal)


def reads_proximal(config: LossConfig) -> bool:
    """Whether the objective or its weights read proximal log-probs, however they are come by."""
    return anchor(config) == "proximal" or config.importance_weight in ("clamp", "mask")


# --- parts of objectives ---


def log_ratio(numerator: Float[Array, "R L"], denominator: Float[Array, "R L"]) -> Float[Array, "R L"]:
    """numerator - denominator, clamped to +-20 so that no exponential overflows (the gradient is 0 beyond)."""
    return clamp(numerator - denominator, -LOG_RATIO_BOUND, LOG_RATIO_BOUND)


def clamp(x: Array, low: Array | float, high: Array | float) -> Array:
    """jnp.clip, but with gradient exactly 1 at the bounds (jnp.clip's is 1/2 there)."""
    return jnp.where(x < low, low, jnp.where(x > high, high, x))


def _clipped(ratio: Array, x: TokenInputs, low: Array | float, high: Array | float) -> TokenLosses:
    """max(-ratio A, -clip(ratio, 1 - low, 1 + high) A)."""
    unclipped = -ratio * x.advantages
    clipped = -clamp(ratio, 1.0 - low, 1.0 + high) * x.advantages
    binds = clipped > unclipped
    return TokenLosses(
        loss=jnp.where(binds, clipped, unclipped),
        clipped_low=(binds & (x.advantages < 0)).astype(jnp.float32),
        clipped_high=(binds & (x.advantages > 0)).astype(jnp.float32),
        epsilon=jnp.broadcast_to(jnp.asarray(high, jnp.float32), ratio.shape),
    )


def _unclipped(loss: Array) -> TokenLosses:
    zeros = jnp.zeros_like(loss)
    return TokenLosses(loss, zeros, zeros, zeros)


def _pushed(x: TokenInputs, log_r: Array) -> Array:
    """Tokens whose ratio has moved the way that the advantage pushes it: a trust region may only bind there."""
    return (x.mask > 0) & (((x.advantages > 0) & (log_r > 0)) | ((x.advantages < 0) & (log_r < 0)))


def _sg(x: Array) -> Array:
    return jax.lax.stop_gradient(x)
