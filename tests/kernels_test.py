"""Kernels of attention against the plain one: packed rows and decoding, shared keys, windows, gradients, meshes."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from areal_jax import build, sharding
from areal_jax.models.attention import attend
from areal_jax.models.decode_kernels import DECODE_KERNELS, decode_dense, decode_paged
from areal_jax.models.kernels import KERNELS, Packed, attend_packed
from areal_jax.types import UserError
from configs import default
from tests.helpers import TINY, one_device_mesh, tiny_model
from tests.models_test import forward, random_params, small_cache
from tests.trainer_test import assert_steps_close, on_one_device, step

HERE = ["xla_chunked", "splash"]  # splash: interpreted


def case(window, heads=4, kv_heads=2, length=72, rows=2):
    """q, k, v and the packing of rows of four segments, the last of which is padding."""
    rng = np.random.default_rng(window)
    q = rng.standard_normal((rows, length, heads, 16), np.float32)
    k, v = rng.standard_normal((2, rows, kv_heads, length, 16), np.float32)
    ends = np.sort(rng.integers(1, length, (rows, 3)))
    segments = (1 + (np.arange(length) >= ends[:, :, None]).sum(axis=1)) % 4
    behind = np.arange(length)[:, None] - np.arange(length)
    mask = (behind >= 0) & (segments[:, :, None] == segments[:, None, :])
    mask &= behind < window if window else True
    return (q, k, v), Packed(jnp.asarray(mask), jnp.asarray(segments), window)


def result_and_gradients(name, inputs, packed, mesh=None):
    def loss(q, k, v):
        out = attend_packed(name, q, k, v, packed, 0.3, mesh)
        return jnp.sum(jnp.sin(out)), out

    (_, out), gradients = jax.jit(jax.value_and_grad(loss, (0, 1, 2), has_aux=True))(*inputs)
    return [np.asarray(x) for x in (out, *gradients)]


@pytest.mark.parametrize("window", [0, 5])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("name", HERE)
def test_a_kernel_computes_what_the_plain_one_does(name, kv_heads, window):
    inputs, packed = case(window, kv_heads=kv_heads)
    expected = result_and_gradients("xla", inputs, packed)
    np.testing.assert_allclose(expected[0], attend(*inputs, packed.mask, 0.3), atol=1e-6)
    for x, y in zip(result_and_gradients(name, inputs, packed), expected, strict=True):
        np.testing.assert_allclose(x, y, atol=1e-5 * np.abs(y).max())


@pytest.mark.parametrize("name", HERE)
def test_segments_and_windows_matter_to_it(name):
    inputs, packed = case(5)
    causal = Packed(jnp.tril(jnp.ones_like(packed.mask)), jnp.ones_like(packed.segment_ids), 0)
    found, without = (result_and_gradients(name, inputs, p)[0] for p in (packed, causal))
    assert np.abs(found - without).max() > 0.1


@pytest.mark.parametrize(
    ("name", "shape"), [("xla_chunked", (2, 2, 2)), ("xla_chunked", (1, 2, 1, 2)), ("splash", (2, 2, 2))]
)
def test_every_device_of_a_mesh_computes_its_part(name, shape):
    devices = jax.devices()[: int(np.prod(shape))]
    mesh = sharding.make_mesh(dict(zip(sharding.MESH_AXES, shape, strict=False)), devices)
    inputs, packed = case(0, rows=4)
    expected = result_and_gradients("xla", inputs, packed)
    for x, y in zip(result_and_gradients(name, inputs, packed, mesh), expected, strict=True):
        np.testing.assert_allclose(x, y, atol=1e-5 * np.abs(y).max())
    uneven, few = case(0, rows=3)
    plain = result_and_gradients("xla", uneven, few)[0]
    np.testing.assert_allclose(result_and_gradients(name, uneven, few, mesh)[0], plain, atol=1e-5)


@pytest.mark.parametrize("mesh_shape", [(1,), (2, 2, 2), (2, 1, 2, 2)])
def test_a_training_step_with_a_kernel_equals_the_plain_one(mesh_shape):
    found = step(mesh_shape, model_config=dataclasses.replace(TINY, attention="xla_chunked"))
    assert_steps_close(found, on_one_device(), rtol=2e-5)


@pytest.mark.parametrize("name", HERE)
def test_a_model_with_windows_computes_the_same_by_a_kernel(name):
    plain, other = (tiny_model(dataclasses.replace(TINY, windows=(3, 0), attention=n)) for n in ("xla", name))
    tokens = np.arange(24).reshape(2, 12) % 17
    segments = np.repeat([[1, 1, 1, 1, 1, 1, 1, 2, 2, 2, 2, 2]], 2, axis=0)
    positions = np.concatenate([np.arange(7), np.arange(5)])[None].repeat(2, axis=0)
    params = plain.init_params(0)
    expected = forward(plain, params, tokens, positions, segments)
    np.testing.assert_allclose(forward(other, params, tokens, positions, segments), expected, atol=1e-5)


# --- decoding ---


def decode_case(window=0, paged=False, head_dim=16, rows=4):
    """q, keys, values (and tables) of rows with one key, some and all; the last row of a pool is idle."""
    rng = np.random.default_rng(window)
    q = rng.standard_normal((rows, 4, head_dim), np.float32)
    positions = np.array([0, 17, 63, 30], np.int32)[:rows]
    if not paged:
        k, v = rng.standard_normal((2, rows, 2, 64, head_dim), np.float32)
        return [jnp.asarray(x) for x in (q, k, v, positions)]
    k, v = rng.standard_normal((2, 40, 2, 8, head_dim), np.float32)
    tables = rng.permutation(40)[: rows * 8].reshape(rows, 8)
    tables[1, 3:], tables[3] = 40, 40  # no block behind the row's position, and none at all
    return [jnp.asarray(x) for x in (q, k, v, tables.astype(np.int32), positions)]


@pytest.mark.parametrize("window", [0, 5])
def test_dense_decoding_by_a_kernel(window):
    case = decode_case(window)
    plain, found = (decode_dense(name, *case, window, 0.3, None) for name in ("xla", "triton"))
    np.testing.assert_allclose(found, plain, atol=1e-5)
    assert np.abs(plain - decode_dense("triton", *case, 5 - window, 0.3, None)).max() > 0.1


def test_paged_decoding_by_a_kernel():
    q, k, v, tables, positions = decode_case(paged=True)
    plain, found = (decode_paged(name, q, k, v, tables, positions, 0, 0.3, None)[:3] for name in ("xla", "triton"))
    np.testing.assert_allclose(found, plain, atol=1e-5)
    alive = decode_paged("triton", q, k, v, jnp.where(tables == 40, 0, tables), positions, 0, 0.3, None)[:3]
    np.testing.assert_array_equal(alive, found)  # what lies behind a row's position is not looked at


def test_paged_decoding_by_the_kernel_of_a_tpu():
    q, k, v, tables, positions = decode_case(paged=True, head_dim=128)
    with pltpu.force_tpu_interpret_mode():
        found = decode_paged("mosaic", q, k, v, tables, positions, 0, 0.1, None)[:3]
    plain = decode_paged("xla", q, k, v, tables, positions, 0, 0.1, None)[:3]
    np.testing.assert_allclose(found, plain, atol=0.02)  # it multiplies in bfloat16, as a TPU does
    assert np.abs(plain).max() > 0.5


@pytest.mark.parametrize("paged", [False, True])
def test_every_device_decodes_its_part(paged):
    shape = {"tensor": 2} if paged else {"data": 2, "tensor": 2}
    mesh = sharding.make_mesh(shape, jax.devices()[: int(np.prod(list(shape.values())))])
    case, decode = decode_case(paged=paged), decode_paged if paged else decode_dense
    plain = decode("xla", *case, 0, 0.3, None)[:3]
    found = jax.jit(lambda *x: decode("triton", *x, 0, 0.3, mesh))(*case)[:3]
    np.testing.assert_allclose(found, plain, atol=1e-5)


@pytest.mark.parametrize("paged", [False, True])
def test_a_model_decodes_the_same_by_a_kernel(paged):
    plain, model = (tiny_model(dataclasses.replace(TINY, decode_attention=n)) for n in ("xla", "triton"))
    params, tokens = random_params(plain), np.array([3, 4, 5])
    cache, found = small_cache(TINY, paged), []
    for m in (plain, model):
        step = jax.jit(lambda c, p, m=m: m.bind(params).decode(tokens, p, c))
        _, filled = step(cache, np.zeros(3, np.int32))
        found.append(step(filled, np.ones(3, np.int32))[0])
    np.testing.assert_allclose(found[1], found[0], atol=1e-5 * np.abs(found[0]).max())


def test_auto_and_xla_are_the_plain_one_on_a_cpu():
    mesh = one_device_mesh()
    for name in ("auto", "xla"):
        assert build.attention_kernel(name, mesh, on_cpu=True, dtype="float32") == "xla"
        assert build.decode_kernel(name, on_cpu=True, head_dim=80) == "xla"


def test_a_kernel_that_cannot_run_is_refused(monkeypatch):
    mesh = one_device_mesh()

    def packed_rows(name, on_cpu=True, dtype="float32", mesh=mesh):
        return build.attention_kernel(name, mesh, on_cpu, dtype)

    with pytest.raises(UserError, match=r"'triton' and the devices are cpu: expected one of \['xla', 'xla_chunked'\]"):
        packed_rows("triton")
    assert packed_rows("triton", on_cpu=False) == "triton"  # planned here for other devices
    with pytest.raises(UserError, match=r"'cudnn', which computes in bfloat16, and the model in float32"):
        packed_rows("cudnn", on_cpu=False)
    split = sharding.make_mesh({"context": 2}, jax.devices()[:2])
    with pytest.raises(UserError, match=r"has rows whole, and the mesh's context is 2"):
        packed_rows("splash", on_cpu=False, mesh=split)
    monkeypatch.setitem(KERNELS, "xla_chunked", dataclasses.replace(KERNELS["xla_chunked"], package="not_there"))
    with pytest.raises(UserError, match=r"needs the package not_there: pip install -r requirements-extra"):
        packed_rows("xla_chunked")
    with pytest.raises(UserError, match=r"decode_attention is 'mosaic' and the devices are cpu: expected .*'xla'\]"):
        build.decode_kernel("mosaic", on_cpu=True, head_dim=64)
    assert build.decode_kernel("mosaic", on_cpu=False, head_dim=64) == "mosaic"
    with pytest.raises(UserError, match=r"'triton', which wants heads of a power of two features, .* have 80"):
        build.decode_kernel("triton", on_cpu=False, head_dim=80)


# --- that it is the kernel that computes ---


def spied(monkeypatch, kernels, name, **fields):
    """Calls of the kernel: the shapes of its queries."""
    seen = []

    def spy(run):
        def counted(q, *rest):
            seen.append(q.shape)
            return run(q, *rest)

        return counted

    monkeypatch.setitem(kernels, name, dataclasses.replace(kernels[name], **{f: spy(r) for f, r in fields.items()}))
    return seen


def test_the_named_kernel_computes_packed_rows_unless_they_do_not_divide(monkeypatch):
    seen = spied(monkeypatch, KERNELS, "xla_chunked", run=KERNELS["xla_chunked"].run)
    mesh = sharding.make_mesh({"fsdp": 2, "context": 2}, jax.devices()[:4])
    for rows, length, devices, shape in [
        (2, 72, None, (2, 72, 4, 16)),
        (4, 72, mesh, (2, 36, 4, 16)),
        (3, 72, mesh, None),
        (4, 33, mesh, None),
    ]:
        (q, k, v), packed = case(0, rows=rows, length=length)
        found = jax.jit(lambda *x, p=packed, m=devices: attend_packed("xla_chunked", *x, p, 0.3, m))(q, k, v)
        np.testing.assert_allclose(found, attend(q, k, v, packed.mask, 0.3), atol=1e-5)
        assert set(seen) == ({shape} if shape else set())  # tracing for a mesh may call it more than once
        seen.clear()


def test_the_named_kernels_decode_unless_they_cannot(monkeypatch):
    own = DECODE_KERNELS["triton"]
    seen = spied(monkeypatch, DECODE_KERNELS, "triton", dense=own.dense, paged=own.paged)
    q, k, v, positions = decode_case()
    decode_dense("triton", q, k, v, positions, 0, 0.3, None)
    decode_paged("triton", *decode_case(paged=True), 0, 0.3, None)
    assert len(seen) == 2
    decode_dense("triton", q, k[:, :, :60], v[:, :, :60], positions, 0, 0.3, None)  # 60 is no multiple of 16
    decode_paged("triton", *decode_case(paged=True), 5, 0.3, None)  # a window
    assert len(seen) == 2


@pytest.mark.parametrize("paged", [False, True])
def test_the_kernels_of_a_gpu_can_be_lowered_for_one(paged, monkeypatch):
    """Pallas refuses shapes that Triton does not have when it lowers, which needs no GPU."""
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    decode = decode_paged if paged else decode_dense
    case = [x.astype(jnp.bfloat16) if x.dtype == jnp.float32 else x for x in decode_case(paged=paged)]
    traced = jax.jit(lambda *x: decode("triton", *x, 0, 0.3, None)).trace(*case)
    assert "triton" in traced.lower(lowering_platforms=("cuda",)).as_text()


def test_blocks_of_a_paged_cache_are_powers_of_two():
    config = default.get_config()
    config.rollout.update({"cache": "paged", "max_prompt_length": 16, "max_response_length": 72})
    assert build.engine_config(config, (), 1).paging.block_size == 8  # an eighth of 88 is 11
    config.rollout.block_size = 1
    assert build.engine_config(config, (), 1).paging.block_size == 1
