"""AdamW with global-norm clipping; the learning rate is an argument of the step, so that schedules compile nothing."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import optax

SCHEDULES = {
    "cosine": lambda progress: 0.5 * (1 + math.cos(math.pi * progress)),
    "linear": lambda progress: 1 - progress,
    "constant": lambda progress: 1.0,
}
"""name -> share of the way from the final rate to the peak, at a progress from 0 to 1 after the warm-up."""

VOCABULARY = ("embedding", "head")
"""The matrices with a row or a column for each token."""


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """The keys of `config.optimizer` that shape the update itself."""

    b1: float = 0.9
    b2: float = 0.99
    eps: float = 1e-8
    weight_decay: float = 0.0
    vocabulary_weight_decay: float = 0.0
    """Of the embedding and the output matrix; `weight_decay` is of the other matrices."""
    max_grad_norm: float = 1.0
    first_moment_dtype: str = "float32"


def make_optimizer(config: OptimizerConfig) -> optax.GradientTransformation:
    """Clip by global norm, Adam, decoupled weight decay (arXiv 1711.05101) on matrices only.

    The update is a descent direction of unit learning rate: the train step multiplies it by the step's rate.
    """

    def is_matrix(name: str, p: Any) -> bool:
        return bool(p.ndim >= 2 and not name.endswith("_bias"))  # those of heads have two axes

    def matrices(of_vocabulary: bool) -> Any:
        def mask(params: optax.Params) -> optax.Params:
            return jax.tree_util.tree_map_with_path(
                lambda path, p: is_matrix(path[-1].key, p) and (path[-1].key in VOCABULARY) == of_vocabulary, params
            )

        return mask

    decays = ((config.weight_decay, False), (config.vocabulary_weight_decay, True))
    return optax.chain(
        optax.clip_by_global_norm(config.max_grad_norm),
        optax.scale_by_adam(config.b1, config.b2, config.eps, mu_dtype=config.first_moment_dtype),
        *(optax.add_decayed_weights(decay, mask=matrices(of)) for decay, of in decays if decay),
        optax.scale(-1.0),
    )


def learning_rate(
    step: int, steps: int, peak: float, final: float, warmup_steps: int, schedule: str = "cosine"
) -> float:
    """Linear warm-up to `peak`, then by a name in SCHEDULES to `final` at the last of `steps` steps, counted from 0."""
    if step < warmup_steps:
        return peak * (step + 1) / warmup_steps
    progress = (step - warmup_steps) / max(1, steps - 1 - warmup_steps)
    return final + (peak - final) * SCHEDULES[schedule](min(1.0, progress))
