"""The critic's loss."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float

from areal_jax.rl.losses import clamp


def value_loss(
    values: Float[Array, "R L"],
    old_values: Float[Array, "R L"],
    returns: Float[Array, "R L"],
    mask: Float[Array, "R L"],
    clip: float,
) -> tuple[Float[Array, "R L"], Float[Array, "R L"]]:
    """max((V - G)^2, (V_old + clip(V - V_old, +-clip) - G)^2) / 2 per token (PPO's value clipping, as in OpenAI
    baselines), 0 where masked; and 1 where the clipped part decides. clip 0: no clipping."""
    counted = mask > 0
    v, old, g = (jnp.where(counted, a, 0.0) for a in (values, old_values, returns))
    plain = jnp.square(v - g)
    if not clip:
        return 0.5 * plain, jnp.zeros_like(plain)
    clipped = jnp.square(old + clamp(v - old, -clip, clip) - g)
    binds = clipped > plain
    return 0.5 * jnp.where(binds, clipped, plain), binds.astype(jnp.float32)
