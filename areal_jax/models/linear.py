"""Products with weights, and low-rank adapters beside them (LoRA, arXiv 2106.09685).

A projection W [D, F] with an adapter gives x W + alpha / rank (x A) B with A [D, rank] and B [rank, F]. B begins
at zero: the policy is at first the one that W alone makes. A and B are trained, in float32; all else stays.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from areal_jax.types import Params

PROJECTIONS = {
    "q_proj": "q", "k_proj": "k", "v_proj": "v", "o_proj": "o",
    "gate_proj": "gate", "up_proj": "up", "down_proj": "down",
}  # fmt: skip
"""The projections of a layer: Hugging Face's name -> ours."""

PROJECTED = "projected"

SUFFIX = "_lora"
"""The adapter of the projection `q` is called `q_lora`."""


@dataclasses.dataclass(frozen=True)
class LoraConfig:
    """The keys of `config.model.lora`."""

    rank: int
    alpha: float
    """What the adapters give is multiplied by alpha / rank."""
    target_modules: tuple[str, ...]
    """Names in PROJECTIONS: what has an adapter, in every layer."""

    @property
    def scale(self) -> float:
        return self.alpha / self.rank


@jax.custom_vjp
def linear(x: Float[Array, "B T D"], weights: Float[Array, "D F"]) -> Float[Array, "B T F"]:
    """x weights, in x's dtype.

    Its own derivative, since the one of `@` has the gradient of the weights computed the other way round and turned:
    XLA on a CPU then copies x or the output's gradient, and multiplies at a third of the speed.
    """
    return x @ weights.astype(x.dtype)


def _linear_forward(x: Array, weights: Array) -> tuple[Array, tuple[Array, Array]]:
    return x @ weights.astype(x.dtype), (x, weights)  # `linear` itself would hide the product from jax.checkpoint


def _linear_backward(saved: tuple[Array, Array], g: Array) -> tuple[Array, Array]:
    x, weights = saved
    of_weights = jnp.einsum("btd,btf->df", x, g, preferred_element_type=weights.dtype)
    return jnp.einsum("btf,df->btd", g, weights.astype(x.dtype)), of_weights


linear.defvjp(_linear_forward, _linear_backward)


class Adapter(nnx.Module):
    """alpha / rank (x A) B."""

    def __init__(self, weights: nnx.Param, inputs: int, config: LoraConfig, rngs: nnx.Rngs):
        """For weights whose first `inputs` axes are those of x; A and B are laid out as these are."""
        shape, axes = weights[...].shape, weights.get_metadata("logical_axes")
        a = jax.random.normal(rngs.lora(), (*shape[:inputs], config.rank), jnp.float32)
        self.a = nnx.Param(a * math.prod(shape[:inputs]) ** -0.5, logical_axes=(*axes[:inputs], "rank"))
        b = jnp.zeros((config.rank, *shape[inputs:]), jnp.float32)
        self.b = nnx.Param(b, logical_axes=("rank", *axes[inputs:]))
        self.config = config

    def __call__(self, x: Float[Array, "B T D"]) -> Float[Array, "B T F"]:
        a, b = self.a[...], self.b[...]
        low = linear(x, a.reshape(x.shape[-1], -1)) * self.config.scale
        return linear(low, b.reshape(b.shape[0], -1))


def add_adapters(module: nnx.Module, inputs: dict[str, int], config: LoraConfig | None, rngs: nnx.Rngs) -> None:
    """Gives the module's projections their adapters, those that have one. inputs: name of the projection -> how many
    axes of its weights are the input's."""
    if config is None:
        return
    targets = {PROJECTIONS[name] for name in config.target_modules}
    for name in [n for n in inputs if n in targets]:
        setattr(module, name + SUFFIX, Adapter(getattr(module, name), inputs[name], config, rngs))


def projected(module: nnx.Module, name: str, x: Float[Array, "B T D"]) -> Float[Array, "B T F"]:
    """x through the module's weights of this name and, where they have one, their adapter. Axes of the weights that x
    or the result has as one are joined: contracting two axes, XLA on a CPU copies the weights into another order
    first, in every decode step. What rematerialisation may keep, the sum of both, is called PROJECTED."""
    y = linear(x, getattr(module, name)[...].reshape(x.shape[-1], -1))
    adapter = getattr(module, name + SUFFIX, None)
    return checkpoint_name(y if adapter is None else y + adapter(x), PROJECTED)


def split_adapters(params: Params) -> tuple[Params, Params]:
    """A policy's parameters as (what stays, its adapters), two trees without each other's branches."""
    flat = flatten_dict(params)
    adapters = {path for path in flat if is_adapter(path)}
    return (
        unflatten_dict({path: x for path, x in flat.items() if path not in adapters}),
        unflatten_dict({path: flat[path] for path in adapters}),
    )


def join_adapters(frozen: Params, adapters: Params) -> Params:
    """The inverse of `split_adapters`."""
    return unflatten_dict(flatten_dict(frozen) | flatten_dict(adapters))


def is_adapter(path: tuple[Any, ...]) -> bool:
    """Whether this is where an adapter's parameter lies."""
    return len(path) > 1 and str(path[-2]).endswith(SUFFIX)


def merge_adapters(frozen: Params, adapters: Params, config: LoraConfig) -> Params:
    """W + alpha / rank A B in the place of every W that has an adapter, in W's dtype; the rest as it is. Of a `frozen`
    that nobody else holds each W goes as soon as it is merged."""
    flat, parts = flatten_dict(frozen), flatten_dict(adapters)
    del frozen
    for path in {path[:-1] for path in parts}:
        a, b = (jnp.asarray(parts[*path, name], jnp.float32) for name in "ab")
        weights = (*path[:-1], path[-1].removesuffix(SUFFIX))
        w, change = flat.pop(weights), a.reshape(-1, a.shape[-1]) @ b.reshape(b.shape[0], -1)
        flat[weights] = (w.astype(jnp.float32) + config.scale * change.reshape(w.shape)).astype(w.dtype)
    return unflatten_dict(flat)
