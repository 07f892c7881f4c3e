"""Key-value caches of a sampler's slots: dense (a row of fixed length per slot) and paged (blocks from a common pool).

Both are pytrees with the same methods. A row index out of range is passed over: it reads what is never looked at and
writes nothing.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Self

import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from areal_jax import sharding
from areal_jax.models.decode_kernels import CACHE_AXES, POOL_AXES, decode_dense, decode_paged


class LayerKV(NamedTuple):
    """Keys and values of one layer: of rows, [B, K, S, H], or of a pool's blocks, [blocks, K, P, H]."""

    k: Float[Array, "B K S H"]
    v: Float[Array, "B K S H"]


class Look(NamedTuple):
    """How a query looks at its keys."""

    kernel: str
    """A name in DECODE_KERNELS, or 'xla'."""
    scale: float
    """Of the scores."""
    mesh: Mesh | None


class KVCache(NamedTuple):
    """Dense. Layout [rows, kv_heads, length, head_dim]: measured faster than length before heads on CPU."""

    layers: list[LayerKV]

    def write_rows(self, rows: Int[Array, " R"], keys_values: list[LayerKV]) -> Self:
        """Copies keys and values [R, K, T, H] to the beginning of the given rows."""

        def put(cached: Array, new: Array) -> Array:
            return cached.at[rows, :, : new.shape[2]].set(new.astype(cached.dtype), mode="drop")

        return self._replace(layers=[_both(put, c, n) for c, n in zip(self.layers, keys_values, strict=True)])

    def copy_rows(self, sources: Int[Array, " R"], targets: Int[Array, " R"], length: int) -> Self:
        """With the first `length` positions of rows `sources` copied to rows `targets`."""
        return self.write_rows(targets, self._rows(sources, length))

    def dense_rows(self, rows: Int[Array, " R"]) -> list[LayerKV]:
        """The given rows' keys and values, [R, K, S, H]."""
        return self._rows(rows, None)

    def write_at(self, rows: Int[Array, " R"], at: Int[Array, " T"], keys_values: list[LayerKV]) -> Self:
        """Copies keys and values [R, K, T, H] to positions `at` of the given rows."""

        def put(cached: Array, new: Array) -> Array:
            new = new.astype(cached.dtype).swapaxes(1, 2)  # [R, T, K, H]
            return cached.at[rows[:, None], :, at[None]].set(new, mode="drop")

        return self._replace(layers=[_both(put, c, n) for c, n in zip(self.layers, keys_values, strict=True)])

    def rows(self, rows: Int[Array, " R"]) -> Self:
        """A cache of the given rows alone."""
        return self._replace(layers=self._rows(rows, None))

    def put_rows(self, rows: Int[Array, " R"], other: Any) -> Self:
        """With the given rows taken over from what `rows` returned."""
        return self.write_rows(rows, other.layers)

    def write_step(self, layer: LayerKV, k: Array, v: Array, positions: Int[Array, " B"]) -> LayerKV:
        """A layer with the keys and values [B, K, H] of one token a row, at its position."""
        every = jnp.arange(positions.shape[0])
        return LayerKV(
            layer.k.at[every, :, positions].set(k.astype(layer.k.dtype)),
            layer.v.at[every, :, positions].set(v.astype(layer.v.dtype)),
        )

    def attend(
        self, layer: LayerKV, q: Float[Array, "B N H"], positions: Int[Array, " B"], window: int, look: Look
    ) -> Float[Array, "B N H"]:
        """One query a row, at its position, over the row's keys."""
        return decode_dense(look.kernel, q, *layer, positions, window, look.scale, look.mesh)

    def _rows(self, rows: Int[Array, " R"], length: int | None) -> list[LayerKV]:
        def get(cached: Array) -> Array:
            return cached.at[rows, :, :length].get(mode="fill", fill_value=0)

        return [LayerKV(get(c.k), get(c.v)) for c in self.layers]


class PagedKVCache(NamedTuple):
    """Paged (arXiv 2309.06180): positions p * P to (p + 1) * P - 1 of row b lie in block tables[b, p] of every layer.

    A table entry of `blocks` is no block: nothing is written there.
    """

    layers: list[LayerKV]
    tables: Int[Array, "B W"]

    def write_rows(self, rows: Int[Array, " R"], keys_values: list[LayerKV]) -> Self:
        count, size = self._blocks_and_size()
        ids = self.tables.at[rows].get(mode="fill", fill_value=count)  # [R, W]

        def put(pool: Array, new: Array) -> Array:
            r, k, t, h = new.shape
            n = -(-t // size)
            pages = jnp.pad(new, ((0, 0), (0, 0), (0, n * size - t), (0, 0))).reshape(r, k, n, size, h)
            return pool.at[ids[:, :n]].set(pages.swapaxes(1, 2).astype(pool.dtype), mode="drop")

        return self._replace(layers=[_both(put, c, n) for c, n in zip(self.layers, keys_values, strict=True)])

    def copy_rows(self, sources: Int[Array, " R"], targets: Int[Array, " R"], length: int) -> Self:
        count, size = self._blocks_and_size()
        n = -(-length // size)
        taken = self.tables.at[sources, :n].get(mode="fill", fill_value=count)
        given = self.tables.at[targets, :n].get(mode="fill", fill_value=count)

        def put(pool: Array, _: Array) -> Array:
            return pool.at[given].set(pool.at[taken].get(mode="fill", fill_value=0), mode="drop")

        return self._replace(layers=[_both(put, c, c) for c in self.layers])

    def dense_rows(self, rows: Int[Array, " R"]) -> list[LayerKV]:
        count, size = self._blocks_and_size()
        ids = self.tables.at[rows].get(mode="fill", fill_value=count)  # [R, W]

        def get(pool: Array) -> Array:
            pages = pool.at[ids].get(mode="fill", fill_value=0).swapaxes(1, 2)  # [R, K, W, P, H]
            return pages.reshape(ids.shape[0], pool.shape[1], ids.shape[1] * size, pool.shape[3])

        return [LayerKV(get(c.k), get(c.v)) for c in self.layers]

    def write_at(self, rows: Int[Array, " R"], at: Int[Array, " T"], keys_values: list[LayerKV]) -> Self:
        count, size = self._blocks_and_size()
        ids = self.tables.at[rows[:, None], at[None] // size].get(mode="fill", fill_value=count)  # [R, T]

        def put(pool: Array, new: Array) -> Array:
            return pool.at[ids, :, at[None] % size].set(new.astype(pool.dtype).swapaxes(1, 2), mode="drop")

        return self._replace(layers=[_both(put, c, n) for c, n in zip(self.layers, keys_values, strict=True)])

    def rows(self, rows: Int[Array, " R"]) -> Self:
        count, _ = self._blocks_and_size()
        return self._replace(tables=self.tables.at[rows].get(mode="fill", fill_value=count))

    def put_rows(self, rows: Int[Array, " R"], other: Any) -> Self:
        return self._replace(layers=other.layers)

    def write_step(self, layer: LayerKV, k: Array, v: Array, positions: Int[Array, " B"]) -> LayerKV:
        count, size = self._blocks_and_size()
        every = jnp.arange(positions.shape[0])
        ids = self.tables.at[every, positions // size].get(mode="fill", fill_value=count)
        return LayerKV(
            layer.k.at[ids, :, positions % size].set(k.astype(layer.k.dtype), mode="drop"),
            layer.v.at[ids, :, positions % size].set(v.astype(layer.v.dtype), mode="drop"),
        )

    def attend(
        self, layer: LayerKV, q: Float[Array, "B N H"], positions: Int[Array, " B"], window: int, look: Look
    ) -> Float[Array, "B N H"]:
        return decode_paged(look.kernel, q, *layer, self.tables, positions, window, look.scale, look.mesh)

    def _blocks_and_size(self) -> tuple[int, int]:
        return self.layers[0].k.shape[0], self.layers[0].k.shape[2]


Cache = KVCache | PagedKVCache


def _both(put: Any, cached: LayerKV, new: LayerKV) -> LayerKV:
    return LayerKV(put(cached.k, new.k), put(cached.v, new.v))


def empty_cache(shape: tuple[int, int, int, int], layers: int, dtype: str, mesh: Mesh) -> KVCache:
    """A zeroed cache of `layers` layers of shape [rows, kv_heads, length, head_dim], sharded over the mesh."""
    return KVCache(_zeros(shape, layers, dtype, mesh, CACHE_AXES))


def empty_pool(
    shape: tuple[int, int, int, int], tables: tuple[int, int], layers: int, dtype: str, mesh: Mesh
) -> PagedKVCache:
    """A zeroed pool of `layers` layers of shape [blocks, kv_heads, positions a block, head_dim], with tables [rows,
    blocks a row] that have no block yet."""
    nothing = jnp.full(tables, shape[0], jnp.int32, device=sharding.replicated(mesh))
    return PagedKVCache(_zeros(shape, layers, dtype, mesh, POOL_AXES), nothing)


def cache_sharding(cache: Cache, mesh: Mesh) -> Any:
    """The layout of a cache, a sharding in the place of each array."""
    placed: Any = sharding.named(mesh, CACHE_AXES if isinstance(cache, KVCache) else POOL_AXES)
    everywhere: Any = sharding.replicated(mesh)
    layers = [LayerKV(placed, placed)] * len(cache.layers)
    return KVCache(layers) if isinstance(cache, KVCache) else PagedKVCache(layers, everywhere)


def _zeros(shape: tuple[int, int, int, int], layers: int, dtype: str, mesh: Mesh, axes: sharding.Axes) -> list[LayerKV]:
    placed = sharding.named(mesh, axes)

    def zeros() -> Array:
        return jnp.zeros(shape, dtype, device=placed)

    return [LayerKV(zeros(), zeros()) for _ in range(layers)]
