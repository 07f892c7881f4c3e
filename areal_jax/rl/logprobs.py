"""Log-probs of the tokens in a packed row: the only place with a shift by one position."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from areal_jax.types import Output


def token_logprobs(
    hidden: Float[Array, "B T D"],
    output: Output,
    tokens: Int[Array, "B T"],
    wanted: Bool[Array, "B T"],
    temperature: float,
    columns: int,
) -> tuple[Float[Array, "B T"], Float[Array, "B T"]]:
    """Per wanted token: its log-prob and the entropy of the distribution that it was drawn from, both float32; 0 at
    the others.

    hidden: final states; the state at t - 1 predicts token t. What is wanted at t = 0 has no such state.
    wanted: the first token of a sequence, which nothing predicts, must not be among them.
    columns: only wanted tokens are projected onto the vocabulary, and of each row so many at a time; a backward
    projects them again. So the logits of B x columns tokens are all that exists at once, and their gradients.
    """
    columns = min(columns, tokens.shape[1])
    return _logprobs(_Static(output.project, temperature, columns), output.weights, hidden, tokens, wanted)


def token_values(
    hidden: Float[Array, "B T D"], head: Float[Array, " D"], positions: Int[Array, "B T"]
) -> Float[Array, "B T"]:
    """Per token: the critic's value of the state in which it was drawn, float32; 0 at the first of each sequence.

    hidden: final states; the one at t - 1 is where token t is drawn.
    """
    values = jnp.einsum("btd,d->bt", hidden.astype(jnp.float32), head)
    return jnp.where(positions == 0, 0.0, jnp.pad(values[:, :-1], [(0, 0), (1, 0)]))


class _Static(NamedTuple):
    """What is fixed when `_logprobs` is traced."""

    project: Callable[[Any, Array], Array]
    temperature: float
    columns: int


class _Places(NamedTuple):
    """Where the wanted tokens are: the j-th one of row b at t = at[b, j], which is also j = rank[b, t]."""

    at: Int[Array, "B J"]  # J: T rounded up to whole chunks
    rank: Int[Array, "B T"]
    found: Bool[Array, "B J"]  # whether the row has a j-th one
    chunks: Int[Array, ""]  # that have any


def _places(wanted: Bool[Array, "B T"], columns: int) -> _Places:
    b, t = wanted.shape
    rank = jnp.cumsum(wanted, axis=1) - 1
    width = -(-t // columns) * columns
    rows = jnp.arange(b)[:, None]
    at = jnp.ones((b, width), jnp.int32).at[rows, jnp.where(wanted, rank, width)].set(jnp.arange(t), mode="drop")
    counts = jnp.sum(wanted, axis=1)
    return _Places(at, rank, jnp.arange(width) < counts[:, None], -(-jnp.max(counts) // columns))


def _chunk(i: Array, array: Array, columns: int) -> Array:
    return jax.lax.dynamic_slice_in_dim(array, i * columns, columns, axis=1)


def _put_chunk(i: Array, array: Array, chunk: Array, columns: int) -> Array:
    return jax.lax.dynamic_update_slice_in_dim(array, chunk, i * columns, axis=1)


def _states(hidden: Array, at: Int[Array, "B C"]) -> Float[Array, "B C D"]:
    """The states that predict the tokens at `at`."""
    return jnp.take_along_axis(hidden, (at - 1)[..., None], axis=1)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _logprobs(static: _Static, weights: Any, hidden: Array, tokens: Array, wanted: Array) -> tuple[Array, Array]:
    return _forward(static, weights, hidden, tokens, wanted)[0]


def _forward(static: _Static, weights: Any, hidden: Array, tokens: Array, wanted: Array) -> tuple[Any, Any]:
    places, c = _places(wanted, static.columns), static.columns

    def look(i: Array, found: tuple[Array, Array, Array]) -> tuple[Array, ...]:
        at = _chunk(i, places.at, c)
        logits = static.project(weights, _states(hidden, at)) / static.temperature  # [B, C, V]
        total = jax.nn.logsumexp(logits, axis=-1)
        chosen = jnp.take_along_axis(logits, jnp.take_along_axis(tokens, at, axis=1)[..., None], axis=-1)[..., 0]
        entropy = total - jnp.sum(jnp.exp(logits - total[..., None]) * logits, axis=-1)
        return tuple(_put_chunk(i, a, x, c) for a, x in zip(found, (chosen - total, entropy, total), strict=True))

    nothing = jnp.zeros(places.at.shape, jnp.float32)
    logprobs, entropy, total = jax.lax.fori_loop(0, places.chunks, look, (nothing, nothing, nothing))
    spread = tuple(
        jnp.where(wanted, jnp.take_along_axis(x, jnp.maximum(places.rank, 0), axis=1), 0.0) for x in (logprobs, entropy)
    )
    return spread, (weights, hidden, tokens, wanted, places, entropy, total)


def _backward(static: _Static, saved: Any, gradients: tuple[Array, Array]) -> tuple[Any, Array, None, None]:
    """With z the logits and p their softmax, d(log p_token) / dz = onehot - p and dH / dz = -p (log p + H)."""
    weights, hidden, tokens, wanted, places, entropy, total = saved
    c = static.columns
    of_logprobs, of_entropy = (
        jnp.where(places.found, jnp.take_along_axis(g, places.at, axis=1), 0.0) for g in gradients
    )

    def look(i: Array, found: tuple[Any, Array]) -> tuple[Any, Array]:
        at = _chunk(i, places.at, c)
        raw, pull = jax.vjp(static.project, weights, _states(hidden, at))
        log_p = raw / static.temperature - _chunk(i, total, c)[..., None]  # [B, C, V]
        one_hot = jnp.arange(raw.shape[-1]) == jnp.take_along_axis(tokens, at, axis=1)[..., None]
        g, of_h = (_chunk(i, x, c)[..., None] for x in (of_logprobs, of_entropy))
        p = jnp.exp(log_p)
        change = jnp.where(one_hot, g, 0.0) - p * (g + of_h * (log_p + _chunk(i, entropy, c)[..., None]))
        of_weights, of_states = pull((change / static.temperature).astype(raw.dtype))
        return jax.tree.map(jnp.add, found[0], of_weights), _put_chunk(i, found[1], of_states, c)

    nothing = (
        jax.tree.map(jnp.zeros_like, weights),
        jnp.zeros((*places.at.shape, hidden.shape[-1]), hidden.dtype),
    )
    of_weights, of_states = jax.lax.fori_loop(0, places.chunks, look, nothing)
    back = jnp.take_along_axis(of_states, jnp.maximum(places.rank, 0)[:, 1:, None], axis=1)
    of_hidden = jnp.pad(jnp.where(wanted[:, 1:, None], back, 0), [(0, 0), (0, 1), (0, 0)])
    return of_weights, of_hidden, None, None


_logprobs.defvjp(_forward, _backward)
