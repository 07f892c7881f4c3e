"""Attention of packed rows by kernels of libraries, by name (`model.attention`); the plain one is in `attention.py`.

They compute what the plain one does, up to rounding in the dtype of computation. Each is compared with it where it can
run: by `tests/kernels_test.py` on a CPU (splash interpreted), and, on whatever machine it is started on, by `python -m
experiments.benchmark attention`, which times them too.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from absl import flags
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, Int

from areal_jax import sharding
from areal_jax.models.attention import attend

SPLASH_BLOCK = 128  # rows are filled up to a multiple of it


@dataclasses.dataclass(frozen=True)
class Packed:
    """Which tokens of packed rows attend to which."""

    mask: Bool[Array, "B T T"]
    """Earlier tokens and itself, of the own segment and, with a window, of the last so many."""
    segment_ids: Int[Array, "B T"]
    window: int
    """0: none. Within a segment positions follow one another, so that it may be counted along the row."""


@dataclasses.dataclass(frozen=True)
class Kernel:
    """One way to compute it."""

    run: Callable[[Array, Array, Array, Packed, float], Array]
    """(q, k, v, packed, scale), on one device, with all its rows whole."""
    platforms: tuple[str, ...]
    """Where it can run."""
    splits_rows: bool
    """Whether it can have a part of a row's queries (the mesh axis `context`)."""
    package: str = "jax"
    """What must be installed."""
    dtypes: tuple[str, ...] = ("float32", "bfloat16")
    """Of computation, that it has."""


def attend_packed(
    name: str,
    q: Float[Array, "B T N H"],
    k: Float[Array, "B K T H"],
    v: Float[Array, "B K T H"],
    packed: Packed,
    scale: float,
    mesh: Mesh | None,
) -> Float[Array, "B T N H"]:
    """`attention.attend` by the kernel of this name in KERNELS, or 'xla', the plain one.

    On several devices each computes its rows, heads and queries, since XLA does not split a kernel; where rows or
    queries do not divide over them (a few prompts of a sampler) the plain one is used.
    """
    shards = mesh.shape["context"] if mesh is not None else 1
    uneven = mesh is not None and (q.shape[0] % sharding.row_shards(mesh) > 0 or q.shape[1] % shards > 0)
    if name == "xla" or uneven:
        return attend(q, k, v, packed.mask, scale, shards, causal=True)
    kernel = KERNELS[name]
    queries, keys = ("batch", "length", "heads", "head_dim"), ("batch", "kv_heads", "keys", "head_dim")

    def run(q: Array, k: Array, v: Array, mask: Array, segment_ids: Array) -> Array:
        return kernel.run(q, k, v, Packed(mask, segment_ids, packed.window), scale)

    axes = (queries, keys, keys, ("batch", "length", "keys"), ("batch", "keys"))
    return sharding.on_each_device(run, mesh, axes, queries)(q, k, v, packed.mask, packed.segment_ids)


def _tokamax(name: str, q: Array, k: Array, v: Array, packed: Packed, scale: float) -> Array:
    """One of the implementations of tokamax.dot_product_attention."""
    import tokamax

    if not flags.FLAGS.is_parsed():  # it reads its own, and would look for them among the arguments of any program
        flags.FLAGS.mark_as_parsed()
    keys, values = k.transpose(0, 2, 1, 3), v.transpose(0, 2, 1, 3)
    whole = q.shape[1] == keys.shape[1]  # no part of the rows: what is above the diagonal need not be looked at
    out: Any = tokamax.dot_product_attention(
        q,
        keys,
        values,
        mask=packed.mask[:, None],
        scale=scale,
        is_causal=whole,
        implementation=name,
    )
    return out.astype(q.dtype)


def _splash(q: Array, k: Array, v: Array, packed: Packed, scale: float) -> Array:
    """JAX's splash attention for TPUs: it skips blocks that causality or the window mask out; interpreted on a CPU."""
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    length, heads = q.shape[1], q.shape[2]
    pad = -length % SPLASH_BLOCK
    shape = (length + pad, length + pad)
    seen = masks.LocalMask(shape, (packed.window - 1, 0), 0) if packed.window else masks.CausalMask(shape)
    kernel = splash.make_splash_mha(
        masks.MultiHeadMask([seen] * heads),
        head_shards=1,
        q_seq_shards=1,
        interpret=jax.default_backend() == "cpu",
    )
    queries = jnp.pad((q * scale).transpose(0, 2, 1, 3), ((0, 0), (0, 0), (0, pad), (0, 0)))
    keys, values = (jnp.pad(x, ((0, 0), (0, 0), (0, pad), (0, 0))) for x in (k, v))
    ids = jnp.pad(packed.segment_ids, ((0, 0), (0, pad)), constant_values=-1).astype(jnp.int32)
    out = jax.vmap(kernel)(queries, keys, values, splash.SegmentIds(ids, ids))
    return out[:, :, :length].transpose(0, 2, 1, 3).astype(q.dtype)


KERNELS: dict[str, Kernel] = {
    **{
        name: Kernel(functools.partial(_tokamax, name), platforms, splits_rows=True, package="tokamax")
        for name, platforms in {
            "mosaic": ("gpu",),
            "triton": ("gpu",),
            "xla_chunked": ("cpu", "gpu", "tpu"),
        }.items()
    },
    "cudnn": Kernel(
        functools.partial(_tokamax, "cudnn"), ("gpu",), splits_rows=True, package="tokamax", dtypes=("bfloat16",)
    ),
    "splash": Kernel(_splash, ("tpu",), splits_rows=False),
}
"""name -> kernel. mosaic is of Hopper and later GPUs."""

BEST = {"cpu": "xla"}
"""platform -> what 'auto' takes: what has been measured to be quickest there (docs/performance.md); else 'xla'."""
