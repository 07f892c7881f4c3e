"""The families of models on a hub that the one decoder covers: their config keys and their tensor names.

A family is a pair of functions between a Hugging Face `config.json` (as a dict) and a TransformerConfig, in FAMILIES
under the architecture's name. What a config asks for and the decoder does not have is refused by name: a model that
loads and is silently another one is worse than one that does not load.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import io
import logging
from collections.abc import Callable, Mapping
from typing import Any

from areal_jax.models.transformer import Rope, TransformerConfig
from areal_jax.types import UserError

HfConfig = dict[str, Any]

ACTIVATION_NAMES = {"silu": "silu", "swish": "silu", "gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh"}
"""transformers' name -> ours."""

REFUSED_UNLESS: dict[str, tuple[Any, ...]] = {
    "quantization_config": (None,),
    "attn_logit_softcapping": (None,),
    "use_bidirectional_attention": (None, False),
    "is_encoder_decoder": (False, None),
    "add_cross_attention": (False, None),
    "partial_rotary_factor": (None, 1.0),
    "num_experts": (None, 0, 1),
    "num_local_experts": (None, 0, 1),
}
"""Keys of a config that change the result, with the only values that the decoder has."""


@dataclasses.dataclass(frozen=True)
class Family:
    """One architecture of transformers."""

    model_type: str
    read: Callable[[HfConfig], TransformerConfig]
    write: Callable[[TransformerConfig], HfConfig]
    """What `read` understands, for a config that the family can express (see `to_hf`)."""


def read_config(raw: Mapping[str, Any], where: str) -> TransformerConfig:
    """The decoder's config for a parsed config.json; keys that it leaves out have transformers' defaults.

    where: what the error messages call the file. Raises UserError naming the key, its value and what is supported.
    """
    architecture = architecture_of(raw, where)
    family = FAMILIES[architecture]
    for key, allowed in REFUSED_UNLESS.items():
        if raw.get(key) not in allowed:
            value = raw[key].get("quant_method", raw[key]) if key == "quantization_config" else raw[key]
            raise UserError(f"{where}: {key} is {value!r}, which is not supported; expected {allowed[0]!r} or no key")
    return family.read(_with_defaults(family.model_type, raw, where))


def architecture_of(raw: Mapping[str, Any], where: str) -> str:
    """The one architecture of a config.json. Raises UserError unless it is in FAMILIES."""
    names = raw.get("architectures") or []
    by_type = {family.model_type: name for name, family in FAMILIES.items()}
    if not names and raw.get("model_type") in by_type:
        return by_type[raw["model_type"]]
    if len(names) != 1 or names[0] not in FAMILIES:
        raise UserError(f"{where}: architectures is {names!r}, which is not supported; expected one of {[*FAMILIES]}")
    return str(names[0])


def to_hf(config: TransformerConfig) -> HfConfig:
    """A config.json for a config of ours: the first family that reads it back as it is. Raises UserError if none."""
    for name, family in FAMILIES.items():
        hf = {"architectures": [name], "model_type": family.model_type, **family.write(config)}
        if read_config(hf, name) == dataclasses.replace(config, compute_dtype="float32", remat="none"):
            return hf
    raise UserError(f"no architecture of {', '.join(FAMILIES)} has the options of {config}; it cannot be exported")


def _with_defaults(model_type: str, raw: Mapping[str, Any], where: str) -> HfConfig:
    """The config with transformers' defaults and in its present form (its rope keys have had several)."""
    with contextlib.redirect_stderr(io.StringIO()):
        logging.getLogger("transformers").setLevel(logging.ERROR)
        from huggingface_hub.errors import StrictDataclassError
        from transformers import AutoConfig
    # copied: transformers writes into what it is given
    given = {
        k: copy.deepcopy(v) for k, v in raw.items() if k not in ("model_type", "architectures", "transformers_version")
    }
    try:
        return dict(AutoConfig.for_model(model_type, **given).to_dict())
    except (TypeError, ValueError, KeyError, AttributeError, StrictDataclassError) as error:
        raise UserError(f"{where}: transformers cannot read it as {model_type!r}: {error}") from error


def _rope(options: Mapping[str, Any]) -> Rope:
    kind, base = options.get("rope_type", "default"), options["rope_theta"]
    if not isinstance(base, int | float):
        raise UserError(f"rope_theta is {base!r}; expected a number")
    base = float(base)
    if options.get("partial_rotary_factor", 1.0) != 1.0:
        raise UserError(f"partial_rotary_factor is {options['partial_rotary_factor']}; expected 1.0")
    if kind == "default":
        return Rope(base)
    if kind == "linear":
        return Rope(base, kind, float(options["factor"]))
    if kind == "llama3":
        return Rope(
            base,
            kind,
            float(options["factor"]),
            float(options["low_freq_factor"]),
            float(options["high_freq_factor"]),
            int(options["original_max_position_embeddings"]),
        )
    raise UserError(f"rope_type is {kind!r}, which is not supported; expected one of ['default', 'linear', 'llama3']")


def _rope_to_hf(rope: Rope) -> HfConfig:
    hf: HfConfig = {"rope_type": rope.kind, "rope_theta": rope.base}
    if rope.kind != "default":
        hf["factor"] = rope.factor
    if rope.kind == "llama3":
        hf |= {"low_freq_factor": rope.low_freq_factor, "high_freq_factor": rope.high_freq_factor}
        hf["original_max_position_embeddings"] = rope.original_length
    return hf


def _common(c: HfConfig, activation: str = "hidden_act") -> dict[str, Any]:
    """The fields that all families name alike."""
    if c[activation] not in ACTIVATION_NAMES:
        raise UserError(f"{activation} is {c[activation]!r}, which is not supported; expected {[*ACTIVATION_NAMES]}")
    return {
        "vocab_size": c["vocab_size"],
        "layers": c["num_hidden_layers"],
        "d_model": c["hidden_size"],
        "heads": c["num_attention_heads"],
        "kv_heads": c["num_key_value_heads"],
        "head_dim": c.get("head_dim") or c["hidden_size"] // c["num_attention_heads"],
        "d_ff": c["intermediate_size"],
        "norm_eps": c["rms_norm_eps"],
        "tied_embeddings": c["tie_word_embeddings"],
        "activation": ACTIVATION_NAMES[c[activation]],
    }


def _common_to_hf(config: TransformerConfig, activation: str = "hidden_act") -> HfConfig:
    names = {ours: theirs for theirs, ours in reversed(ACTIVATION_NAMES.items())}
    return {
        "vocab_size": config.vocab_size,
        "num_hidden_layers": config.layers,
        "hidden_size": config.d_model,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.d_ff,
        "rms_norm_eps": config.norm_eps,
        "tie_word_embeddings": config.tied_embeddings,
        activation: names[config.activation],
    }


def _windows(c: HfConfig) -> tuple[int, ...]:
    """Per layer, from `layer_types` and `sliding_window`; () when no layer has one."""
    kinds = c.get("layer_types") or []
    unknown = set(kinds) - {"full_attention", "sliding_attention"}
    if unknown:
        raise UserError(f"layer_types has {sorted(unknown)}; expected 'full_attention' or 'sliding_attention'")
    window = c.get("sliding_window") or 0
    windows = tuple(window if kind == "sliding_attention" else 0 for kind in kinds)
    return windows if any(windows) else ()


def _windows_to_hf(config: TransformerConfig) -> HfConfig:
    kinds = ["sliding_attention" if config.window(i) else "full_attention" for i in range(config.layers)]
    return {"layer_types": kinds, "sliding_window": max(config.windows, default=0) or None}


def _read_llama(c: HfConfig) -> TransformerConfig:
    return TransformerConfig(
        **_common(c),
        rope=_rope(c["rope_parameters"]),
        qkv_bias=c["attention_bias"],
        o_bias=c["attention_bias"],
        mlp_bias=c["mlp_bias"],
    )


def _write_llama(config: TransformerConfig) -> HfConfig:
    return {
        **_common_to_hf(config),
        "rope_parameters": _rope_to_hf(config.rope),
        "attention_bias": config.o_bias,
        "mlp_bias": config.mlp_bias,
    }


def _read_mistral(c: HfConfig) -> TransformerConfig:
    window = c["sliding_window"] or 0
    return TransformerConfig(
        **_common(c), rope=_rope(c["rope_parameters"]), windows=(window,) * c["num_hidden_layers"] if window else ()
    )


def _write_mistral(config: TransformerConfig) -> HfConfig:
    return {
        **_common_to_hf(config),
        "rope_parameters": _rope_to_hf(config.rope),
        "sliding_window": max(config.windows, default=0) or None,
    }


def _read_qwen2(c: HfConfig) -> TransformerConfig:
    return TransformerConfig(**_common(c), rope=_rope(c["rope_parameters"]), qkv_bias=True, windows=_windows(c))


def _write_qwen(config: TransformerConfig) -> HfConfig:
    sliding = _windows_to_hf(config)
    return {
        **_common_to_hf(config),
        **sliding,
        "rope_parameters": _rope_to_hf(config.rope),
        "use_sliding_window": bool(sliding["sliding_window"]),
        "attention_bias": config.o_bias,  # Qwen3's; Qwen2 always has biases on q, k and v, and only there
    }


def _read_qwen3(c: HfConfig) -> TransformerConfig:
    return TransformerConfig(
        **_common(c),
        rope=_rope(c["rope_parameters"]),
        qkv_bias=c["attention_bias"],
        o_bias=c["attention_bias"],
        qk_norm=True,
        windows=_windows(c),
    )


def _read_gemma3(c: HfConfig) -> TransformerConfig:
    ropes = c["rope_parameters"]
    return TransformerConfig(
        **_common(c, "hidden_activation"),
        rope=_rope(ropes["full_attention"]),
        window_rope=_rope(ropes["sliding_attention"]),
        windows=_windows(c),
        qkv_bias=c["attention_bias"],
        o_bias=c["attention_bias"],
        qk_norm=True,
        query_scale=c["query_pre_attn_scalar"] ** -0.5,
        logit_soft_cap=c["final_logit_softcapping"] or 0.0,
        post_norms=True,
        norm_offset=1.0,
        embedding_scale=True,
    )


def _write_gemma3(config: TransformerConfig) -> HfConfig:
    ropes = {"full_attention": config.rope, "sliding_attention": config.window_rope or config.rope}
    return {
        **_common_to_hf(config, "hidden_activation"),
        **_windows_to_hf(config),
        "rope_parameters": {kind: _rope_to_hf(rope) for kind, rope in ropes.items()},
        "attention_bias": config.o_bias,
        "query_pre_attn_scalar": round((config.query_scale or config.head_dim**-0.5) ** -2),
        "final_logit_softcapping": config.logit_soft_cap or None,
    }


FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": Family("llama", _read_llama, _write_llama),
    "MistralForCausalLM": Family("mistral", _read_mistral, _write_mistral),
    "Qwen2ForCausalLM": Family("qwen2", _read_qwen2, _write_qwen),
    "Qwen3ForCausalLM": Family("qwen3", _read_qwen3, _write_qwen),
    "Gemma3ForCausalLM": Family("gemma3_text", _read_gemma3, _write_gemma3),
}
"""Architecture -> family. Llama 2 and 3.x and SmolLM2 are Llama; R1-Distill-Qwen is Qwen2."""


# --- tensor names ---


@dataclasses.dataclass(frozen=True)
class TensorMap:
    """How one parameter of ours lies in a Hugging Face checkpoint.

    Their dimensions, split into factors (q_proj [N*H, D] -> (N, H), (D,)) and then permuted, are our dimensions.
    """

    path: tuple[str | int, ...]
    """In our parameter tree."""
    name: str
    factors: tuple[tuple[int, ...], ...]
    """Per dimension of theirs, the sizes that it is made of."""
    permutation: tuple[int, ...]
    """Our dimension i is their factor permutation[i]."""

    @property
    def hf_shape(self) -> tuple[int, ...]:
        shape = []
        for sizes in self.factors:
            product = 1
            for size in sizes:
                product *= size
            shape.append(product)
        return tuple(shape)


def tensor_maps(config: TransformerConfig) -> list[TensorMap]:
    """Every parameter of a model with this config, in the order of the layers."""
    d, f, n, k, h = config.d_model, config.d_ff, config.heads, config.kv_heads, config.head_dim
    maps = [TensorMap(("embedding",), "model.embed_tokens.weight", ((config.vocab_size,), (d,)), (0, 1))]

    def vector(path: tuple[str | int, ...], name: str, *sizes: int) -> None:
        maps.append(TensorMap(path, name, (sizes,), tuple(range(len(sizes)))))

    for i in range(config.layers):
        ours, theirs = ("layers", i), f"model.layers.{i}"
        attention, mlp = (*ours, "attention"), (*ours, "mlp")
        for letter, heads in (("q", n), ("k", k), ("v", k)):
            name = f"{theirs}.self_attn.{letter}_proj"
            maps.append(TensorMap((*attention, letter), f"{name}.weight", ((heads, h), (d,)), (2, 0, 1)))
            if config.qkv_bias:
                vector((*attention, f"{letter}_bias"), f"{name}.bias", heads, h)
        maps.append(TensorMap((*attention, "o"), f"{theirs}.self_attn.o_proj.weight", ((d,), (n, h)), (1, 2, 0)))
        if config.o_bias:
            vector((*attention, "o_bias"), f"{theirs}.self_attn.o_proj.bias", d)
        if config.qk_norm:
            vector((*attention, "q_norm", "scale"), f"{theirs}.self_attn.q_norm.weight", h)
            vector((*attention, "k_norm", "scale"), f"{theirs}.self_attn.k_norm.weight", h)
        for part, inner, outer in (("gate", d, f), ("up", d, f), ("down", f, d)):
            name = f"{theirs}.mlp.{part}_proj"
            maps.append(TensorMap((*mlp, part), f"{name}.weight", ((outer,), (inner,)), (1, 0)))
            if config.mlp_bias:
                vector((*mlp, f"{part}_bias"), f"{name}.bias", outer)
        norms = {"attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
        if config.post_norms:
            norms = {
                "attention_norm": "input_layernorm",
                "attention_post_norm": "post_attention_layernorm",
                "mlp_norm": "pre_feedforward_layernorm",
                "mlp_post_norm": "post_feedforward_layernorm",
            }
        for mine, name in norms.items():
            vector((*ours, mine, "scale"), f"{theirs}.{name}.weight", d)
    vector(("final_norm", "scale"), "model.norm.weight", d)
    if not config.tied_embeddings:
        maps.append(TensorMap(("head",), "lm_head.weight", ((config.vocab_size,), (d,)), (1, 0)))
    return maps


def is_redundant(name: str, config: TransformerConfig) -> bool:
    """Whether a checkpoint may hold the tensor without our needing it: a tied head, or cached rotary frequencies."""
    return name.endswith("rotary_emb.inv_freq") or (config.tied_embeddings and name == "lm_head.weight")
