"""Log-probs in chunks of the wanted tokens, against the plain definition over all of them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from areal_jax import sharding
from areal_jax.rl.logprobs import token_logprobs
from areal_jax.types import Output

B, T, D, V = 4, 11, 6, 9
TEMPERATURE = 0.7


def capped(weights, hidden):
    """A projection that is not linear."""
    return 3.0 * jnp.tanh(hidden @ weights / 3.0)


def plain(weights, hidden, tokens, wanted):
    """Index t describes tokens[t], which the state at t - 1 predicts."""
    log_p = jax.nn.log_softmax(capped(weights, hidden[:, :-1]) / TEMPERATURE)
    logprobs = jnp.take_along_axis(log_p, tokens[:, 1:, None], axis=-1)[..., 0]
    entropy = -jnp.sum(jnp.exp(log_p) * log_p, axis=-1)
    return tuple(jnp.where(wanted, jnp.pad(x, ((0, 0), (1, 0))), 0.0) for x in (logprobs, entropy))


def chunked(columns):
    return lambda w, h, tokens, wanted: token_logprobs(h, Output(capped, w), tokens, wanted, TEMPERATURE, columns)


def example(share, seed=0):
    rng = np.random.default_rng(seed)
    wanted = rng.random((B, T)) < share
    wanted[:, 0] = False
    arrays = [rng.standard_normal(s).astype(np.float32) for s in ((D, V), (B, T, D), (2, B, T))]
    return arrays[0], arrays[1], rng.integers(0, V, (B, T)).astype(np.int32), wanted, arrays[2]


@pytest.mark.parametrize("columns", [1, 2, 3, 4, 7, 11, 100])
@pytest.mark.parametrize("share", [0.0, 0.3, 0.8, 1.0])
def test_values_and_gradients_are_those_of_the_plain_definition(columns, share):
    weights, hidden, tokens, wanted, g = example(share)
    found, expected = (
        jax.vjp(lambda w, h, f=f: f(w, h, tokens, wanted), weights, hidden) for f in (chunked(columns), plain)
    )
    for a, b in zip(jax.tree.leaves(found[0]), jax.tree.leaves(expected[0]), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-6)
    for a, b in zip(found[1](tuple(g)), expected[1](tuple(g)), strict=True):
        np.testing.assert_allclose(a, b, atol=5e-6)


def test_rows_over_devices_give_the_same():
    weights, hidden, tokens, wanted, g = example(0.6)
    mesh = sharding.make_mesh({"data": 2, "fsdp": 2, "tensor": 1}, jax.devices()[:4])
    rows = sharding.named(mesh, ("batch", None))
    placed = jax.device_put((hidden, tokens, wanted), (sharding.named(mesh, ("batch", None, None)), rows, rows))

    @jax.jit
    def both(w, h, tokens, wanted):
        found, pull = jax.vjp(lambda w, h: chunked(3)(w, h, tokens, wanted), w, h)
        return found, pull(tuple(jnp.asarray(g)))

    expected = both(weights, hidden, tokens, wanted)
    for a, b in zip(jax.tree.leaves(both(weights, *placed)), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-6)


def test_the_logits_of_more_than_a_chunk_never_exist():
    """Memory of the compiled gradient follows the chunk, not the row."""
    b, t, d, v, columns = 2, 512, 8, 4096, 16

    def gradient(w, h, tokens, wanted):
        return jax.grad(
            lambda w, h: token_logprobs(h, Output(lambda w, h: h @ w, w), tokens, wanted, 1.0, columns)[0].sum(), (0, 1)
        )(w, h)

    shapes = [((d, v), np.float32), ((b, t, d), np.float32), ((b, t), np.int32), ((b, t), bool)]
    compiled = jax.jit(gradient).lower(*(jax.ShapeDtypeStruct(*s) for s in shapes)).compile()
    chunk = b * columns * v * 4
    assert compiled.memory_analysis().temp_size_in_bytes < 6 * chunk < b * t * v * 4
