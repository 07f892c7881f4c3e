"""What is orthogonal to the objective: weights, rejections, penalties, aggregation; and `policy_loss`, which joins all.

The notation is that of `losses.py`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from areal_jax.rl import sequences
from areal_jax.rl.losses import LOSSES, LossConfig, TokenInputs, TokenLosses, log_ratio, reads_proximal

AGGREGATIONS = ("token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "constant")


class PolicyLoss(NamedTuple):
    """A micro-batch's part of the loss. Sums and denominators of all micro-batches add up; one division follows."""

    total: Float[Array, ""]
    denominator: Float[Array, ""]
    inputs: TokenInputs
    """Clean, with the proximal log-probs that were used."""
    recomputed: Float[Array, "R L"]
    """The proximal log-probs that were given, clean: with 'loglinear' for comparison."""
    tokens: TokenLosses
    """`loss` is the policy's part: weights and rejections applied, penalties not."""
    dual_clipped: Float[Array, "R L"]
    rejected: Float[Array, "R L"]
    """1 on tokens that a mask or OPSM took out of the sum; they stay in the denominator."""
    gradient: Float[Array, "R L"]
    """d(sum of loss) / d logprobs, before the division."""
    kl: Float[Array, "R L"]
    """To the reference; 0 without one."""


def policy_loss(
    x: TokenInputs,
    entropy: Float[Array, "R L"],
    reference_logprobs: Float[Array, "R L"] | None,
    config: LossConfig,
) -> PolicyLoss:
    """The loss of one micro-batch. config: resolved.

    reference_logprobs: needed for kl_coefficient > 0; raises ValueError without them.
    """
    if config.kl_coefficient and reference_logprobs is None:
        raise ValueError(f"kl_coefficient is {config.kl_coefficient} and there are no log-probs of a reference")
    x = clean(x)
    recomputed = x.proximal_logprobs
    x = with_proximal(x, config)

    def of_policy(logprobs: Array) -> tuple[Array, tuple[TokenLosses, Array, Array]]:
        seen = x._replace(logprobs=logprobs)
        tokens = LOSSES[config.name].per_token(seen, config)
        tokens, dual = dual_clip(tokens, seen, config)
        kept = keep_tokens(seen, config)
        weight = importance_weight(seen, config)
        rejected = ((weight == 0.0) | (kept == 0.0)) & (x.mask > 0)
        tokens = tokens._replace(loss=kept * weight * tokens.loss * x.mask)
        return jnp.sum(tokens.loss), (tokens, dual, rejected.astype(jnp.float32))

    _, (tokens, dual, rejected) = of_policy(x.logprobs)
    gradient = jax.grad(lambda t: of_policy(t)[0])(jax.lax.stop_gradient(x.logprobs))
    loss = tokens.loss - config.entropy_coefficient * jnp.where(x.mask > 0, entropy, 0.0)
    kl = jnp.zeros_like(loss)
    if config.kl_coefficient and reference_logprobs is not None:
        kl = kl_penalty(x.logprobs, jnp.where(x.mask > 0, reference_logprobs, 0.0), config.kl_estimator)
        loss = loss + config.kl_coefficient * kl
    total, denominator = aggregate(loss, x.mask, x.segment_ids, config.aggregation, config.constant_length)
    return PolicyLoss(total, denominator, x, recomputed, tokens, dual, rejected, gradient, kl)


def clean(x: TokenInputs) -> TokenInputs:
    """Zeros wherever the mask is 0: every ratio there is 1, every loss and gradient 0, whatever stood there."""
    counted = x.mask > 0
    changed = {
        name: jnp.where(counted, getattr(x, name), 0)
        for name in ("logprobs", "proximal_logprobs", "behaviour_logprobs", "advantages", "staleness")
    }
    return x._replace(**changed)


def with_proximal(x: TokenInputs, config: LossConfig) -> TokenInputs:
    """`proximal_logprobs` by config.proximal; no gradient goes through them.

    'recompute': as given. 'behaviour': p = b. 'loglinear' (A-3PO, arXiv 2512.06547): p = b + alpha sg(t - b) with
    alpha = d / (d + 1): the policy before the step lies d of the d + 1 versions from b to t, so a token of the newest
    version has p = b exactly. Then rho = r^(1 - alpha) and w = r^alpha.
    """
    if config.proximal == "behaviour":
        return x._replace(proximal_logprobs=x.behaviour_logprobs)
    if config.proximal == "loglinear":
        return x._replace(proximal_logprobs=loglinear(x))
    return x


def loglinear(x: TokenInputs) -> Float[Array, "R L"]:
    d = x.staleness.astype(jnp.float32)
    step = jax.lax.stop_gradient(log_ratio(x.logprobs, x.behaviour_logprobs))
    return x.behaviour_logprobs + d / (d + 1.0) * step


def importance_weight(x: TokenInputs, config: LossConfig) -> Float[Array, "R L"]:
    """What the policy loss is multiplied by: sg of w clamped (TIS), masked (IcePop, MIS), or 1.

    At 'sequence' level w is the geometric mean over the sequence's tokens.
    """
    if config.importance_weight == "none":
        return jnp.ones_like(x.logprobs)
    log_w = log_ratio(x.proximal_logprobs, x.behaviour_logprobs)
    if config.importance_level == "sequence":
        log_w = sequences.sequence_means(log_w, x.mask, x.segment_ids)
    weight = jax.lax.stop_gradient(jnp.exp(log_w))
    if config.importance_weight == "clamp":
        return jnp.minimum(weight, config.importance_cap)
    return jnp.where((weight >= config.importance_low) & (weight <= config.importance_cap), weight, 0.0)


def dual_clip(tokens: TokenLosses, x: TokenInputs, config: LossConfig) -> tuple[TokenLosses, Float[Array, "R L"]]:
    """Dual clip (arXiv 1912.09729): where A < 0 the loss is at most -c A; and 1 where that bound."""
    if not config.dual_clip:
        return tokens, jnp.zeros_like(tokens.loss)
    bound = -config.dual_clip * x.advantages
    binds = (x.advantages < 0) & (tokens.loss > bound)
    return tokens._replace(loss=jnp.where(binds, bound, tokens.loss)), binds.astype(jnp.float32)


def keep_tokens(x: TokenInputs, config: LossConfig) -> Float[Array, "R L"]:
    """OPSM (off-policy sequence masking, DeepSeek-V3.2, arXiv 2512.02556): 0 on tokens with A < 0 of sequences whose
    mean(b - t) is over the threshold, else 1."""
    if not config.opsm_threshold:
        return jnp.ones_like(x.logprobs)
    drift = sequences.sequence_means(-log_ratio(x.logprobs, x.behaviour_logprobs), x.mask, x.segment_ids)
    return 1.0 - jax.lax.stop_gradient((x.advantages < 0) & (drift > config.opsm_threshold)).astype(jnp.float32)


def kl_penalty(
    logprobs: Float[Array, "R L"], reference_logprobs: Float[Array, "R L"], estimator: str
) -> Float[Array, "R L"]:
    """KL(policy || reference) per token. 'k2': (t - ref)^2 / 2. 'k3': its value is exp(ref - t) - 1 - (ref - t), its
    gradient that of k2, which estimates the gradient of the KL without bias on the policy's own tokens (k3's does not).
    """
    log_r = log_ratio(reference_logprobs, logprobs)
    k2 = 0.5 * jnp.square(log_r)
    if estimator == "k2":
        return k2
    return k2 + jax.lax.stop_gradient(jnp.expm1(log_r) - log_r - k2)


def aggregate(
    loss: Float[Array, "R L"],
    mask: Float[Array, "R L"],
    segment_ids: Int[Array, "R L"],
    how: str,
    constant_length: int = 1,
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """(sum, denominator) of a micro-batch; both add up over micro-batches and devices, and the loss is their quotient.

    'token_mean': sum of m l / sum of m. Over the sequences with a token that counts: 'seq_mean_token_mean' (GRPO) the
    mean of their means, 'seq_mean_token_sum' the mean of their sums, 'constant' (Dr. GRPO, arXiv 2503.20783) the mean
    of their sums over `constant_length`.
    """
    counted = jnp.where(mask > 0, loss, 0.0)
    tokens = sequences.sequence_sums(mask, segment_ids)  # [R, S]
    count = jnp.sum((tokens > 0).astype(jnp.float32))
    if how == "token_mean":
        return jnp.sum(counted), jnp.sum(mask)
    if how == "seq_mean_token_mean":
        return jnp.sum(counted / jnp.maximum(sequences.spread(tokens, segment_ids), 1.0)), count
    if how == "seq_mean_token_sum":
        return jnp.sum(counted), count
    return jnp.sum(counted), count * constant_length


class EffectiveSample(NamedTuple):
    """Sums over sequences of their weight and its square, in units of the largest weight: no product overflows."""

    peak: Any
    """log of the largest weight; -inf without a sequence."""
    weights: Any
    squares: Any
    sequences: Any
    """How many."""


def effective_sample(log_weights: Float[Array, "R L"], x: TokenInputs) -> EffectiveSample:
    """Of one micro-batch's sequences, each weighted with the product of its tokens' weights, uncapped."""
    present = sequences.sequence_sums(x.mask, x.segment_ids) > 0
    log_w = jax.lax.stop_gradient(sequences.sequence_sums(log_weights * x.mask, x.segment_ids))
    peak = jnp.max(jnp.where(present, log_w, -jnp.inf))
    weight = jnp.where(present, jnp.exp(jnp.where(present, log_w - peak, 0.0)), 0.0)
    return EffectiveSample(peak, jnp.sum(weight), jnp.sum(jnp.square(weight)), jnp.sum(present.astype(jnp.float32)))


def join(a: EffectiveSample, b: EffectiveSample, xp: Any = jnp) -> EffectiveSample:
    """Of both together; on the host with xp = numpy."""
    peak = xp.maximum(a.peak, b.peak)
    # without a sequence there is no peak to compare with: -inf - -inf would be NaN
    ours, theirs = (
        xp.exp(xp.where(s.sequences > 0, s.peak, 0.0) - xp.where(s.sequences > 0, peak, 0.0)) for s in (a, b)
    )
    return EffectiveSample(
        peak,
        a.weights * ours + b.weights * theirs,
        a.squares * ours**2 + b.squares * theirs**2,
        a.sequences + b.sequences,
    )


def effective_share(sample: EffectiveSample, xp: Any = jnp) -> Any:
    """ESS / B with ESS = (sum w)^2 / sum w^2 over B sequences; in (0, 1], and 1 without a sequence."""
    share = sample.weights**2 / xp.maximum(sample.squares * sample.sequences, 1e-30)
    return xp.where(sample.sequences > 0, xp.minimum(share, 1.0), 1.0)


def step_scale(sample: EffectiveSample) -> Float[Array, ""]:
    """sqrt(min(1, ESS / B)), what the learning rate is multiplied by (VCPO, arXiv 2602.17616)."""
    return jnp.sqrt(effective_share(sample))


def batch_statistic(x: TokenInputs, config: LossConfig) -> Float[Array, ""]:
    """The objective's statistic over a whole optimiser batch; arrays of any shape, `logprobs` read only where the
    objective says so."""
    statistic = LOSSES[config.name].statistic
    return jnp.zeros(()) if statistic is None else jax.lax.stop_gradient(statistic(clean(x), config))


def needs_proximal_forward(config: LossConfig) -> bool:
    """Whether the policy before the step has to be run over the batch."""
    return reads_proximal(config) and (config.proximal == "recompute" or config.proximal_check)
