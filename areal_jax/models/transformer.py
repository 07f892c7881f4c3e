"""One decoder-only transformer with the options that the common families need.

RMSNorm (arXiv 1910.07467), rotary positions in the half-split layout (2104.09864), grouped-query attention
(2305.13245), gated feed-forward (2002.05202), and as options biases, QK norm, sliding windows, post-norms, tied
embeddings and a logit soft cap. Which family needs which is in `families.py`. Three ways through the same weights: the
packed full forward (training), prefill (keys and values of a prompt) and decode (one token per slot).
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, Int

from areal_jax import sharding
from areal_jax.models.attention import attend
from areal_jax.models.kernels import Packed, attend_packed
from areal_jax.models.kv_cache import Cache, LayerKV, Look
from areal_jax.models.linear import (
    PROJECTED,
    LoraConfig,
    add_adapters,
    is_adapter,
    join_adapters,
    projected,
    split_adapters,
)
from areal_jax.types import Output, Params

ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "silu": jax.nn.silu,
    "gelu": lambda x: jax.nn.gelu(x, approximate=False),
    "gelu_tanh": lambda x: jax.nn.gelu(x, approximate=True),
}


REMAT: dict[str, Callable[..., bool] | None] = {
    "none": None,
    "dots": jax.checkpoint_policies.save_only_these_names(PROJECTED),
    "full": jax.checkpoint_policies.nothing_saveable,
}
"""name -> the policy of jax.checkpoint around each layer: keep everything, the results of matrix products with weights,
or each layer's input alone."""


@dataclasses.dataclass(frozen=True)
class Rope:
    """Rotary frequencies: feature pair i of a head of H features turns by base^(-2i/H) radians a position.

    kind 'linear' divides all frequencies by `factor`. 'llama3' divides those whose wavelength is over
    original_length / low_freq_factor, leaves those under original_length / high_freq_factor, and blends between
    (Llama 3.1's long-context scaling).
    """

    base: float = 10_000.0
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_length: int = 8192
    """Tokens; the context length before scaling."""

    def frequencies(self, head_dim: int) -> np.ndarray:
        """float32 [H/2]: radians per position."""
        plain = self.base ** (-np.arange(0, head_dim, 2) / head_dim)
        if self.kind == "default":
            return plain.astype(np.float32)
        if self.kind == "linear":
            return (plain / self.factor).astype(np.float32)
        turns = self.original_length * plain / (2 * math.pi)  # in the original context
        blend = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        kept = np.clip(blend, 0.0, 1.0)
        return (kept * plain + (1 - kept) * plain / self.factor).astype(np.float32)


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
    rope: Rope = Rope()
    norm_eps: float = 1e-6
    qkv_bias: bool = False
    o_bias: bool = False
    """Bias of the attention's output projection."""
    mlp_bias: bool = False
    qk_norm: bool = False
    tied_embeddings: bool = False
    logit_soft_cap: float = 0.0
    """logits <- cap * tanh(logits / cap); 0 is off."""
    activation: str = "silu"
    """A name in ACTIVATIONS."""
    query_scale: float = 0.0
    """Attention scores are multiplied by it; 0 is head_dim ** -0.5."""
    windows: tuple[int, ...] = ()
    """Per layer: a token attends to this many positions, its own included; 0 is all. () is all in every layer."""
    window_rope: Rope | None = None
    """The rotary frequencies of layers with a window, if they have their own."""
    post_norms: bool = False
    """Norms on the outputs of attention and feed-forward, before they are added (Gemma)."""
    norm_offset: float = 0.0
    """Norms multiply by norm_offset + scale (Gemma: 1)."""
    embedding_scale: bool = False
    """Embeddings are multiplied by sqrt(d_model) (Gemma)."""
    compute_dtype: str = "float32"
    attention: str = "xla"
    """Of packed rows: a name in `kernels.KERNELS`, or 'xla', the plain one."""
    decode_attention: str = "xla"
    """Of new tokens: a name in `decode_kernels.DECODE_KERNELS`, or 'xla', the plain one."""
    remat: str = "none"
    """A name in REMAT: what the forward of a training step keeps for its backward."""
    scan_layers: bool = False
    """Whether the forward of a training step is a loop over the layers, which must be alike."""
    lora: LoraConfig | None = None
    """Adapters, which alone are trained; None: all parameters are."""

    def __post_init__(self) -> None:
        if self.scan_layers and len(set(self.windows)) > 1:
            raise ValueError(f"scan_layers is True and the layers' windows are {self.windows}: they must be alike")

    def window(self, layer: int) -> int:
        return self.windows[layer] if self.windows else 0

    def layer_rope(self, layer: int) -> Rope:
        return self.window_rope if self.window(layer) and self.window_rope else self.rope


def _param(rngs: nnx.Rngs, shape: tuple[int, ...], axes: sharding.Axes, fan_in: int) -> nnx.Param:
    value = jax.random.normal(rngs.params(), shape, jnp.float32) * fan_in**-0.5
    return nnx.Param(value, logical_axes=axes)


def _zeros(shape: tuple[int, ...], axes: sharding.Axes) -> nnx.Param:
    return nnx.Param(jnp.zeros(shape, jnp.float32), logical_axes=axes)


class RMSNorm(nnx.Module):
    """x / rms(x) * (offset + scale), in float32."""

    def __init__(self, size: int, config: TransformerConfig, axes: sharding.Axes = ("norm",)):
        self.eps, self.offset = config.norm_eps, config.norm_offset
        self.scale = nnx.Param(jnp.full((size,), 1.0 - self.offset, jnp.float32), logical_axes=axes)

    def __call__(self, x: Float[Array, "... D"]) -> Float[Array, "... D"]:
        x32 = x.astype(jnp.float32)
        normed = x32 * jax.lax.rsqrt(jnp.mean(jnp.square(x32), axis=-1, keepdims=True) + self.eps)
        scale = self.scale[...] + self.offset if self.offset else self.scale[...]
        return (normed * scale).astype(x.dtype)


def rotate(
    x: Float[Array, "B T N H"], positions: Int[Array, "B T"], frequencies: np.ndarray
) -> Float[Array, "B T N H"]:
    """Rotary embedding, half-split layout: feature i is rotated with feature i + H/2."""
    angles = positions[:, :, None, None, None].astype(jnp.float32) * frequencies  # [B, T, 1, 1, H/2]
    halves = x.astype(jnp.float32).reshape(*x.shape[:3], 2, -1)
    turned = jnp.flip(halves, axis=3) * jnp.array([[-1.0], [1.0]])  # (-second, first); a flip costs nothing once fused
    return (halves * jnp.cos(angles) + turned * jnp.sin(angles)).reshape(x.shape).astype(x.dtype)


class Attention(nnx.Module):
    """Projections of grouped-query attention; the attention itself is in `attention.py`."""

    def __init__(self, config: TransformerConfig, layer: int, mesh: Mesh | None, rngs: nnx.Rngs):
        d, n, k, h = config.d_model, config.heads, config.kv_heads, config.head_dim
        self.q = _param(rngs, (d, n, h), ("embed", "heads", "head_dim"), d)
        self.k = _param(rngs, (d, k, h), ("embed", "kv_heads", "head_dim"), d)
        self.v = _param(rngs, (d, k, h), ("embed", "kv_heads", "head_dim"), d)
        self.o = _param(rngs, (n, h, d), ("heads", "head_dim", "embed"), n * h * 2 * config.layers)
        if config.qkv_bias:
            self.q_bias = _zeros((n, h), ("heads", "head_dim"))
            self.k_bias = _zeros((k, h), ("kv_heads", "head_dim"))
            self.v_bias = _zeros((k, h), ("kv_heads", "head_dim"))
        if config.o_bias:
            self.o_bias = _zeros((d,), ("norm",))
        if config.qk_norm:
            self.q_norm = RMSNorm(h, config, ("head_dim",))
            self.k_norm = RMSNorm(h, config, ("head_dim",))
        add_adapters(self, {"q": 1, "k": 1, "v": 1, "o": 2}, config.lora, rngs)
        self.config, self.layer, self.mesh = config, layer, mesh

    def project(
        self, x: Float[Array, "B T D"], positions: Int[Array, "B T"]
    ) -> tuple[Float[Array, "B T N H"], Float[Array, "B K T H"], Float[Array, "B K T H"]]:
        """Queries, keys and values, rotated; keys and values in the cache's layout."""
        q, k, v = (projected(self, name, x).reshape(*x.shape[:2], -1, self.config.head_dim) for name in "qkv")
        if self.config.qkv_bias:
            q, k, v = (y + b[...].astype(x.dtype) for y, b in ((q, self.q_bias), (k, self.k_bias), (v, self.v_bias)))
        if self.config.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        frequencies = self.config.layer_rope(self.layer).frequencies(self.config.head_dim)
        q, k = rotate(q, positions, frequencies), rotate(k, positions, frequencies)
        q = sharding.constrain(q, self.mesh, ("batch", "length", "heads", "head_dim"))
        k = sharding.constrain(k.transpose(0, 2, 1, 3), self.mesh, ("batch", "kv_heads", "keys", "head_dim"))
        v = sharding.constrain(v.transpose(0, 2, 1, 3), self.mesh, ("batch", "kv_heads", "keys", "head_dim"))
        return q, k, v

    def merge(self, x: Float[Array, "B T N H"]) -> Float[Array, "B T D"]:
        merged = projected(self, "o", x.reshape(*x.shape[:2], -1))
        return merged + self.o_bias[...].astype(x.dtype) if self.config.o_bias else merged


class GatedFeedForward(nnx.Module):
    """(act(x W_gate) * x W_up) W_down: SwiGLU with silu, GeGLU with gelu."""

    def __init__(self, config: TransformerConfig, mesh: Mesh | None, rngs: nnx.Rngs):
        d, f = config.d_model, config.d_ff
        self.gate = _param(rngs, (d, f), ("embed", "mlp"), d)
        self.up = _param(rngs, (d, f), ("embed", "mlp"), d)
        self.down = _param(rngs, (f, d), ("mlp", "embed"), f * 2 * config.layers)
        if config.mlp_bias:
            self.gate_bias, self.up_bias = _zeros((f,), ("mlp",)), _zeros((f,), ("mlp",))
            self.down_bias = _zeros((d,), ("norm",))
        add_adapters(self, {"gate": 1, "up": 1, "down": 1}, config.lora, rngs)
        self.config, self.mesh = config, mesh

    def __call__(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        gate, up = projected(self, "gate", x), projected(self, "up", x)
        if self.config.mlp_bias:
            gate, up = gate + self.gate_bias[...].astype(x.dtype), up + self.up_bias[...].astype(x.dtype)
        hidden = ACTIVATIONS[self.config.activation](gate) * up
        hidden = sharding.constrain(hidden, self.mesh, ("batch", "length", "mlp"))
        out = projected(self, "down", hidden)
        return out + self.down_bias[...].astype(x.dtype) if self.config.mlp_bias else out


class Block(nnx.Module):
    """Pre-norm attention and feed-forward, each with a residual."""

    def __init__(self, config: TransformerConfig, layer: int, mesh: Mesh | None, rngs: nnx.Rngs):
        self.attention_norm = RMSNorm(config.d_model, config)
        self.attention = Attention(config, layer, mesh, rngs)
        self.mlp_norm = RMSNorm(config.d_model, config)
        self.mlp = GatedFeedForward(config, mesh, rngs)
        if config.post_norms:
            self.attention_post_norm = RMSNorm(config.d_model, config)
            self.mlp_post_norm = RMSNorm(config.d_model, config)
        self.config, self.layer, self.mesh = config, layer, mesh

    def project(self, x: Float[Array, "B T D"], positions: Int[Array, "B T"]) -> tuple[Array, Array, Array]:
        return self.attention.project(self.attention_norm(x), positions)

    @property
    def scale(self) -> float:
        """Of the attention scores."""
        return self.config.query_scale or self.config.head_dim**-0.5

    def attend(self, q: Array, k: Array, v: Array, masks: dict[int, Bool[Array, "B T S"]]) -> Float[Array, "B T N H"]:
        """masks: by a layer's window."""
        shards = self.mesh.shape["context"] if self.mesh is not None else 1
        return attend(q, k, v, masks[self.config.window(self.layer)], self.scale, shards)

    def attend_packed(self, q: Array, k: Array, v: Array, packed: dict[int, Packed]) -> Float[Array, "B T N H"]:
        """The same among the tokens of packed rows."""
        seen = packed[self.config.window(self.layer)]
        return attend_packed(self.config.attention, q, k, v, seen, self.scale, self.mesh)

    def finish(self, x: Float[Array, "B T D"], attended: Float[Array, "B T N H"]) -> Float[Array, "B T D"]:
        """The next layer's input."""
        merged = self.attention.merge(attended)
        x = x + (self.attention_post_norm(merged) if self.config.post_norms else merged)
        fed = self.mlp(self.mlp_norm(x))
        x = x + (self.mlp_post_norm(fed) if self.config.post_norms else fed)
        return sharding.constrain(x, self.mesh, ("batch", "length", "feature"))


class Transformer(nnx.Module):
    """The decoder. `__call__` and `decode` return final hidden states; `logits` projects them."""

    def __init__(self, config: TransformerConfig, mesh: Mesh | None, rngs: nnx.Rngs):
        d = config.d_model
        self.embedding = _param(rngs, (config.vocab_size, d), ("vocab", "embed"), d)
        self.layers = nnx.List([Block(config, i, mesh, rngs) for i in range(config.layers)])
        self.final_norm = RMSNorm(d, config)
        if not config.tied_embeddings:
            self.head = _param(rngs, (d, config.vocab_size), ("embed", "vocab"), d)
        self.config, self.mesh = config, mesh

    def __call__(
        self, tokens: Int[Array, "B T"], positions: Int[Array, "B T"], segment_ids: Int[Array, "B T"]
    ) -> Float[Array, "B T D"]:
        """Packed causal forward: a token attends to earlier tokens of its own segment."""
        packed = self._packed(positions, segment_ids)

        def run(layer: Block, x: Array) -> Array:
            return layer.finish(x, layer.attend_packed(*layer.project(x, positions), packed))

        policy = REMAT[self.config.remat]
        keep = functools.partial(jax.checkpoint, policy=policy) if policy else (lambda f: f)
        x = self._embed(tokens)
        if self.config.scan_layers:
            return self.final_norm(self._scan(keep, run, x))
        for layer in self.layers:
            x = keep(functools.partial(run, layer))(x)
        return self.final_norm(x)

    def _scan(self, keep: Callable[..., Any], run: Callable[[Block, Array], Array], x: Array) -> Array:
        """All layers, by a loop: one of them is compiled, and XLA on a CPU, which orders an unrolled backward with no
        regard to memory, has to compute one layer's activations again at a time."""
        graphs, states = zip(*(nnx.split(layer) for layer in self.layers), strict=True)
        stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *states)
        one = keep(lambda x, state: (run(nnx.merge(graphs[0], state), x), None))
        return jax.lax.scan(one, x, stacked)[0]

    def prefill(
        self, tokens: Int[Array, "B T"], positions: Int[Array, "B T"], segment_ids: Int[Array, "B T"]
    ) -> tuple[Float[Array, "B T D"], list[LayerKV]]:
        """The packed forward, with the keys and values [B, K, T, H] of every layer."""
        packed = self._packed(positions, segment_ids)
        x = self._embed(tokens)
        keys_values = []
        for layer in self.layers:
            q, k, v = layer.project(x, positions)
            x = layer.finish(x, layer.attend_packed(q, k, v, packed))
            keys_values.append(LayerKV(k, v))
        return self.final_norm(x), keys_values

    def extend(self, tokens: Int[Array, "B T"], at: Int[Array, " T"], past: list[LayerKV]) -> list[LayerKV]:
        """Keys and values [B, K, T, H] of tokens at positions `at` that follow those in `past` ([B, K, S, H]).

        What `past` has at `at` and later is not looked at; a position from S on is computed, and nobody sees it.
        """
        positions = jnp.broadcast_to(at, tokens.shape)
        behind = positions[:, :, None] - jnp.arange(past[0].k.shape[2])  # [B, T, S]
        masks = self._windowed(behind >= 0, behind)
        x = self._embed(tokens)
        keys_values = []
        for layer, kv in zip(self.layers, past, strict=True):
            q, k, v = layer.project(x, positions)
            keys_values.append(LayerKV(k, v))
            both = LayerKV(
                kv.k.at[:, :, at].set(k.astype(kv.k.dtype), mode="drop"),
                kv.v.at[:, :, at].set(v.astype(kv.v.dtype), mode="drop"),
            )
            x = layer.finish(x, layer.attend(q, both.k, both.v, masks))
        return keys_values

    def decode(
        self, tokens: Int[Array, " B"], positions: Int[Array, " B"], cache: Cache
    ) -> tuple[Float[Array, "B D"], Cache]:
        """One token per cache row: writes its keys and values at `positions`, attends to everything up to there."""
        x = self._embed(tokens[:, None])
        layers = []
        for layer, kv in zip(self.layers, cache.layers, strict=True):
            q, k, v = layer.project(x, positions[:, None])
            kv = cache.write_step(kv, k[:, :, 0], v[:, :, 0], positions)
            layers.append(kv)
            window = self.config.window(layer.layer)
            look = Look(self.config.decode_attention, layer.scale, self.mesh)
            x = layer.finish(x, cache.attend(kv, q[:, 0], positions, window, look)[:, None])
        return self.final_norm(x)[:, 0], cache._replace(layers=layers)

    def logits(self, hidden: Float[Array, "... D"]) -> Float[Array, "... V"]:
        """Next-token logits in float32, soft cap applied."""
        output = self.output()
        return output.project(output.weights, hidden)

    def output(self) -> Output:
        """The last layer."""
        weights = self.embedding if self.config.tied_embeddings else self.head
        return Output(functools.partial(_project, self.config), weights[...])

    def _packed(self, positions: Int[Array, "B T"], segment_ids: Int[Array, "B T"]) -> dict[int, Packed]:
        """Who attends to whom in packed rows, by a layer's window."""
        causal = jnp.tril(jnp.ones((positions.shape[1], positions.shape[1]), bool))
        mask = causal & (segment_ids[:, :, None] == segment_ids[:, None, :])  # [B, T, T]
        windowed = self._windowed(mask, positions[:, :, None] - positions[:, None, :])
        return {window: Packed(mask, segment_ids, window) for window, mask in windowed.items()}

    def _windowed(self, mask: Array, behind: Array) -> dict[int, Array]:
        """The mask of every window that a layer has; `behind` is how far back a key lies, in positions."""
        windows = {self.config.window(i) for i in range(self.config.layers)}
        return {w: mask & (behind < w) if w else mask for w in windows}

    def _embed(self, tokens: Int[Array, "B T"]) -> Float[Array, "B T D"]:
        x = self.embedding[...].astype(self.config.compute_dtype)[tokens]
        if self.config.embedding_scale:
            x = x * jnp.asarray(self.config.d_model**0.5, x.dtype)
        return sharding.constrain(x, self.mesh, ("batch", "length", "feature"))


def _project(config: TransformerConfig, weights: Array, hidden: Float[Array, "... D"]) -> Float[Array, "... V"]:
    """weights: the embedding [V, D] where it is tied, else the head [D, V]."""
    subscripts = "...d,vd->...v" if config.tied_embeddings else "...d,dv->...v"
    logits = jnp.einsum(subscripts, hidden, weights.astype(hidden.dtype), preferred_element_type=jnp.float32)
    if config.logit_soft_cap:
        logits = config.logit_soft_cap * jnp.tanh(logits / config.logit_soft_cap)
    return logits


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
        return jax.jit(lambda: self._create(seed), out_shardings=_shardings(self.abstract_params))()

    @property
    def abstract_base(self) -> Params:
        """All parameters but adapters: what a pretrained checkpoint of such a model holds."""
        return split_adapters(self.abstract_params)[0]

    def adapt(self, base: Params, seed: int) -> Params:
        """The base with fresh adapters, which do not change what it computes yet; without LoRA the base itself."""
        if self.config.lora is None:
            return base
        adapters = self.split(self.abstract_params)[1]
        fresh = jax.jit(lambda: self.split(self._create(seed))[1], out_shardings=_shardings(adapters))()
        return join_adapters(jax.tree.map(lambda x, like: x.astype(like.dtype), base, self.abstract_base), fresh)

    def split(self, params: Params) -> tuple[Params, Params]:
        """(what stays as it is, what is trained): with LoRA (base, adapters), else ({}, params)."""
        return split_adapters(params) if self.config.lora else ({}, params)

    def join(self, frozen: Params, trained: Params) -> Params:
        """The inverse of `split`."""
        return join_adapters(frozen, trained) if self.config.lora else trained

    def parameter_count(self) -> int:
        return sum(x.size for x in jax.tree.leaves(self.abstract_params))

    def _create(self, seed: int) -> Params:
        params = nnx.to_pure_dict(nnx.state(Transformer(self.config, self.mesh, _rngs(seed))))
        return jax.tree.map(lambda p, like: p.astype(like.dtype), params, self.abstract_params)


def _rngs(seed: int) -> nnx.Rngs:
    """The adapters' stream is their own: the other parameters are the same with and without them."""
    return nnx.Rngs(params=seed, lora=jax.random.fold_in(jax.random.key(seed), 1))


def _shardings(abstract: Params) -> Params:
    return jax.tree.map(lambda x: x.sharding, abstract)


def build_model(config: TransformerConfig, mesh: Mesh, param_dtype: str = "float32") -> Model:
    """Traces the transformer's structure; allocates nothing.

    mesh: an AbstractMesh, which has no devices, will do as long as nothing is run.
    param_dtype: of matrices and biases; the scales of norms and adapters stay float32.
    """
    concrete = mesh if isinstance(mesh, Mesh) else None
    graphdef, state = nnx.split(nnx.eval_shape(lambda: Transformer(config, concrete, _rngs(0))))
    axes = nnx.to_pure_dict(
        jax.tree.map(
            lambda v: v.replace(v.get_metadata("logical_axes")), state, is_leaf=lambda x: isinstance(x, nnx.Variable)
        )
    )

    def abstract(path: tuple[Any, ...], x: jax.ShapeDtypeStruct, a: sharding.Axes) -> jax.ShapeDtypeStruct:
        keys = tuple(k.key for k in path)
        dtype = jnp.float32 if keys[-1] == "scale" or is_adapter(keys) else jnp.dtype(param_dtype)
        return jax.ShapeDtypeStruct(x.shape, dtype, sharding=sharding.parameter_sharding(mesh, x.shape, a))

    return Model(
        config, mesh, graphdef, jax.tree_util.tree_map_with_path(abstract, nnx.to_pure_dict(state), axes), axes
    )
