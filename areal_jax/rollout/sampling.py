"""From logits to a token and its log-prob under the distribution actually sampled."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt

BLOCK = 64
"""Tokens whose weights are summed first; the running sum is then taken over blocks, and within one."""


@dataclasses.dataclass(frozen=True)
class Filter:
    """Which tokens may be drawn, of the softmax at the sample's temperature; applied in this order."""

    top_k: int = 0
    """The so many likeliest (more where the last ones are equally likely); 0 is all."""
    top_p: float = 1.0
    """The fewest likeliest tokens whose probabilities sum to at least this, and those as likely as the last of them; 1
    is all (nucleus, arXiv 1904.09751)."""
    min_p: float = 0.0
    """Tokens with at least this share of the likeliest one's probability; 0 is all (arXiv 2407.01082)."""

    def apply(self, scores: Float[Array, "S V"]) -> Float[Array, "S V"]:
        """`scores` (log-probs up to a constant a row) with those of the other tokens at -inf."""
        if self.top_k and self.top_k < scores.shape[-1]:
            least = jax.lax.top_k(scores, self.top_k)[0][:, -1:]
            scores = jnp.where(scores >= least, scores, -jnp.inf)
        if self.top_p < 1:
            probabilities = jax.nn.softmax(scores, axis=-1)
            falling = jnp.flip(jnp.sort(probabilities, axis=-1), axis=-1)
            before = jnp.cumsum(falling, axis=-1) - falling
            least = jnp.min(jnp.where(before < self.top_p, falling, jnp.inf), axis=-1, keepdims=True)
            scores = jnp.where(probabilities >= least, scores, -jnp.inf)
        if self.min_p > 0:
            least = jnp.max(scores, axis=-1, keepdims=True) + jnp.log(self.min_p)
            scores = jnp.where(scores >= least, scores, -jnp.inf)
        return scores


EVERYTHING = Filter()


def token_keys(key: Array, sample_ids: UInt[Array, " S"], positions: Int[Array, " S"]) -> Array:
    """One key per sample and position, fold_in(fold_in(key, sample id), position): a token's randomness depends
    neither on its slot nor on the batch nor on the time."""

    def one(sample_id: Array, position: Array) -> Array:
        return jax.random.fold_in(jax.random.fold_in(key, sample_id), position)

    return jax.vmap(one)(sample_ids, positions)


def invert(weights: Float[Array, "S V"], u: Float[Array, " S"]) -> Int[Array, " S"]:
    """The first token at which the running sum of a row exceeds u times its total: token i with probability
    weights[i] / total, for u uniform in [0, 1). One random number a row, where Gumbel noise takes V.

    Exact to float32's rounding and the 2^-23 between two values of u. A token of weight 0 is never chosen, whatever the
    rounding. Every row needs a positive weight.
    """
    rows, vocabulary = weights.shape
    blocks = jnp.pad(weights, ((0, 0), (0, -vocabulary % BLOCK))).reshape(rows, -1, BLOCK)
    sums = blocks.sum(axis=-1)  # [S, V / BLOCK]
    ends = jnp.cumsum(sums, axis=-1)
    target = u * ends[:, -1]
    block = _first_above(ends, sums, target)  # [S]
    row = jnp.arange(rows)
    before = jnp.where(block > 0, ends[row, block - 1], 0.0)
    inside = blocks[row, block]  # [S, BLOCK]
    token = block * BLOCK + _first_above(jnp.cumsum(inside, axis=-1), inside, target - before)
    return jnp.minimum(token, vocabulary - 1)  # where a row is NaN


def _first_above(sums: Float[Array, "S N"], weights: Float[Array, "S N"], target: Float[Array, " S"]) -> Array:
    """The first index of positive weight whose running sum exceeds the target; if rounding leaves none, the last one of
    positive weight."""
    positive = weights > 0
    above = positive & (sums > target[:, None])
    last = weights.shape[1] - 1 - jnp.argmax(jnp.flip(positive, axis=1), axis=1)
    return jnp.where(above.any(axis=1), jnp.argmax(above, axis=1), last)


def _likeliest(logits: Float[Array, "S V"]) -> Int[Array, " S"]:
    """argmax, the first of equals; in two vector reductions, for which a CPU takes a tenth of argmax's time."""
    vocabulary = logits.shape[-1]
    highest = jnp.max(logits, axis=-1, keepdims=True)
    first = jnp.min(jnp.where(logits == highest, jnp.arange(vocabulary), vocabulary), axis=-1)
    return jnp.minimum(first, vocabulary - 1)  # where a row is NaN


def sample_tokens(
    logits: Float[Array, "S V"], keys: Array, temperature: Float[Array, " S"], kept: Filter = EVERYTHING
) -> tuple[Int[Array, " S"], Float[Array, " S"]]:
    """Draws one token a row from softmax(logits / temperature) over the tokens that `kept` leaves; temperature 0 is
    greedy.

    Returns the tokens and their float32 log-probs in the distribution drawn from (0 for greedy: it is certain).
    """
    greedy = temperature == 0
    scaled = kept.apply(logits.astype(jnp.float32) / jnp.where(greedy, 1.0, temperature)[:, None])
    shifted = scaled - jnp.max(scaled, axis=-1, keepdims=True)
    weights = jnp.exp(shifted)
    drawn = invert(weights, jax.vmap(jax.random.uniform)(keys))
    tokens = jnp.where(greedy, _likeliest(logits), drawn).astype(jnp.int32)
    chosen = jnp.take_along_axis(shifted, tokens[:, None], axis=-1)[:, 0]
    return tokens, jnp.where(greedy, 0.0, chosen - jnp.log(weights.sum(axis=-1)))
