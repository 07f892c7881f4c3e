"""The critic: an estimate of the return before each token is drawn, from the policy's own layers or from others."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from areal_jax import sharding
from areal_jax.models.linear import split_adapters
from areal_jax.models.transformer import Model, build_model
from areal_jax.types import Params


@dataclasses.dataclass(frozen=True)
class Critic:
    """A value head on the policy's last hidden state, or on that of a backbone of its own; apart from its parameters.

    Parameters: {"head": float32 [D]} and, with its own network, "backbone": a policy's without the output matrix.
    """

    policy: Model
    backbone: Model | None
    """None: the head sits on the policy."""

    @property
    def abstract_params(self) -> Params:
        head = jax.ShapeDtypeStruct(
            (self.policy.config.d_model,), jnp.float32, sharding=sharding.replicated(self.policy.mesh)
        )
        return {"head": head} | ({"backbone": self.backbone.abstract_params} if self.backbone else {})

    def init_params(self, policy_params: Params) -> Params:
        """A head of zeros (every value is 0), the backbone a copy of the policy's, without its adapters."""

        def create(base: Params) -> Params:
            made = {"head": jnp.zeros((self.policy.config.d_model,), jnp.float32)}
            if self.backbone is None:
                return made
            wanted = self.backbone.abstract_params
            copy = {k: jax.tree.map(lambda x, to: jnp.array(x, to.dtype), base[k], wanted[k]) for k in wanted}
            return made | {"backbone": copy}

        shardings = jax.tree.map(lambda x: x.sharding, self.abstract_params)
        return jax.jit(create, out_shardings=shardings)(split_adapters(policy_params)[0])

    def hidden(self, params: Params, policy_hidden: Array, inputs: Any) -> Float[Array, "B T D"]:
        """What the head reads. inputs: (tokens, positions, segment_ids), each [B, T]."""
        return policy_hidden if self.backbone is None else self.backbone.bind(params["backbone"])(*inputs)


def build_critic(policy: Model, kind: str) -> Critic | None:
    """kind: 'none', 'head' or 'network'."""
    if kind == "none":
        return None
    if kind == "head":
        return Critic(policy, None)
    headless = dataclasses.replace(policy.config, tied_embeddings=True, lora=None)
    return Critic(policy, build_model(headless, policy.mesh))
