"""Sums over the sequences of packed rows. Segment 0 of a row is padding; 1, 2, ... (never over L) its sequences."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def sequence_sums(values: Float[Array, "R L"], segment_ids: Int[Array, "R L"]) -> Float[Array, "R S"]:
    """[R, L + 1]: entry s is the sum over segment s of the row; 0 where there is no such segment."""

    def one(row: Array, ids: Array) -> Array:
        return jax.ops.segment_sum(row, ids, num_segments=row.shape[0] + 1)

    return jax.vmap(one)(values, segment_ids)


def spread(per_sequence: Float[Array, "R S"], segment_ids: Int[Array, "R L"]) -> Float[Array, "R L"]:
    """Each token gets its sequence's value."""
    return jnp.take_along_axis(per_sequence, segment_ids, axis=1)


def sequence_means(
    values: Float[Array, "R L"], mask: Float[Array, "R L"], segment_ids: Int[Array, "R L"]
) -> Float[Array, "R L"]:
    """Each token gets the mean of its sequence over the tokens that count; 0 where none does.

    values: finite, also where the mask is 0.
    """
    counts = sequence_sums(mask, segment_ids)
    return spread(sequence_sums(values * mask, segment_ids) / jnp.maximum(counts, 1.0), segment_ids)
