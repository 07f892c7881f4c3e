"""One decoder-only transformer with the options that the common families need.

RMSNorm (arXiv 1910.07467), rotary positions in the half-split layout (2104.09864), grouped-query attention
(2305.13245), SwiGLU (2002.05202), optional QKV bias, QK norm, tied embeddings and logit soft cap. Three ways through
the same weights: the packed full forward (training), prefill (keys and values of a prompt) and decode (one token per
slot).
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, Int

from areal_jax import sharding
from areal_jax.models.kv_cache import KVCache, LayerKV
from areal_jax.types import Params

MASKED = -1e30  # added to masked attention scores; finite, so that an all-masked (padding) row has no NaN


@dataclasses.dataclass(frozen=True)
class TransformerConfig:
    """Shape and options of the decoder."""

    vocab_size: int
    layers: int
    d_model: int
    heads: int
    kv_heads: int
    head_dim: int
    d_ff: int
    rope_base: float = 10_000.0
    norm_eps: float = 1e-6
    qkv_bias: bool = False
    qk_norm: bool = False
    tied_embeddings: bool = False
    logit_soft_cap: float = 0.0
    """logits <- cap * tanh(logits / cap); 0 is off."""
    compute_dtype: str = "float32"


def _param(rngs: nnx.Rngs, shape: tuple[int, ...], axes: sharding.Axes, fan_in: int) -> nnx.Param:
    value = jax.random.normal(rngs.params(), shape, jnp.float32) * fan_in**-0.5
    return nnx.Param(value, logical_axes=axes)


class RMSNorm(nnx.Module):
    """x / rms(x) * scale, in float32."""

    def __init__(self, size: int, eps: float, axes: sharding.Axes = ("norm",)):
        self.scale = nnx.Param(jnp.ones((size,), jnp.float32), logical_axes=axes)
        self.eps = eps

    def __call__(self, x: Float[Array, "... D"]) -> Float[Array, "... D"]:
        x32 = x.astype(jnp.float32)
        normed = x32 * jax.lax.rsqrt(jnp.mean(jnp.square(x32), axis=-1, keepdims=True) + self.eps)
        return (normed * self.scale[...]).astype(x.dtype)


def rope(x: Float[Array, "B T N H"], positions: Int[Array, "B T"], base: float) -> Float[Array, "B T N H"]:
    """Rotary embedding, half-split layout: feature i is rotated with feature i + H/2."""
    half = x.shape[-1] // 2
    frequencies = base ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angles = positions[..., None].astype(jnp.float32) * frequencies  # [B, T, H/2]
    cos, sin = jnp.cos(angles)[:, :, None, :], jnp.sin(angles)[:, :, None, :]
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return rotated.astype(x.dtype)


def attend(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B K S H"],
    v: Float[Array, "B K S H"],
    mask: Bool[Array, "B T S"],
) -> Float[Array, "B T N H"]:
    """Grouped-query attention; scores and softmax in float32. N is a multiple of K."""
    b, t, n, h = q.shape
    grouped = q.reshape(b, t, k.shape[1], n // k.shape[1], h)  # [B, T, K, G, H]
    scores = jnp.einsum("btkgh,bksh->bkgts", grouped, k, preferred_element_type=jnp.float32) * h**-0.5
    scores = jnp.where(mask[:, None, None], scores, MASKED)
    weights = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
    return jnp.einsum("bkgts,bksh->btkgh", weights, v).reshape(b, t, n, h)


class Attention(nnx.Module):
    """Projections of grouped-query attention; the attention itself is `attend`."""

    def __init__(self, config: TransformerConfig, mesh: Mesh | None, rngs: nnx.Rngs):
        d, n, k, h = config.d_model, config.heads, config.kv_heads, config.head_dim
        self.q = _param(rngs, (d, n, h), ("embed", "heads", "head_dim"), d)
        self.k = _param(rngs, (d, k, h), ("embed", "kv_heads", "head_dim"), d)
        self.v = _param(rngs, (d, k, h), ("embed", "kv_heads", "head_dim"), d)
        self.o = _param(rngs, (n, h, d), ("heads", "head_dim", "embed"), n * h * 2 * config.layers)
        if config.qkv_bias:
            self.q_bias = nnx.Param(jnp.zeros((n, h), jnp.float32), logical_axes=("heads", "head_dim"))
            self.k_bias = nnx.Param(jnp.zeros((k, h), jnp.float32), logical_axes=("kv_heads", "head_dim"))
            self.v_bias = nnx.Param(jnp.zeros((k, h), jnp.float32), logical_axes=("kv_heads", "head_dim"))
        if config.qk_norm:
            self.q_norm = RMSNorm(h, config.norm_eps, ("head_dim",))
            self.k_norm = RMSNorm(h, config.norm_eps, ("head_dim",))
        self.config, self.mesh = config, mesh

    def project(
        self, x: Float[Array, "B T D"], positions: Int[Array, "B T"]
    ) -> tuple[Float[Array, "B T N H"], Float[Array, "B K T H"], Float[Array, "B K T H"]]:
        """Queries, keys and values, rotated; keys and values in the cache's layout."""
        q = jnp.einsum("btd,dnh->btnh", x, self.q[...].astype(x.dtype))
        k = jnp.einsum("btd,dkh->btkh", x, self.k[...].astype(x.dtype))
        v = jnp.einsum("btd,dkh->btkh", x, self.v[...].astype(x.dtype))
        if self.config.qkv_bias:
            q, k, v = (y + b[...].astype(x.dtype) for y, b in ((q, self.q_bias), (k, self.k_bias), (v, self.v_bias)))
        if self.config.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        q = rope(q, positions, self.config.rope_base)
        k = rope(k, positions, self.config.rope_base)
        q = sharding.constrain(q, self.mesh, ("batch", "length", "heads", "head_dim"))
        k = sharding.constrain(k.transpose(0, 2, 1, 3), self.mesh, ("batch", "kv_heads", "length", "head_dim"))
        v = sharding.constrain(v.transpose(0, 2, 1, 3), self.mesh, ("batch", "kv_heads", "length", "head_dim"))
        return q, k, v

    def merge(self, x: Float[Array, "B T N H"]) -> Float[Array, "B T D"]:
        return jnp.einsum("btnh,nhd->btd", x, self.o[...].astype(x.dtype))


class SwiGLU(nnx.Module):
    """(silu(x W_gate) * x W_up) W_down."""

    def __init__(self, config: TransformerConfig, mesh: Mesh | None, rngs: nnx.Rngs):
        d, f = config.d_model, config.d_ff
        self.gate = _param(rngs, (d, f), ("embed", "mlp"), d)
        self.up = _param(rngs, (d, f), ("embed", "mlp"), d)
        self.down = _param(rngs, (f, d), ("mlp", "embed"), f * 2 * config.layers)
        self.mesh = mesh

    def __call__(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        gate, up = x @ self.gate[...].astype(x.dtype), x @ self.up[...].astype(x.dtype)
        hidden = sharding.constrain(jax.nn.silu(gate) * up, self.mesh, ("batch", "length", "mlp"))
        return hidden @ self.down[...].astype(x.dtype)


class Block(nnx.Module):
    """Pre-norm attention and feed-forward, each with a residual."""

    def __init__(self, config: TransformerConfig, mesh: Mesh | None, rngs: nnx.Rngs):
        self.attention_norm = RMSNorm(config.d_model, config.norm_eps)
        self.attention = Attention(config, mesh, rngs)
        self.mlp_norm = RMSNorm(config.d_model, config.norm_eps)
        self.mlp = SwiGLU(config, mesh, rngs)
        self.mesh = mesh

    def project(self, x: Float[Array, "B T D"], positions: Int[Array, "B T"]) -> tuple[Array, Array, Array]:
        return self.attention.project(self.attention_norm(x), positions)

    def finish(self, x: Float[Array, "B T D"], attended: Float[Array, "B T N H"]) -> Float[Array, "B T D"]:
        x = x + self.attention.merge(attended)
        x = x + self.mlp(self.mlp_norm(x))
        return sharding.constrain(x, self.mesh, ("batch", "length", "feature"))


class Transformer(nnx.Module):
    """The decoder. `__call__` and `decode` return final hidden states; `logits` projects them."""

    def __init__(self, config: TransformerConfig, mesh: Mesh | None, rngs: nnx.Rngs):
        d = config.d_model
        self.embedding = _param(rngs, (config.vocab_size, d), ("vocab", "embed"), d)
        self.layers = nnx.List([Block(config, mesh, rngs) for _ in range(config.layers)])
        self.final_norm = RMSNorm(d, config.norm_eps)
        if not config.tied_embeddings:
            self.head = _param(rngs, (d, config.vocab_size), ("embed", "vocab"), d)
        self.config, self.mesh = config, mesh

    def __call__(
        self, tokens: Int[Array, "B T"], positions: Int[Array, "B T"], segment_ids: Int[Array, "B T"]
    ) -> Float[Array, "B T D"]:
        """Packed causal forward: a token attends to earlier tokens of its own segment."""
        return self.prefill(tokens, positions, segment_ids)[0]

    def prefill(
        self, tokens: Int[Array, "B T"], positions: Int[Array, "B T"], segment_ids: Int[Array, "B T"]
    ) -> tuple[Float[Array, "B T D"], list[LayerKV]]:
        """The packed forward, with the keys and values [B, K, T, H] of every layer."""
        causal = jnp.tril(jnp.ones((tokens.shape[1], tokens.shape[1]), bool))
        mask = causal & (segment_ids[:, :, None] == segment_ids[:, None, :])  # [B, T, T]
        x = self._embed(tokens)
        keys_values = []
        for layer in self.layers:
            q, k, v = layer.project(x, positions)
            x = layer.finish(x, attend(q, k, v, mask))
            keys_values.append(LayerKV(k, v))
        return self.final_norm(x), keys_values

    def decode(
        self, tokens: Int[Array, " B"], positions: Int[Array, " B"], cache: KVCache
    ) -> tuple[Float[Array, "B D"], KVCache]:
        """One token per cache row: writes its keys and values at `positions`, attends to everything up to there."""
        rows = jnp.arange(tokens.shape[0])
        mask = (jnp.arange(cache.length)[None, :] <= positions[:, None])[:, None, :]  # [B, 1, S]
        x = self._embed(tokens[:, None])
        layers = []
        for layer, kv in zip(self.layers, cache.layers, strict=True):
            q, k, v = layer.project(x, positions[:, None])
            kv = LayerKV(
                kv.k.at[rows, :, positions].set(k[:, :, 0].astype(kv.k.dtype)),
                kv.v.at[rows, :, positions].set(v[:, :, 0].astype(kv.v.dtype)),
            )
            layers.append(kv)
            x = layer.finish(x, attend(q, kv.k, kv.v, mask))
        return self.final_norm(x)[:, 0], KVCache(layers)

    def logits(self, hidden: Float[Array, "... D"]) -> Float[Array, "... V"]:
        """Next-token logits in float32, soft cap applied."""
        if self.config.tied_embeddings:
            subscripts, weights = "...d,vd->...v", self.embedding[...]
        else:
            subscripts, weights = "...d,dv->...v", self.head[...]
        logits = jnp.einsum(subscripts, hidden, weights.astype(hidden.dtype), preferred_element_type=jnp.float32)
        if self.config.logit_soft_cap:
            logits = self.config.logit_soft_cap * jnp.tanh(logits / self.config.logit_soft_cap)
        return logits

    def _embed(self, tokens: Int[Array, "B T"]) -> Float[Array, "B T D"]:
        x = self.embedding[...].astype(self.config.compute_dtype)[tokens]
        return sharding.constrain(x, self.mesh, ("batch", "length", "feature"))


@dataclasses.dataclass(frozen=True)
class Model:
    """A transformer apart from its parameters: jitted functions close over it and take `params` as an argument."""

    config: TransformerConfig
    mesh: Mesh
    graphdef: Any
    abstract_params: Params
    """The parameters' shapes and dtypes, each with its sharding on `mesh`."""
    logical_axes: Any
    """The same tree, each leaf a tuple of logical axis names."""

    def bind(self, params: Params) -> Transformer:
        return nnx.merge(self.graphdef, params)

    def init_params(self, seed: int) -> Params:
        """Fresh parameters, created directly in their shards."""

        def create() -> Params:
            return nnx.to_pure_dict(nnx.state(Transformer(self.config, self.mesh, nnx.Rngs(params=seed))))

        return jax.jit(create, out_shardings=jax.tree.map(lambda x: x.sharding, self.abstract_params))()

    def parameter_count(self) -> int:
        return sum(x.size for x in jax.tree.leaves(self.abstract_params))


def build_model(config: TransformerConfig, mesh: Mesh) -> Model:
    """Traces the transformer's structure; allocates nothing."""
    graphdef, state = nnx.split(nnx.eval_shape(lambda: Transformer(config, mesh, nnx.Rngs(params=0))))
    axes = nnx.to_pure_dict(
        jax.tree.map(
            lambda v: v.replace(v.get_metadata("logical_axes")), state, is_leaf=lambda x: isinstance(x, nnx.Variable)
        )
    )
    abstract = jax.tree.map(
        lambda x, a: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding.parameter_sharding(mesh, x.shape, a)),
        nnx.to_pure_dict(state),
        axes,
    )
    return Model(config, mesh, graphdef, abstract, axes)
