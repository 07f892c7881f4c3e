"""Sums over tokens that become the training metrics.

`token_sums` runs inside the train step and returns plain masked sums (and maxima), which add up across micro-batches
and devices; `finalize` turns them into the named metrics on the host. `staleness_metrics` needs no device.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from areal_jax.rl.losses import LOG_RATIO_BOUND, LossConfig, TokenInputs, TokenLosses, log_ratio, uses_proximal
from areal_jax.types import Trajectory

Sums = dict[str, Array]


def token_sums(x: TokenInputs, losses: TokenLosses, entropy: Float[Array, "R L"], config: LossConfig) -> Sums:
    """Masked sums of one micro-batch; keys starting with 'max_' combine by maximum."""
    mask = x.mask

    def total(values: Array) -> Array:
        return jnp.sum(jnp.where(mask > 0, values, 0.0))

    r_log = log_ratio(x.logprobs, x.behaviour_logprobs, mask)
    w_log = log_ratio(x.proximal_logprobs, x.behaviour_logprobs, mask)
    weight = jnp.exp(w_log)
    return {
        "tokens": jnp.sum(mask),
        "loss": total(losses.loss),
        "entropy": total(entropy),
        "clip_low": total(losses.clipped_low),
        "clip_high": total(losses.clipped_high),
        "epsilon": total(losses.epsilon),
        "log_ratio_clamped": total((jnp.abs(r_log) >= LOG_RATIO_BOUND).astype(jnp.float32)),
        "kl_k1": total(-r_log),
        "kl_k3": total(jnp.exp(r_log) - 1.0 - r_log),
        "r": total(jnp.exp(r_log)),
        "w": total(weight),
        "w_squared": total(jnp.square(weight)),
        "w_above_cap": total((weight > config.importance_cap).astype(jnp.float32)),
        "max_w": jnp.max(jnp.where(mask > 0, weight, 0.0)),
        "max_r": jnp.max(jnp.where(mask > 0, jnp.exp(r_log), 0.0)),
    }


def combine(a: Sums, b: Sums) -> Sums:
    """Sums of two micro-batches together, inside the train step."""
    return {k: jnp.maximum(a[k], b[k]) if k.startswith("max_") else a[k] + b[k] for k in a}


def combine_hosted(parts: Sequence[dict[str, float]]) -> dict[str, float]:
    """Sums of several minibatches together, on the host."""
    return {k: (max if k.startswith("max_") else sum)(part[k] for part in parts) for k in parts[0]}


def finalize(sums: dict[str, float], config: LossConfig) -> dict[str, float]:
    """The named metrics of one training step from its sums."""
    n = max(sums["tokens"], 1.0)
    metrics = {
        "loss/policy": sums["loss"] / n,
        "policy/entropy": sums["entropy"] / n,
        "clip/low_fraction": sums["clip_low"] / n,
        "clip/high_fraction": sums["clip_high"] / n,
        "clip/effective_epsilon_mean": sums["epsilon"] / n,
        "importance/log_ratio_clamped_fraction": sums["log_ratio_clamped"] / n,
        "importance/r_mean": sums["r"] / n,
        "importance/r_max": sums["max_r"],
        "behaviour_kl/k1": sums["kl_k1"] / n,
        "behaviour_kl/k3": sums["kl_k3"] / n,
    }
    if uses_proximal(config):
        metrics |= {
            "importance/w_mean": sums["w"] / n,
            "importance/w_max": sums["max_w"],
            "importance/above_cap_fraction": sums["w_above_cap"] / n,
            "importance/ess_token": sums["w"] ** 2 / max(n * sums["w_squared"], 1e-30),
        }
    return metrics


def staleness_metrics(trajectories: Sequence[Trajectory], version: int) -> dict[str, float]:
    """How old the tokens of a batch are, in policy versions, when the trainer at `version` consumes them.

    Raises ValueError if a token is newer than the trainer, which would mean broken version stamps.
    """
    per_sequence = [version - t.policy_versions[t.prompt_length :] for t in trajectories]
    tokens = np.concatenate(per_sequence)
    if tokens.min() < 0:
        raise ValueError(f"a token carries version {version - tokens.min()}, newer than the trainer's {version}")
    oldest = np.array([d.max() for d in per_sequence])
    distinct = np.array([len(np.unique(d)) for d in per_sequence])
    metrics: dict[str, float] = {}
    for level, values in (("token", tokens), ("sequence", oldest)):
        metrics |= {
            f"staleness/{level}_mean": float(values.mean()),
            f"staleness/{level}_p50": float(np.quantile(values, 0.5)),
            f"staleness/{level}_p95": float(np.quantile(values, 0.95)),
            f"staleness/{level}_max": float(values.max()),
        }
    metrics["staleness/versions_per_sequence"] = float(distinct.mean())
    metrics["staleness/mixed_fraction"] = float((distinct > 1).mean())
    return metrics


def batch_metrics(trajectories: Sequence[Trajectory], advantages: np.ndarray) -> dict[str, float]:
    """Rewards, lengths, groups and advantages of a batch."""
    rewards = np.array([t.reward for t in trajectories])
    lengths = np.array([t.response_length for t in trajectories])
    prompt_ids = np.array([t.prompt_id for t in trajectories])
    groups = [rewards[prompt_ids == p] for p in np.unique(prompt_ids)]
    metrics = {
        "reward/mean": float(rewards.mean()),
        "length/mean": float(lengths.mean()),
        "length/max": float(lengths.max()),
        "length/truncated_fraction": float(np.mean([t.finish_reason == "length" for t in trajectories])),
        "advantage/mean": float(advantages.mean()),
        "advantage/std": float(advantages.std()),
        "advantage/positive_fraction": float((advantages > 0).mean()),
        "group/zero_std_fraction": float(np.mean([np.all(g == g[0]) for g in groups])),
        "group/all_pass_fraction": float(np.mean([np.all(g == rewards.max()) and g[0] > 0 for g in groups])),
        "group/all_fail_fraction": float(np.mean([np.all(g <= 0) for g in groups])),
    }
    for name, chosen in (("correct", rewards > 0), ("incorrect", rewards <= 0)):
        if chosen.any():
            metrics[f"length/{name}_mean"] = float(lengths[chosen].mean())
    return metrics
