"""What is measured of a training step. Every name is listed in docs/algorithms.md.

`token_sums` runs inside the train step and returns sums, minima, maxima and histograms over tokens, which combine
across micro-batches, minibatches and devices; `finalize` turns them into named metrics on the host, over all tokens and
for each bucket of staleness. The rest needs no device.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from areal_jax.rl.corrections import EffectiveSample, PolicyLoss, effective_sample, effective_share, join
from areal_jax.rl.losses import LOG_RATIO_BOUND, LossConfig, log_ratio, reads_proximal
from areal_jax.types import Trajectory

Sums = dict[str, Any]
"""Of arrays, and `EffectiveSample`s."""

BUCKETS = {"d0": 0, "d1": 1, "d2": 2, "d3-4": 3, "d5-8": 5, "d9-16": 9, "d17+": 17}
"""name -> the smallest staleness in it."""

BINS = 513  # odd: a ratio of exactly 1 is the middle of a bin
KNEE = 1e-3  # log-ratios below it share bins of even width; above it a bin is 4 % wide

MEANS = {
    "clip/low_fraction": "clip_low",
    "clip/high_fraction": "clip_high",
    "clip/dual_fraction": "clip_dual",
    "clip/zero_gradient_fraction": "zero_gradient",
    "clip/effective_epsilon_mean": "epsilon",
    "importance/r_mean": "r",
    "importance/log_ratio_clamped_fraction": "clamped",
    "importance/rejected_fraction": "rejected",
    "behaviour_kl/k1": "behaviour_k1",
    "behaviour_kl/k3": "behaviour_k3",
    "policy/entropy": "entropy",
    "loss/policy": "loss",
}
PROXIMAL_MEANS = {
    "importance/w_mean": "w",
    "importance/above_cap_fraction": "above_cap",
    "behaviour_kl/proximal_k1": "proximal_k1",
    "behaviour_kl/proximal_k3": "proximal_k3",
    "behaviour_kl/update_k1": "update_k1",
    "behaviour_kl/update_k3": "update_k3",
}
CHECK_MEANS = {"proximal/abs_error": "proximal_error", "proximal/w_error": "w_error"}
"""metric -> the sum that it is the mean of, per token."""


def token_sums(loss: PolicyLoss, entropy: Float[Array, "R L"], config: LossConfig) -> Sums:
    """Of one micro-batch. Keys starting with 'max_' and 'min_' combine so; arrays [B] are by bucket of staleness."""
    x, mask = loss.inputs, loss.inputs.mask
    r_log = log_ratio(x.logprobs, x.behaviour_logprobs)
    values = {
        "tokens": mask,
        "loss": loss.tokens.loss,
        "entropy": jnp.where(mask > 0, entropy, 0.0),
        "clip_low": loss.tokens.clipped_low,
        "clip_high": loss.tokens.clipped_high,
        "clip_dual": loss.dual_clipped,
        "rejected": loss.rejected,
        "zero_gradient": (loss.gradient == 0.0).astype(jnp.float32),
        "epsilon": loss.tokens.epsilon,
        "clamped": (jnp.abs(r_log) >= LOG_RATIO_BOUND).astype(jnp.float32),
        "reference_kl": loss.kl,
        "r": jnp.exp(r_log),
        "r_squared": jnp.exp(2 * r_log),
        "behaviour_k1": -r_log,
        "behaviour_k3": _k3(r_log),
    }
    epsilon = loss.tokens.epsilon
    sums = {
        "histogram_r": _histogram(r_log, mask),
        "max_r": _largest(jnp.exp(r_log), mask),
        "min_r": -_largest(-jnp.exp(r_log), mask),
        "min_epsilon": -_largest(-epsilon, mask),
        "sample_r": effective_sample(r_log, x),
    }
    if reads_proximal(config):
        w_log = log_ratio(x.proximal_logprobs, x.behaviour_logprobs)
        update = log_ratio(x.logprobs, x.proximal_logprobs)
        w = jnp.exp(w_log)
        values |= {
            "w": w,
            "w_squared": jnp.square(w),
            "above_cap": (w > config.importance_cap).astype(jnp.float32),
            "proximal_k1": -w_log,
            "proximal_k3": _k3(w_log),
            "update_k1": -update,
            "update_k3": _k3(update),
        }
        sums |= {
            "histogram_w": _histogram(w_log, mask),
            "max_w": _largest(w, mask),
            "min_w": -_largest(-w, mask),
            "sample_w": effective_sample(w_log, x),
        }
        if config.proximal_check:
            exact = jnp.exp(log_ratio(loss.recomputed, x.behaviour_logprobs))
            values |= {
                "proximal_error": jnp.abs(x.proximal_logprobs - loss.recomputed),
                "w_error": jnp.abs(w - exact),
            }
    return sums | _by_bucket(values, x.staleness, mask)


def _by_bucket(values: dict[str, Array], staleness: Array, mask: Array) -> Sums:
    """Sums over the counted tokens of each bucket, [B]; values are finite everywhere."""
    lowest = jnp.array(list(BUCKETS.values()))
    bucket = jnp.searchsorted(lowest, staleness, side="right") - 1  # [R, L]
    member = jax.nn.one_hot(bucket, len(BUCKETS)) * mask[..., None]  # [R, L, B]
    stacked = jnp.stack(list(values.values()))  # [K, R, L]
    sums = jnp.einsum("krl,rlb->kb", stacked, member, precision=jax.lax.Precision.HIGHEST)
    return dict(zip(values, sums, strict=True))


def _k3(log_r: Array) -> Array:
    return jnp.expm1(log_r) - log_r


def _largest(values: Array, mask: Array) -> Array:
    return jnp.max(jnp.where(mask > 0, values, -jnp.inf))


def _histogram(log_r: Array, mask: Array) -> Array:
    """[BINS] counts over +-LOG_RATIO_BOUND, the bins' width growing with the distance from 0."""
    place = (jnp.arcsinh(log_r / KNEE) / np.arcsinh(LOG_RATIO_BOUND / KNEE) + 1.0) / 2.0
    index = jnp.clip((place * BINS).astype(jnp.int32), 0, BINS - 1)
    return jnp.zeros(BINS, jnp.float32).at[index.ravel()].add(mask.ravel())


def quantile(histogram: np.ndarray, q: float) -> float:
    """Of the ratio (not its log), as the middle of the bin that holds it; 1 for an empty histogram."""
    total = histogram.sum()
    if total == 0:
        return 1.0
    index = int(np.searchsorted(np.cumsum(histogram), q * total))
    place = 2.0 * (min(index, BINS - 1) + 0.5) / BINS - 1.0
    return float(np.exp(KNEE * np.sinh(place * np.arcsinh(LOG_RATIO_BOUND / KNEE))))


def combine(a: Sums, b: Sums, xp: Any = jnp) -> Sums:
    """Sums of two micro-batches together; on the host, of minibatches, with xp = numpy."""
    joined = {}
    for key, value in a.items():
        if isinstance(value, EffectiveSample):
            joined[key] = join(value, b[key], xp)
        elif key.startswith("max_"):
            joined[key] = xp.maximum(value, b[key])
        elif key.startswith("min_"):
            joined[key] = xp.minimum(value, b[key])
        else:
            joined[key] = value + b[key]
    return joined


def empty(like: Sums) -> Sums:
    """What changes nothing when combined; like: arrays or their shapes."""
    fill = {"max_": -np.inf, "min_": np.inf}
    nothing = EffectiveSample(jnp.float32(-np.inf), *(jnp.float32(0) for _ in range(3)))
    return {
        k: nothing if isinstance(v, EffectiveSample) else jnp.full(v.shape, fill.get(k[:4], 0.0), v.dtype)
        for k, v in like.items()
    }


def finalize(sums: dict[str, Any], config: LossConfig) -> dict[str, float]:
    """The named metrics of one training step, from `token_sums`; of a bucket with its name behind a slash."""
    tokens = sums["tokens"]
    n = max(float(tokens.sum()), 1.0)
    names = MEANS | (PROXIMAL_MEANS if reads_proximal(config) else {}) | (CHECK_MEANS if config.proximal_check else {})
    if config.kl_coefficient:
        names = names | {"loss/reference_kl": "reference_kl"}
    weight = "w" if reads_proximal(config) else "r"  # what corrects for who sampled
    metrics = {name: float(sums[key].sum()) / n for name, key in names.items()}
    metrics["importance/ess_token"] = _share(sums[weight].sum(), sums[f"{weight}_squared"].sum(), tokens.sum())
    metrics["importance/ess_sequence"] = float(effective_share(sums[f"sample_{weight}"], np))
    for bucket, count in zip(range(len(tokens)), tokens, strict=True):
        if count > 0:
            label = list(BUCKETS)[bucket]
            metrics[f"staleness/fraction/{label}"] = float(count) / n
            metrics |= {f"{name}/{label}": float(sums[key][bucket] / count) for name, key in names.items()}
            squares = sums[f"{weight}_squared"][bucket]
            metrics[f"importance/ess_token/{label}"] = _share(sums[weight][bucket], squares, count)
    ratios = ["r"] + (["w"] if reads_proximal(config) else [])
    for ratio in ratios if tokens.sum() > 0 else []:
        metrics[f"importance/{ratio}_min"] = float(sums[f"min_{ratio}"])
        metrics[f"importance/{ratio}_max"] = float(sums[f"max_{ratio}"])
        for q in (1, 50, 99):
            metrics[f"importance/{ratio}_p{q}"] = quantile(sums[f"histogram_{ratio}"], q / 100)
    if tokens.sum() > 0:
        metrics["clip/effective_epsilon_min"] = float(sums["min_epsilon"])
    return metrics


def _share(weights: Any, squares: Any, count: Any) -> float:
    """Effective over actual sample size; 1 for an empty sample."""
    return float(weights) ** 2 / (float(squares) * float(count)) if count > 0 else 1.0


def staleness_metrics(trajectories: Sequence[Trajectory], version: int) -> dict[str, Any]:
    """How old the tokens of a batch that count are, in policy versions, when the trainer at `version` consumes them.

    `staleness/hist` is a list: tokens of staleness 0, 1, 2, ... A sequence is as old as its oldest token. All are 0 for
    a batch without a token that counts. Raises ValueError if a token (even one that does not count) is newer than the
    trainer, which would mean broken version stamps.
    """
    newest = max(int(t.policy_versions.max()) for t in trajectories)
    if newest > version:
        raise ValueError(f"a token carries version {newest}, newer than the trainer's {version}")
    per_sequence = [(version - t.policy_versions)[t.loss_mask > 0] for t in trajectories if t.loss_mask.any()]
    per_sequence = per_sequence or [np.zeros(1, np.int32)]
    tokens = np.concatenate(per_sequence)
    oldest = np.array([d.max() for d in per_sequence])
    distinct = np.array([len(np.unique(d)) for d in per_sequence])
    metrics: dict[str, Any] = {}
    for level, values in (("token", tokens), ("sequence", oldest)):
        metrics |= {
            f"staleness/{level}_mean": float(values.mean()),
            f"staleness/{level}_p50": float(np.quantile(values, 0.5)),
            f"staleness/{level}_p95": float(np.quantile(values, 0.95)),
            f"staleness/{level}_max": float(values.max()),
        }
    metrics["staleness/hist"] = np.bincount(tokens).tolist()
    metrics["staleness/versions_per_sequence"] = float(distinct.mean())
    metrics["staleness/mixed_fraction"] = float((distinct > 1).mean())
    return metrics


def batch_metrics(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Rewards, lengths and groups of a batch; a response is correct if its reward is positive."""
    rewards = np.array([t.reward for t in trajectories])
    lengths = np.array([t.response_length for t in trajectories])
    truncated = np.array([t.finish_reason == "length" for t in trajectories])
    prompt_ids = np.array([t.prompt_id for t in trajectories])
    groups = [rewards[prompt_ids == p] for p in np.unique(prompt_ids)]
    metrics = {
        "reward/mean": float(rewards.mean()),
        "group/zero_std_fraction": float(np.mean([np.all(g == g[0]) for g in groups])),
        "group/all_pass_fraction": float(np.mean([np.all(g > 0) for g in groups])),
        "group/all_fail_fraction": float(np.mean([np.all(g <= 0) for g in groups])),
    }
    everything = np.ones(len(rewards), bool)
    for prefix, chosen in (("", everything), ("correct_", rewards > 0), ("incorrect_", rewards <= 0)):
        if chosen.any():
            metrics[f"length/{prefix}mean"] = float(lengths[chosen].mean())
            metrics[f"length/{prefix}max"] = float(lengths[chosen].max())
            metrics[f"length/{prefix}truncated_fraction"] = float(truncated[chosen].mean())
    return metrics


def advantage_metrics(advantages: Sequence[np.ndarray], masks: Sequence[np.ndarray]) -> dict[str, float]:
    """Over the tokens that count; {} if none does."""
    a = np.concatenate([x[m > 0] for x, m in zip(advantages, masks, strict=True)])
    if not len(a):
        return {}
    return {
        "advantage/mean": float(a.mean()),
        "advantage/std": float(a.std()),
        "advantage/positive_fraction": float((a > 0).mean()),
    }


def value_metrics(
    values: Sequence[np.ndarray], returns: Sequence[np.ndarray], masks: Sequence[np.ndarray]
) -> dict[str, float]:
    """Explained variance of the returns: 1 - Var(G - V) / Var(G); 0 where the returns do not vary by more than their
    rounding."""
    v, g = (np.concatenate([x[m > 0] for x, m in zip(a, masks, strict=True)]) for a in (values, returns))
    if not len(g):
        return {}
    g, v = g.astype(np.float64), v.astype(np.float64)
    varies = np.ptp(g) > 1e-5 * max(np.abs(g).max(), np.abs(v).max())
    explained = 1.0 - float(np.var(g - v) / np.var(g)) if varies else 0.0
    return {"value/explained_variance": explained, "value/mean": float(v.mean())}
