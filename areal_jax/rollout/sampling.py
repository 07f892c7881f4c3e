"""From logits to a token and its log-prob under the distribution actually sampled."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt


def token_keys(key: Array, sample_ids: UInt[Array, " S"], positions: Int[Array, " S"]) -> Array:
    """One key per sample and position, fold_in(fold_in(key, sample id), position): a token's randomness depends
    neither on its slot nor on the batch nor on the time."""

    def one(sample_id: Array, position: Array) -> Array:
        return jax.random.fold_in(jax.random.fold_in(key, sample_id), position)

    return jax.vmap(one)(sample_ids, positions)


def sample_tokens(
    logits: Float[Array, "S V"], keys: Array, temperature: Float[Array, " S"]
) -> tuple[Int[Array, " S"], Float[Array, " S"]]:
    """Draws one token a row from softmax(logits / temperature); temperature 0 is greedy.

    Returns the tokens and their float32 log-probs in the distribution drawn from (0 for greedy: it is certain).
    """
    greedy = temperature == 0
    scaled = logits.astype(jnp.float32) / jnp.where(greedy, 1.0, temperature)[:, None]
    log_probs = jax.nn.log_softmax(scaled, axis=-1)
    drawn = jax.vmap(jax.random.categorical)(keys, log_probs)
    tokens = jnp.where(greedy, jnp.argmax(logits, axis=-1), drawn).astype(jnp.int32)
    chosen = jnp.take_along_axis(log_probs, tokens[:, None], axis=-1)[:, 0]
    return tokens, jnp.where(greedy, 0.0, chosen)
