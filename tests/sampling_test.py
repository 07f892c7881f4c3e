"""Drawing a token: the distribution, its log-probs, and keys that depend on the sample and position alone."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from areal_jax.rollout.sampling import BLOCK, EVERYTHING, Filter, invert, sample_tokens, token_keys

FILTERS = {
    "top_k": (Filter(top_k=2), [0, 0, 1, 0, 1, 0]),
    "top_k of all": (Filter(top_k=6), [1, 1, 1, 1, 1, 1]),
    "top_p": (Filter(top_p=0.8), [1, 0, 1, 0, 1, 0]),  # probabilities .128 .029 .575 .078 .211 .011 -> .575 .786 .914
    "top_p, the likeliest alone": (Filter(top_p=1e-6), [0, 0, 1, 0, 0, 0]),
    "min_p": (Filter(min_p=0.2), [1, 0, 1, 0, 1, 0]),  # relative to the likeliest: .22 .05 1 .14 .37 .02
    "top_k, then top_p of what is left": (Filter(top_k=3, top_p=0.6), [0, 0, 1, 0, 0, 0]),  # .629 of .914
}
"""name -> (filter, which of the six tokens of LOGITS it leaves)."""
LOGITS = jnp.array([0.5, -1.0, 2.0, 0.0, 1.0, -2.0])


def draw(logits, n, temperature, kept=EVERYTHING):
    keys = token_keys(jax.random.key(0), jnp.arange(n, dtype=jnp.uint32), jnp.full(n, 3))
    return sample_tokens(jnp.tile(logits, (n, 1)), keys, jnp.full(n, temperature), kept)


@pytest.mark.parametrize("vocabulary", [6, BLOCK, 3 * BLOCK + 5])
def test_the_sampled_distribution_matches_softmax_by_chi_square(vocabulary):
    logits = jax.random.normal(jax.random.key(3), (vocabulary,))
    n, temperature = 20_000, 0.7
    tokens, _ = draw(logits, n, temperature)
    expected = n * np.asarray(jax.nn.softmax(logits / temperature), np.float64)
    observed = np.bincount(np.asarray(tokens), minlength=vocabulary)
    chi_square = np.sum((observed - expected) ** 2 / expected)
    assert chi_square < stats.chi2.ppf(0.999, vocabulary - 1)


@pytest.mark.parametrize("name", FILTERS)
def test_a_filter_leaves_its_tokens_in_their_proportions(name):
    kept, allowed = FILTERS[name]
    tokens, logprobs = draw(LOGITS, 4000, 1.0, kept)
    left = np.where(allowed, np.asarray(jax.nn.softmax(LOGITS), np.float64), 0)
    left /= left.sum()
    np.testing.assert_allclose(np.exp(logprobs), left[np.asarray(tokens)], rtol=1e-5)
    observed = np.bincount(np.asarray(tokens), minlength=6)
    assert not observed[left == 0].any()
    some = left > 0
    chi_square = np.sum((observed - 4000 * left)[some] ** 2 / (4000 * left[some]))
    assert chi_square <= stats.chi2.ppf(0.999, some.sum() - 1) if some.sum() > 1 else chi_square == 0


def test_a_filter_leaves_greedy_alone():
    tokens, logprobs = draw(LOGITS, 3, 0.0, Filter(top_k=1, top_p=0.5, min_p=0.5))
    assert (tokens == 2).all()
    assert (logprobs == 0).all()


def test_inversion_follows_the_running_sum_and_never_meets_a_weight_of_zero():
    weights = np.zeros((1, 2 * BLOCK + 3), np.float32)
    weights[0, [5, BLOCK - 1, 2 * BLOCK + 1]] = 1, 2, 1
    for u, token in ((0.0, 5), (0.2499, 5), (0.25, BLOCK - 1), (0.7499, BLOCK - 1), (0.75, 2 * BLOCK + 1)):
        assert int(invert(weights, jnp.array([u]))[0]) == token
    most = jnp.array([np.nextafter(np.float32(1), np.float32(0))])  # the largest that a uniform number can be
    assert int(invert(weights, most)[0]) == 2 * BLOCK + 1
    rng = np.random.default_rng(0)
    sparse = (rng.random((4000, 300)) * (rng.random((4000, 300)) < 0.05)).astype(np.float32)
    sparse[:, 150] += 1e-9  # at least one each
    chosen = np.asarray(invert(sparse, rng.random(4000).astype(np.float32)))
    assert (sparse[np.arange(4000), chosen] > 0).all()


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
