"""Kernels of attention against the plain one: packed rows, shared keys, windows, gradients, meshes."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from areal_jax import build, sharding
from areal_jax.models.attention import attend
from areal_jax.models.kernels import KERNELS, Packed, attend_packed
from areal_jax.types import UserError
from tests.helpers import TINY, one_device_mesh, tiny_model
from tests.models_test import forward
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


def test_auto_and_xla_are_the_plain_one_on_a_cpu():
    mesh = one_device_mesh()
    assert build.attention_kernel("auto", mesh, on_cpu=True) == build.attention_kernel("xla", mesh, True) == "xla"


def test_a_kernel_that_cannot_run_is_refused(monkeypatch):
    mesh = one_device_mesh()
    with pytest.raises(UserError, match=r"'triton' and the devices are cpu: expected one of \['xla', 'xla_chunked'\]"):
        build.attention_kernel("triton", mesh, on_cpu=True)
    assert build.attention_kernel("triton", mesh, on_cpu=False) == "triton"  # planned here for other devices
    split = sharding.make_mesh({"context": 2}, jax.devices()[:2])
    with pytest.raises(UserError, match=r"has rows whole, and mesh.trainer.context is 2"):
        build.attention_kernel("splash", split, on_cpu=False)
    monkeypatch.setitem(KERNELS, "xla_chunked", dataclasses.replace(KERNELS["xla_chunked"], package="not_there"))
    with pytest.raises(UserError, match=r"needs the package not_there: pip install -r requirements-extra"):
        build.attention_kernel("xla_chunked", mesh, on_cpu=True)
