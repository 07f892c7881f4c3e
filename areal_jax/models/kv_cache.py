"""The dense key-value cache: one row of fixed length per slot."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from areal_jax import sharding

CACHE_AXES = ("batch", "kv_heads", "length", "head_dim")


class LayerKV(NamedTuple):
    """Keys and values of one layer."""

    k: Float[Array, "B K S H"]
    v: Float[Array, "B K S H"]


class KVCache(NamedTuple):
    """All layers. Layout [rows, kv_heads, length, head_dim]: measured faster than length before heads on CPU."""

    layers: list[LayerKV]

    @property
    def length(self) -> int:
        return self.layers[0].k.shape[2]

    def write_rows(self, rows: Int[Array, " R"], keys_values: list[LayerKV]) -> KVCache:
        """Copies keys and values [R, K, P, H] to the beginning of the given rows; a row out of range is dropped."""
        length = keys_values[0].k.shape[2]

        def put(cached: Array, new: Array) -> Array:
            return cached.at[rows, :, :length].set(new.astype(cached.dtype), mode="drop")

        return KVCache([LayerKV(put(c.k, n.k), put(c.v, n.v)) for c, n in zip(self.layers, keys_values, strict=True)])


def empty_cache(shape: tuple[int, int, int, int], layers: int, dtype: str, mesh: Mesh) -> KVCache:
    """A zeroed cache of `layers` layers of shape [rows, kv_heads, length, head_dim], sharded over the mesh."""
    placed = sharding.named(mesh, CACHE_AXES)
    pairs = ((jnp.zeros(shape, dtype, device=placed), jnp.zeros(shape, dtype, device=placed)) for _ in range(layers))
    return KVCache([LayerKV(*pair) for pair in pairs])
