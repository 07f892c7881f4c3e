"""The decoder: its three paths agree, and its options do what they say."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from areal_jax import sharding
from areal_jax.models.kv_cache import empty_cache
from areal_jax.models.transformer import RMSNorm, rope
from tests.helpers import TINY, one_device_mesh, tiny_model


def forward(model, params, tokens, positions, segment_ids):
    """Logits of the packed forward, jitted: op by op would compile each op."""

    @jax.jit
    def run(params, *inputs):
        policy = model.bind(params)
        return policy.logits(policy(*inputs))

    return run(params, tokens, positions, segment_ids)


OPTIONS = {
    "plain": {},
    "multi_head": {"kv_heads": 4},
    "multi_query": {"kv_heads": 1},
    "qkv_bias": {"qkv_bias": True},
    "qk_norm": {"qk_norm": True},
    "tied": {"tied_embeddings": True},
    "soft_cap": {"logit_soft_cap": 0.5},
    "rope_base": {"rope_base": 100.0},
    "wide_heads": {"head_dim": 16},
    "all": {"qkv_bias": True, "qk_norm": True, "tied_embeddings": True, "logit_soft_cap": 2.0},
}


def random_params(model, seed=0):
    """Every parameter random, biases and scales too, so that each one matters."""
    rng = np.random.default_rng(seed)
    return jax.tree.map(
        lambda x: jax.device_put(0.3 * rng.standard_normal(x.shape, np.float32) + (len(x.shape) == 1), x.sharding),
        model.abstract_params,
    )


@pytest.mark.parametrize("name", OPTIONS)
def test_prefill_then_decode_equals_the_full_forward(name):
    config = dataclasses.replace(TINY, **OPTIONS[name])
    model = tiny_model(config)
    params = random_params(model)
    tokens = jax.random.randint(jax.random.key(3), (3, 12), 0, config.vocab_size)
    positions = jnp.broadcast_to(jnp.arange(12), tokens.shape)
    full = forward(model, params, tokens, positions, jnp.ones_like(tokens))

    @jax.jit
    def prefill(cache, tokens, positions):
        policy = model.bind(params)
        hidden, keys_values = policy.prefill(tokens, positions, jnp.ones_like(tokens))
        return policy.logits(hidden), cache.write_rows(jnp.arange(3), keys_values)

    @jax.jit
    def decode(cache, tokens, positions):
        policy = model.bind(params)
        hidden, cache = policy.decode(tokens, positions, cache)
        return policy.logits(hidden), cache

    cache = empty_cache((3, config.kv_heads, 16, config.head_dim), config.layers, "float32", one_device_mesh())
    logits, cache = prefill(cache, tokens[:, :5], positions[:, :5])
    np.testing.assert_allclose(logits, full[:, :5], atol=1e-5)
    for t in range(5, 12):
        logits, cache = decode(cache, tokens[:, t], positions[:, t])
        np.testing.assert_allclose(logits, full[:, t], atol=1e-5)


@pytest.mark.parametrize("name", [n for n in OPTIONS if n not in ("plain", "multi_head", "multi_query", "wide_heads")])
def test_every_option_changes_the_result(name):
    changed, plain = dataclasses.replace(TINY, **OPTIONS[name]), TINY
    tokens = jnp.arange(8)[None] % 17
    results = []
    for config in (plain, changed):
        model = tiny_model(config)
        results.append(forward(model, random_params(model), tokens, jnp.arange(8)[None], jnp.ones_like(tokens)))
    assert np.abs(results[0] - results[1]).max() > 1e-3


def test_packed_sequences_equal_separate_ones():
    model = tiny_model()
    params = random_params(model)
    a, b = jnp.arange(5)[None] + 3, jnp.arange(7)[None] + 8
    separate = [forward(model, params, x, jnp.arange(x.shape[1])[None], jnp.ones_like(x)) for x in (a, b)]
    packed = jnp.concatenate([a, b, jnp.zeros((1, 4), int)], axis=1)
    positions = jnp.concatenate([jnp.arange(5), jnp.arange(7), jnp.zeros(4, int)])[None]
    segments = jnp.array([[1] * 5 + [2] * 7 + [0] * 4])
    together = forward(model, params, packed, positions, segments)
    np.testing.assert_allclose(together[:, :5], separate[0], atol=1e-5)
    np.testing.assert_allclose(together[:, 5:12], separate[1], atol=1e-5)
    assert np.isfinite(together).all()


def test_rope_depends_on_distances_only_and_rotates_pairs_half_a_head_apart():
    x, y = (jax.random.normal(jax.random.key(i), (1, 1, 1, 8)) for i in (0, 1))

    def score(i, j):
        return float(jnp.sum(rope(x, jnp.array([[i]]), 100.0) * rope(y, jnp.array([[j]]), 100.0)))

    assert score(3, 1) == pytest.approx(score(13, 11), abs=1e-5)
    assert score(3, 1) != pytest.approx(score(3, 2), abs=1e-3)
    one = jnp.zeros((1, 1, 1, 8)).at[..., 0].set(1.0)  # feature 0 turns by one radian a position into feature 4
    np.testing.assert_allclose(
        rope(one, jnp.array([[2]]), 100.0)[0, 0, 0], [np.cos(2), 0, 0, 0, np.sin(2), 0, 0, 0], atol=1e-6
    )


def test_rms_norm_by_hand():
    norm = RMSNorm(2, eps=0.0)
    np.testing.assert_allclose(norm(jnp.array([3.0, 4.0])), np.array([3.0, 4.0]) / np.sqrt(12.5), rtol=1e-6)


def test_every_parameter_has_as_many_logical_axes_as_dimensions_and_known_ones():
    model = tiny_model(dataclasses.replace(TINY, **OPTIONS["all"]))
    is_axes = lambda x: isinstance(x, tuple)  # noqa: E731
    axes = jax.tree.leaves(model.logical_axes, is_leaf=is_axes)
    arrays = jax.tree.leaves(model.abstract_params)
    assert len(axes) == len(arrays)
    for names, array in zip(axes, arrays, strict=True):
        assert len(names) == array.ndim
        assert set(names) <= set(sharding.RULES)


def test_parameters_are_created_in_their_shards():
    mesh = sharding.make_mesh({"data": 2, "fsdp": 2, "tensor": 2}, jax.devices())
    params = tiny_model(mesh=mesh).init_params(0)
    gate = params["layers"][0]["mlp"]["gate"]
    assert gate.sharding.spec == jax.sharding.PartitionSpec("fsdp", "tensor")
    assert gate.addressable_shards[0].data.shape == (8, 16)
    single = tiny_model().init_params(0)
    np.testing.assert_allclose(gate, single["layers"][0]["mlp"]["gate"], rtol=1e-6)
