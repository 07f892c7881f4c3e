"""Drawing a token: the distribution, its log-probs, and keys that depend on the sample and position alone."""

import jax
import jax.numpy as jnp
import numpy as np

from areal_jax.rollout.sampling import sample_tokens, token_keys


def test_the_sampled_distribution_matches_softmax_by_chi_square():
    logits = jnp.array([0.5, -1.0, 2.0, 0.0, 1.0, -2.0])
    n, temperature = 20_000, 0.7
    keys = token_keys(jax.random.key(0), jnp.arange(n, dtype=jnp.uint32), jnp.full(n, 3))
    tokens, _ = sample_tokens(jnp.tile(logits, (n, 1)), keys, jnp.full(n, temperature))
    expected = n * np.asarray(jax.nn.softmax(logits / temperature))
    observed = np.bincount(np.asarray(tokens), minlength=6)
    chi_square = np.sum((observed - expected) ** 2 / expected)
    assert chi_square < 20.5  # 0.999 quantile with 5 degrees of freedom


def test_log_probs_are_those_of_the_distribution_sampled():
    logits = jax.random.normal(jax.random.key(1), (5, 7))
    temperature = jnp.array([1.0, 0.5, 2.0, 0.0, 1.3])
    keys = token_keys(jax.random.key(0), jnp.arange(5, dtype=jnp.uint32), jnp.zeros(5, int))
    tokens, logprobs = sample_tokens(logits, keys, temperature)
    for i, t in enumerate([1.0, 0.5, 2.0, None, 1.3]):
        expected = 0.0 if t is None else jax.nn.log_softmax(logits[i] / t)[tokens[i]]
        np.testing.assert_allclose(logprobs[i], expected, atol=1e-6)
    assert int(tokens[3]) == int(jnp.argmax(logits[3]))


def test_a_token_s_randomness_depends_on_sample_and_position_alone():
    ids, positions = jnp.array([7, 9, 7], jnp.uint32), jnp.array([2, 2, 3])
    data = jax.random.key_data(token_keys(jax.random.key(5), ids, positions))
    alone = jax.random.key_data(token_keys(jax.random.key(5), ids[2:], positions[2:]))
    np.testing.assert_array_equal(data[2], alone[0])
    assert len({tuple(map(int, d)) for d in data}) == 3
