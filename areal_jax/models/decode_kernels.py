"""Attention of one new token a row by JAX's own Pallas kernels, by name (`model.decode_attention`).

The plain ones are `attention.attend` and `attention.attend_paged`. A kernel reads of each row the keys that it has,
where the plain one, over a dense cache, reads the whole row. `tests/kernels_test.py` compares them on a CPU,
interpreted; `python -m experiments.benchmark decode_attention` on whatever machine it runs on, and times them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from areal_jax import sharding
from areal_jax.models.attention import attend, attend_paged, decode_mask

QUERY_AXES = ("batch", "heads", "head_dim")
CACHE_AXES = ("batch", "kv_heads", "keys", "head_dim")
POOL_AXES = (None, "kv_heads", "keys", "head_dim")
SPLITS, BLOCK = 16, 256  # a row's keys are shared out to so many programs, each of which takes so many at a time


@dataclasses.dataclass(frozen=True)
class DecodeKernel:
    """A library's kernels of one platform; None: it has none for that cache, and the plain one is used."""

    dense: Callable[[Array, Array, Array, Array, int, float], Array] | None
    """(q, k, v, positions, window, scale)"""
    paged: Callable[[Array, Array, Array, Array, Array, float], Array] | None
    """(q, k, v, tables, positions, scale): no windows."""
    platforms: tuple[str, ...]


def decode_dense(
    name: str,
    q: Float[Array, "B N H"],
    k: Float[Array, "B K S H"],
    v: Float[Array, "B K S H"],
    positions: Int[Array, " B"],
    window: int,
    scale: float,
    mesh: Mesh | None,
) -> Float[Array, "B N H"]:
    """One query a row, at its position, over the row's keys up to there (window: the last so many; 0 is all).

    name: in DECODE_KERNELS, or 'xla', the plain one, which is used too where S is no multiple of 16 or the rows do not
    divide over the mesh.
    """
    kernel = DECODE_KERNELS[name].dense if name != "xla" else None
    uneven = mesh is not None and q.shape[0] % sharding.row_shards(mesh) > 0
    if kernel is None or k.shape[2] % 16 or uneven:
        mask = decode_mask(positions, jnp.arange(k.shape[2]), window)[:, None]
        return attend(q[:, None], k, v, mask, scale)[:, 0]

    def run(q: Array, k: Array, v: Array, positions: Array) -> Array:
        return kernel(q, k, v, positions, window, scale)

    axes = (QUERY_AXES, CACHE_AXES, CACHE_AXES, ("batch",))
    return sharding.on_each_device(run, mesh, axes, QUERY_AXES)(q, k, v, positions)


def decode_paged(
    name: str,
    q: Float[Array, "B N H"],
    k: Float[Array, "blocks K P H"],
    v: Float[Array, "blocks K P H"],
    tables: Int[Array, "B W"],
    positions: Int[Array, " B"],
    window: int,
    scale: float,
    mesh: Mesh | None,
) -> Float[Array, "B N H"]:
    """The same where row b's keys lie in blocks tables[b]; what a row gets whose first block is out of range means
    nothing. Windows are the plain one's."""
    kernel = DECODE_KERNELS[name].paged if name != "xla" else None
    if kernel is None or window:
        return attend_paged(q, k, v, tables, positions, window, scale)
    tables = jnp.minimum(tables, k.shape[0] - 1)  # what a table does not have lies behind the row's position

    def run(q: Array, k: Array, v: Array, tables: Array, positions: Array) -> Array:
        return kernel(q, k, v, tables, positions, scale)

    axes = (QUERY_AXES, POOL_AXES, POOL_AXES, ("batch", None), ("batch",))
    return sharding.on_each_device(run, mesh, axes, QUERY_AXES)(q, k, v, tables, positions)


def _by_key_head(q: Array, kv_heads: int) -> Array:
    """[B, N, H] -> [B x K, G, H]: the kernels see a row for every head of keys, whose queries share them."""
    return q.reshape(q.shape[0] * kv_heads, q.shape[1] // kv_heads, q.shape[2])


def _triton_dense(q: Array, k: Array, v: Array, positions: Array, window: int, scale: float) -> Array:
    from jax.experimental.pallas.ops.gpu import decode_attention

    kv_heads, length, head_dim = k.shape[1:]
    rows = q.shape[0] * kv_heads
    splits = next(n for n in (SPLITS, 8, 4, 2, 1) if length % (16 * n) == 0)
    block = next(n for n in (BLOCK, 128, 64, 32, 16) if (length // splits) % n == 0)
    first = jnp.maximum(positions - window + 1, 0) if window else jnp.zeros_like(positions)
    out = decode_attention.mqa(
        _by_key_head(q, kv_heads),
        k.reshape(rows, length, head_dim),
        v.reshape(rows, length, head_dim),
        start_idx=jnp.repeat(first, kv_heads),
        kv_seq_len=jnp.repeat(positions + 1, kv_heads),
        sm_scale=scale,
        block_k=block,
        k_splits=splits,
        interpret=jax.default_backend() == "cpu",
    )
    return out.reshape(q.shape).astype(q.dtype)


def _as_pages(q: Array, k: Array, v: Array, tables: Array, positions: Array, multiple: int) -> tuple[Array, ...]:
    """What both paged kernels take, which want heads before blocks: a pool [1, blocks x K, P, H] in which every head of
    every block is a page, so that nothing is copied. Tables are filled up to a multiple of pages."""
    blocks, kv_heads, size, head_dim = k.shape
    tables = jnp.pad(tables, ((0, 0), (0, -tables.shape[1] % multiple)))
    pages = tables[:, None] * kv_heads + jnp.arange(kv_heads)[:, None]  # [B, K, W]
    pool = (1, blocks * kv_heads, size, head_dim)
    lengths = jnp.repeat(positions + 1, kv_heads).astype(jnp.int32)
    return _by_key_head(q, kv_heads), k.reshape(pool), v.reshape(pool), pages.reshape(-1, tables.shape[1]), lengths


def _triton_paged(q: Array, k: Array, v: Array, tables: Array, positions: Array, scale: float) -> Array:
    from jax.experimental.pallas.ops.gpu import paged_attention

    splits = next(n for n in (SPLITS, 8, 4, 2, 1) if n <= tables.shape[1])
    queries, keys, values, pages, lengths = _as_pages(q * scale, k, v, tables, positions, splits)
    out = paged_attention.paged_attention(
        queries, keys, values, pages, lengths,
        pages_per_compute_block=1, k_splits=splits, interpret=jax.default_backend() == "cpu",
    )  # fmt: skip
    return out.reshape(q.shape).astype(q.dtype)


def _mosaic_paged(q: Array, k: Array, v: Array, tables: Array, positions: Array, scale: float) -> Array:
    from jax.experimental.pallas.ops.tpu.paged_attention import paged_attention

    queries, keys, values, pages, lengths = _as_pages(q * scale, k, v, tables, positions, 1)
    out = paged_attention(queries, keys, values, lengths, pages, pages_per_compute_block=1)
    return out.reshape(q.shape).astype(q.dtype)


DECODE_KERNELS: dict[str, DecodeKernel] = {
    "triton": DecodeKernel(_triton_dense, _triton_paged, ("gpu",)),
    "mosaic": DecodeKernel(None, _mosaic_paged, ("tpu",)),
}
"""name -> kernels. triton: `jax.experimental.pallas.ops.gpu`; mosaic: `...ops.tpu.paged_attention`."""

BEST_DECODE = {"cpu": "xla"}
"""platform -> what 'auto' takes: what has been measured to be quickest there; else 'xla'."""
