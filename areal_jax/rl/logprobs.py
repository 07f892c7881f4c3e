"""Log-probs of the tokens in a packed row: the only place with a shift by one position."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def token_logprobs(
    hidden: Float[Array, "B T D"],
    project: Callable[[Array], Array],
    tokens: Int[Array, "B T"],
    positions: Int[Array, "B T"],
    temperature: float,
) -> tuple[Float[Array, "B T"], Float[Array, "B T"]]:
    """Per token: its log-prob and the entropy of the distribution that it was drawn from, both float32.

    hidden: final states; the state at t - 1 predicts token t.
    project: hidden -> float32 logits [B, T, V].
    positions: 0 at the first token of each sequence, which nothing predicts: log-prob and entropy are 0 there.
    """
    logits = project(hidden).astype(jnp.float32) / temperature
    log_probs = jax.nn.log_softmax(logits, axis=-1)
    predicted = jnp.take_along_axis(log_probs[:, :-1], tokens[:, 1:, None], axis=-1)[..., 0]  # [B, T-1]: token t+1
    entropy = -jnp.sum(jnp.exp(log_probs) * log_probs, axis=-1)[:, :-1]  # [B, T-1]
    first = positions == 0
    shift = [(0, 0), (1, 0)]
    return jnp.where(first, 0.0, jnp.pad(predicted, shift)), jnp.where(first, 0.0, jnp.pad(entropy, shift))


def token_values(
    hidden: Float[Array, "B T D"], head: Float[Array, " D"], positions: Int[Array, "B T"]
) -> Float[Array, "B T"]:
    """Per token: the critic's value of the state in which it was drawn, float32; 0 at the first of each sequence.

    hidden: final states; the one at t - 1 is where token t is drawn.
    """
    values = jnp.einsum("btd,d->bt", hidden.astype(jnp.float32), head)
    return jnp.where(positions == 0, 0.0, jnp.pad(values[:, :-1], [(0, 0), (1, 0)]))
