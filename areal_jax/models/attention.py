"""Grouped-query attention in plain XLA (arXiv 2305.13245)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

QUERY_BLOCK = 1024  # attention of longer sequences is computed for so many queries at a time
PARTS, SMALLEST_PART = 8, 64
MASKED = -1e30  # added to masked attention scores; finite, so that an all-masked (padding) row has no NaN


def attend(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B K S H"],
    v: Float[Array, "B K S H"],
    mask: Bool[Array, "B T S"],
    scale: float,
    shards: int = 1,
    causal: bool = False,
) -> Float[Array, "B T N H"]:
    """Scores (times `scale`) and softmax in float32. N is a multiple of K.

    The queries of the G = N / K heads that share keys stand side by side, [B, K, T x G, H]: both products are then
    plain batched matrix products, which a CPU does 2 to 3 times as fast as with T before the heads (forward, backward
    and decoding).
    At most QUERY_BLOCK x S scores a head exist at a time; a backward computes them again, block by block.
    shards: of T, which it is a multiple of; each has blocks of its own.
    causal: promises that no query attends to a key with a higher index. The queries are then taken in up to PARTS
    parts, each with the keys up to its own end, so that little more than half of the scores are computed at all. Parts
    of rows of more than QUERY_BLOCK tokens have two blocks or more, since XLA on a CPU would hold the scores of parts
    that are no loop all at once: below 4 x QUERY_BLOCK there is one part. So it is with shards.
    """
    b, t, n, h = q.shape
    smallest = SMALLEST_PART if t <= QUERY_BLOCK else 2 * QUERY_BLOCK
    parts = min(PARTS, t // smallest) if causal and shards == 1 else 1
    if parts > 1:
        step = -(-t // parts)
        step = step if t <= QUERY_BLOCK else -(-step // QUERY_BLOCK) * QUERY_BLOCK
        each = []
        for i in range(0, t, step):
            end = min(t, i + step)
            # a rest without blocks of its own, whose scores a backward must not keep
            alone = t > QUERY_BLOCK >= end - i
            one = jax.checkpoint(attend, static_argnums=4) if alone else attend
            each.append(one(q[:, i:end], k[:, :, :end], v[:, :, :end], mask[:, i:end, :end], scale))
        return jnp.concatenate(each, axis=1)
    size = QUERY_BLOCK * shards
    if t > size:
        pad = -t % size

        def blocks(x: Array) -> Array:  # [B, T, ...] -> [blocks, B, shards x QUERY_BLOCK, ...]
            x = jnp.pad(x, ((0, 0), (0, pad), *[(0, 0)] * (x.ndim - 2)))
            cut = x.reshape(b, shards, -1, QUERY_BLOCK, *x.shape[2:])
            return jnp.moveaxis(cut, 2, 0).reshape(-1, b, size, *x.shape[2:])

        one = jax.checkpoint(lambda block: attend(block[0], k, v, block[1], scale, shards))
        out = jax.lax.map(one, (blocks(q), blocks(mask))).reshape(-1, b, shards, QUERY_BLOCK, n, h)
        return jnp.moveaxis(out, 0, 2).reshape(b, t + pad, n, h)[:, :t]
    kv_heads, groups = k.shape[1], n // k.shape[1]
    queries = q.reshape(b, t, kv_heads, groups, h).transpose(0, 2, 1, 3, 4).reshape(b, kv_heads, t * groups, h)
    scores = jnp.einsum("bkqh,bksh->bkqs", queries, k, preferred_element_type=jnp.float32) * scale
    scores = jnp.where(jnp.repeat(mask, groups, axis=1)[:, None], scores, MASKED)
    weights = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
    out = jnp.einsum("bkqs,bksh->bkqh", weights, v).reshape(b, kv_heads, t, groups, h)
    return out.transpose(0, 2, 1, 3, 4).reshape(b, t, n, h)


def decode_mask(positions: Int[Array, " B"], at: Int[Array, " S"], window: int) -> Bool[Array, "B S"]:
    """Which keys, at positions `at` of their row, a query at `positions` attends to; window 0 is all up to its own."""
    behind = positions[:, None] - at[None, :]
    return (behind >= 0) & (behind < window) if window else behind >= 0


def attend_paged(
    q: Float[Array, "B N H"],
    k: Float[Array, "blocks K P H"],
    v: Float[Array, "blocks K P H"],
    tables: Int[Array, "B W"],
    positions: Int[Array, " B"],
    window: int,
    scale: float,
) -> Float[Array, "B N H"]:
    """One query a row, at `positions`, over keys that lie in blocks of P positions; row b's are blocks tables[b].

    A block at a time, with a running softmax (arXiv 1805.02867), from the first to the last block that any row needs:
    the work follows the longest sequence alive, and no row's keys are gathered whole. A row whose first block is out of
    range is idle; what it gets means nothing.
    """
    b, n, h = q.shape
    blocks, kv_heads, size, _ = k.shape
    queries = q.reshape(b, kv_heads, n // kv_heads, h)
    alive = tables[:, 0] < blocks
    end = jnp.max(jnp.where(alive, positions, 0)) // size + 1
    begin = jnp.min(jnp.where(alive, jnp.maximum(0, positions - window + 1), end * size)) // size if window else 0

    def look(i: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        top, total, out = carry  # of what was seen: largest score, sum of exp(score - top), and the values weighted so
        ids = jnp.minimum(tables[:, i], blocks - 1)  # what a table does not have is masked
        scores = jnp.einsum("bkgh,bkph->bkgp", queries, k[ids], preferred_element_type=jnp.float32) * scale
        mask = decode_mask(positions, i * size + jnp.arange(size), window)
        scores = jnp.where(mask[:, None, None], scores, MASKED)
        highest = jnp.maximum(top, scores.max(axis=-1))
        weights = jnp.where(mask[:, None, None], jnp.exp(scores - highest[..., None]), 0.0)
        keep = jnp.exp(top - highest)
        values = jnp.einsum("bkgp,bkph->bkgh", weights.astype(v.dtype), v[ids], preferred_element_type=jnp.float32)
        return highest, total * keep + weights.sum(axis=-1), out * keep[..., None] + values

    none = jnp.full(queries.shape[:3], MASKED, jnp.float32)
    start = (none, jnp.zeros_like(none), jnp.zeros(queries.shape, jnp.float32))
    _, total, out = jax.lax.fori_loop(begin, end, look, start)
    return (out / jnp.maximum(total, 1e-30)[..., None]).astype(q.dtype).reshape(b, n, h)
