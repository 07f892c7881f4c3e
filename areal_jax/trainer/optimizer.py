"""AdamW with global-norm clipping; the learning rate is an argument of the step, so that schedules compile nothing."""

from __future__ import annotations

import dataclasses
import math

import jax
import optax


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """The keys of `config.optimizer` that shape the update itself."""

    b1: float = 0.9
    b2: float = 0.99
    eps: float = 1e-8
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0


def make_optimizer(config: OptimizerConfig) -> optax.GradientTransformation:
    """Clip by global norm, Adam, decoupled weight decay (arXiv 1711.05101) on matrices only.

    The update is a descent direction of unit learning rate: the train step multiplies it by the step's rate.
    """

    def is_matrix(params: optax.Params) -> optax.Params:
        return jax.tree.map(lambda p: p.ndim >= 2, params)

    return optax.chain(
        optax.clip_by_global_norm(config.max_grad_norm),
        optax.scale_by_adam(config.b1, config.b2, config.eps),
        optax.add_decayed_weights(config.weight_decay, mask=is_matrix),
        optax.scale(-1.0),
    )


def learning_rate(step: int, steps: int, peak: float, final: float, warmup_steps: int) -> float:
    """Linear warm-up to `peak`, then a half cosine to `final` at the last of `steps` steps (counted from 0)."""
    if step < warmup_steps:
        return peak * (step + 1) / warmup_steps
    progress = (step - warmup_steps) / max(1, steps - 1 - warmup_steps)
    return final + (peak - final) * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
