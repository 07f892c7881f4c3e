"""The decoder: its three paths agree, and its options do what they say."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from areal_jax import sharding
from areal_jax.models import attention
from areal_jax.models.kv_cache import empty_cache, empty_pool
from areal_jax.models.linear import PROJECTIONS, LoraConfig
from areal_jax.models.transformer import RMSNorm, Rope, build_model, rotate
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
    "rope": {"rope": Rope(100.0)},
    "rope_llama3": {"rope": Rope(100.0, "llama3", 8.0, 1.0, 4.0, 16)},
    "windows": {"windows": (3, 0)},
    "window_rope": {"windows": (0, 4), "window_rope": Rope(50.0)},
    "output_biases": {"o_bias": True, "mlp_bias": True},
    "gelu": {"activation": "gelu_tanh"},
    "query_scale": {"query_scale": 0.1},
    "gemma": {"post_norms": True, "norm_offset": 1.0, "embedding_scale": True},
    "wide_heads": {"head_dim": 16},
    "lora": {"lora": LoraConfig(4, 8.0, tuple(PROJECTIONS))},
    "all": {"qkv_bias": True, "qk_norm": True, "tied_embeddings": True, "logit_soft_cap": 2.0},
}


def random_params(model, seed=0):
    """Every parameter random, biases and scales too, so that each one matters."""
    rng = np.random.default_rng(seed)
    return jax.tree.map(
        lambda x: jax.device_put(0.3 * rng.standard_normal(x.shape, np.float32) + (len(x.shape) == 1), x.sharding),
        model.abstract_params,
    )


@functools.cache
def whole(name):
    """A model with an option, its parameters, three sequences of twelve tokens, and their logits in one forward."""
    model = tiny_model(dataclasses.replace(TINY, **OPTIONS[name]))
    params = random_params(model)
    tokens = jax.random.randint(jax.random.key(3), (3, 12), 0, model.config.vocab_size)
    positions = jnp.broadcast_to(jnp.arange(12), tokens.shape)
    return model, params, tokens, positions, forward(model, params, tokens, positions, jnp.ones_like(tokens))


def small_cache(config, paged):
    """Room for three rows of 16 positions; paged, in blocks of 4, which lie anywhere, and two are nobody's."""
    if not paged:
        return empty_cache((3, config.kv_heads, 16, config.head_dim), config.layers, "float32", one_device_mesh())
    shape = (14, config.kv_heads, 4, config.head_dim)
    cache = empty_pool(shape, (3, 4), config.layers, "float32", one_device_mesh())
    return cache._replace(tables=jnp.asarray(np.random.default_rng(0).permutation(14)[:12].reshape(3, 4), jnp.int32))


@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("name", OPTIONS)
def test_prefill_then_decode_equals_the_full_forward(name, paged):
    model, params, tokens, positions, full = whole(name)

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

    cache = small_cache(model.config, paged)
    logits, cache = prefill(cache, tokens[:, :5], positions[:, :5])
    np.testing.assert_allclose(logits, full[:, :5], atol=1e-5)
    for t in range(5, 12):
        logits, cache = decode(cache, tokens[:, t], positions[:, t])
        np.testing.assert_allclose(logits, full[:, t], atol=1e-5)


@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("name", OPTIONS)
def test_a_prompt_in_pieces_equals_the_whole(name, paged):
    """Pieces of four of eleven tokens, the last one reaching beyond them, then a token more: as in one forward."""
    model, params, tokens, _, full = whole(name)
    rows, padded = jnp.array([2, 0]), jnp.pad(tokens, ((0, 0), (0, 8)))

    @jax.jit
    def piece(cache, start):
        at = start + jnp.arange(4)
        keys_values = model.bind(params).extend(padded[rows][:, at], at, cache.dense_rows(rows))
        return cache.write_at(rows, at, keys_values)

    @jax.jit
    def decode(cache):
        policy = model.bind(params)
        return policy.logits(policy.decode(tokens[:, 11], jnp.full(3, 11), cache)[0])

    cache = small_cache(model.config, paged)
    for start in (0, 4, 8):
        cache = piece(cache, start)
    np.testing.assert_allclose(decode(cache)[rows], full[rows, 11], atol=1e-5)


def test_paged_attention_of_idle_rows_is_finite_whatever_the_window():
    q, pool = jnp.ones((2, 2, 4)), jnp.ones((3, 1, 4, 4))
    tables = jnp.array([[3, 3, 3], [1, 3, 3]])  # the first row has no block
    for window in (0, 2):
        out = attention.attend_paged(q, pool, pool, tables, jnp.array([11, 2]), window, 1.0)
        assert np.isfinite(out).all()
        np.testing.assert_allclose(out[1], 1.0)


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
    f = Rope(100.0).frequencies(8)
    x, y = (jax.random.normal(jax.random.key(i), (1, 1, 1, 8)) for i in (0, 1))

    def score(i, j):
        return float(jnp.sum(rotate(x, jnp.array([[i]]), f) * rotate(y, jnp.array([[j]]), f)))

    assert score(3, 1) == pytest.approx(score(13, 11), abs=1e-5)
    assert score(3, 1) != pytest.approx(score(3, 2), abs=1e-3)
    one = jnp.zeros((1, 1, 1, 8)).at[..., 0].set(1.0)  # feature 0 turns by one radian a position into feature 4
    np.testing.assert_allclose(
        rotate(one, jnp.array([[2]]), f)[0, 0, 0], [np.cos(2), 0, 0, 0, np.sin(2), 0, 0, 0], atol=1e-6
    )


def test_rope_scalings_by_hand():
    plain = Rope(100.0).frequencies(8)  # wavelengths 6.3, 19.9, 62.8, 198.7 positions
    np.testing.assert_allclose(plain, [1, 100**-0.25, 0.1, 100**-0.75], rtol=1e-6)
    np.testing.assert_allclose(Rope(100.0, "linear", 4.0).frequencies(8), plain / 4, rtol=1e-6)
    # of a context of 40: shorter than 40 / 4 is kept, longer than 40 / 1 divided by 8, between them blended
    scaled = Rope(100.0, "llama3", 8.0, 1.0, 4.0, 40).frequencies(8)
    kept = (40 * plain[1] / (2 * np.pi) - 1) / 3
    blended = plain[1] * (kept + (1 - kept) / 8)
    np.testing.assert_allclose(scaled, [plain[0], blended, plain[2] / 8, plain[3] / 8], rtol=1e-6)


def test_attention_in_blocks_equals_attention_at_once(monkeypatch):
    config = dataclasses.replace(TINY, windows=(0, 5))
    model = tiny_model(config)
    params = random_params(model)
    tokens = jax.random.randint(jax.random.key(0), (2, 13), 0, config.vocab_size)
    positions = jnp.broadcast_to(jnp.concatenate([jnp.arange(7), jnp.arange(6)]), tokens.shape)
    segments = jnp.broadcast_to(jnp.array([1] * 7 + [2] * 6), tokens.shape)

    def loss(params):
        policy = model.bind(params)
        return jnp.sum(jnp.sin(policy.logits(policy(tokens, positions, segments))))

    whole = jax.jit(jax.value_and_grad(loss))(params)
    monkeypatch.setattr(attention, "QUERY_BLOCK", 4)  # 13 is no multiple of it
    blocks = jax.jit(jax.value_and_grad(lambda p: loss(p)))(params)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), whole, blocks)


@pytest.mark.parametrize(("length", "block"), [(200, 1024), (130, 1024), (100, 16), (90, 16), (33, 16)])
def test_causal_attention_in_parts_equals_attention_at_once(length, block, monkeypatch):
    monkeypatch.setattr(attention, "QUERY_BLOCK", block)
    monkeypatch.setattr(attention, "SMALLEST_PART", 32)
    keys = jax.random.split(jax.random.key(0), 3)
    q = jax.random.normal(keys[0], (2, length, 4, 8))
    k, v = (jax.random.normal(key, (2, 2, length, 8)) for key in keys[1:])
    mask = jnp.broadcast_to(jnp.tril(jnp.ones((length, length), bool)), (2, length, length))

    def both(causal):
        def loss(q, k, v):
            out = attention.attend(q, k, v, mask, 0.3, causal=causal)
            return jnp.sum(jnp.sin(out)), out

        return jax.jit(jax.value_and_grad(loss, (0, 1, 2), has_aux=True))

    for x, y in zip(jax.tree.leaves(both(True)(q, k, v)), jax.tree.leaves(both(False)(q, k, v)), strict=True):
        np.testing.assert_allclose(x, y, atol=2e-5)
    products = [str(jax.make_jaxpr(both(causal))(q, k, v)).count("dot_general") for causal in (True, False)]
    assert (products[0] > products[1]) == (length >= 2 * (32 if block == 1024 else 2 * block))


def test_a_rest_of_long_rows_keeps_no_scores_for_the_backward(monkeypatch):
    """7 blocks in parts of 3 leave one that is no loop."""
    monkeypatch.setattr(attention, "QUERY_BLOCK", 16)
    q = jnp.ones((1, 112, 1, 8))
    k = v = jnp.ones((1, 1, 112, 8))
    mask = jnp.tril(jnp.ones((1, 112, 112), bool))
    _, pull = jax.vjp(lambda q, k, v: attention.attend(q, k, v, mask, 0.3, causal=True), q, k, v)
    floats = [x for x in jax.tree.leaves(pull) if x.dtype == jnp.float32]
    assert max(x.size for x in floats) <= 112 * 8  # of the scores of one block, 16 x 112, none is kept


def test_scanned_layers_give_the_same_and_keep_rematerialisation_from_holding_all_at_once():
    """XLA on a CPU saves no memory by rematerialising layers that are not in a loop."""
    tokens = jax.random.randint(jax.random.key(0), (1, 512), 0, TINY.vocab_size)
    positions, segments = jnp.arange(512)[None], jnp.ones_like(tokens)
    found, reserved = [], []
    for changes in ({}, {"scan_layers": True, "remat": "full"}, {"scan_layers": True, "remat": "dots"}):
        model = tiny_model(dataclasses.replace(TINY, layers=12, **changes))
        params = random_params(model)

        def loss(params, model=model):
            policy = model.bind(params)
            return jnp.sum(jnp.sin(policy.logits(policy(tokens, positions, segments))))

        compiled = jax.jit(jax.grad(loss)).lower(params).compile()
        found.append(compiled(params))
        reserved.append(compiled.memory_analysis().temp_size_in_bytes)
    for other in found[1:]:
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4 * np.abs(a).max()), found[0], other)
    assert reserved[1] < reserved[0] / 3
    assert reserved[1] < reserved[2] < reserved[0]
    with pytest.raises(ValueError, match="windows are"):
        dataclasses.replace(TINY, windows=(4, 0), scan_layers=True)


@pytest.mark.parametrize("remat", ["dots", "full"])
def test_rematerialisation_changes_no_gradient(remat):
    tokens = jax.random.randint(jax.random.key(0), (2, 9), 0, TINY.vocab_size)
    positions = jnp.broadcast_to(jnp.arange(9), tokens.shape)
    found = []
    for name in ("none", remat):
        model = tiny_model(dataclasses.replace(TINY, remat=name))
        params = random_params(model)

        def loss(params, model=model):
            policy = model.bind(params)
            return jnp.sum(jnp.sin(policy.logits(policy(tokens, positions, jnp.ones_like(tokens)))))

        jaxpr = str(jax.make_jaxpr(jax.grad(loss))(params))
        assert ("remat" in jaxpr) == (name != "none")
        found.append(jax.jit(jax.grad(loss))(params))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), *found)


def test_bfloat16_parameters_compute_what_float32_ones_do():
    """A sampler keeps matrices as it computes: casting them beforehand changes nothing, and norms stay float32."""
    config = dataclasses.replace(TINY, compute_dtype="bfloat16", qkv_bias=True)
    wide, narrow = (build_model(config, one_device_mesh(), dtype) for dtype in ("float32", "bfloat16"))
    params = random_params(wide)
    cast = jax.tree.map(lambda x, like: x.astype(like.dtype), params, narrow.abstract_params)
    assert cast["layers"][0]["attention"]["q"].dtype == jnp.bfloat16
    assert cast["layers"][0]["attention_norm"]["scale"].dtype == jnp.float32
    tokens = jax.random.randint(jax.random.key(0), (1, 9), 0, config.vocab_size)
    inputs = (tokens, jnp.arange(9)[None], jnp.ones_like(tokens))
    np.testing.assert_array_equal(forward(wide, params, *inputs), forward(narrow, cast, *inputs))


def test_rms_norm_by_hand():
    norm = RMSNorm(2, dataclasses.replace(TINY, norm_eps=0.0))
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
