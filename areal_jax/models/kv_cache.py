"""The dense key-value cache: one row of fixed length per slot."""

from __future__ import annotations

from typing import Any, NamedTuple

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
    """All layers. Layout [rows, kv_heads, length, head_dim]: measured faster than length before heads on CPU.

    A row index out of range is passed over: it reads zeros and writes nothing.
    """

    layers: list[LayerKV]

    @property
    def length(self) -> int:
        return self.layers[0].k.shape[2]

    def write_rows(self, rows: Int[Array, " R"], keys_values: list[LayerKV]) -> KVCache:
        """Copies keys and values [R, K, P, H] to the beginning of the given rows."""

        def put(cached: Array, new: Array) -> Array:
            return cached.at[rows, :, : new.shape[2]].set(new.astype(cached.dtype), mode="drop")

        return KVCache([LayerKV(put(c.k, n.k), put(c.v, n.v)) for c, n in zip(self.layers, keys_values, strict=True)])

    def rows(self, rows: Int[Array, " R"], length: int | None = None) -> KVCache:
        """The given rows, or their first `length` positions."""

        def get(cached: Array) -> Array:
            return cached.at[rows, :, :length].get(mode="fill", fill_value=0)

        return KVCache([LayerKV(get(c.k), get(c.v)) for c in self.layers])

    def put_rows(self, rows: Int[Array, " R"], other: KVCache) -> KVCache:
        """With the given rows taken over from a cache of R rows."""
        return self.write_rows(rows, other.layers)

    def copy_rows(self, sources: Int[Array, " R"], targets: Int[Array, " R"], length: int) -> KVCache:
        """With the first `length` positions of rows `sources` copied to rows `targets`."""
        return self.write_rows(targets, self.rows(sources, length).layers)


def empty_cache(shape: tuple[int, int, int, int], layers: int, dtype: str, mesh: Mesh) -> KVCache:
    """A zeroed cache of `layers` layers of shape [rows, kv_heads, length, head_dim], sharded over the mesh."""
    placed = sharding.named(mesh, CACHE_AXES)
    pairs = ((jnp.zeros(shape, dtype, device=placed), jnp.zeros(shape, dtype, device=placed)) for _ in range(layers))
    return KVCache([LayerKV(*pair) for pair in pairs])


def cache_sharding(layers: int, mesh: Mesh) -> KVCache:
    """The layout of `empty_cache`, a sharding in the place of each array."""
    placed: Any = sharding.named(mesh, CACHE_AXES)
    return KVCache([LayerKV(placed, placed)] * layers)
