"""GGUF files (llama.cpp's format) as a source of config, weights and tokenizer."""

from __future__ import annotations

import pathlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from areal_jax.models.families import HfConfig
from areal_jax.types import UserError

TYPES = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1")
"""Tensor types that are read; quantised ones are expanded to float32."""

ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
"""general.architecture -> transformers' architecture."""

_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
PRE_TOKENIZERS = {
    "gpt-2": None,
    "smollm": None,
    "llama-bpe": rf"{_WORDS}|\p{{N}}{{1,3}}|{_REST}",
    "qwen2": rf"{_WORDS}|\p{{N}}|{_REST}",
}
"""tokenizer.ggml.pre -> the expression that splits text before the merges; None is GPT-2's own."""

NAMES = {
    "attn_norm.weight": "input_layernorm.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "attn_q_norm.weight": "self_attn.q_norm.weight",
    "attn_k_norm.weight": "self_attn.k_norm.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
    **{f"attn_{x}.{kind}": f"self_attn.{x}_proj.{kind}" for x in "qkv" for kind in ("weight", "bias")},
}
"""Names within a block -> Hugging Face's within a layer."""

TOP_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}


class GgufFile:
    """One GGUF file; a WeightSource in Hugging Face's names and layout."""

    def __init__(self, path: pathlib.Path):
        """Raises UserError for what is no GGUF file, or holds an architecture or tensor type that is not read."""
        import gguf

        self.where = str(path)
        self._dequantize = gguf.quants.dequantize
        try:
            reader = gguf.GGUFReader(str(path))
        except (ValueError, OSError, IndexError, KeyError) as error:
            raise UserError(
                f"{path} cannot be read as GGUF ({error}); it may be cut short: download it again"
            ) from error
        self._values = {name: field.contents() for name, field in reader.fields.items()}
        self._architecture = self._values.get("general.architecture")
        if self._architecture not in ARCHITECTURES:
            raise UserError(
                f"{path}: general.architecture is {self._architecture!r}, which is not supported in GGUF; expected one "
                f"of {[*ARCHITECTURES]}, or the model in the safetensors format"
            )
        self._tensors = {}
        for tensor in reader.tensors:
            if tensor.tensor_type.name not in TYPES:
                raise UserError(
                    f"{path}: {tensor.name} has type {tensor.tensor_type.name}, which is not supported; expected one "
                    f"of {[*TYPES]}"
                )
            self._tensors[_hf_name(tensor.name)] = tensor
        self._shapes = {name: tuple(int(n) for n in reversed(t.shape)) for name, t in self._tensors.items()}
        self._last: tuple[str, np.ndarray] = ("", np.zeros(0))

    def config(self) -> HfConfig:
        """What the file's config.json would say."""

        def value(key: str, default: Any = None) -> Any:
            found = self._values.get(f"{self._architecture}.{key}", default)
            if found is None:
                raise UserError(f"{self.where}: the key {self._architecture}.{key} is missing")
            return found

        if value("rope.scaling.type", "none") != "none" or "rope_freqs.weight" in self._tensors:
            raise UserError(
                f"{self.where}: scaled rotary frequencies are not supported in GGUF; use the model in the safetensors "
                "format"
            )
        embedding, heads = self._shapes["model.embed_tokens.weight"], value("attention.head_count")
        return {
            "architectures": [ARCHITECTURES[str(self._architecture)]],
            "model_type": self._architecture,
            "hidden_act": "silu",
            "vocab_size": embedding[0],
            "hidden_size": embedding[1],
            "num_hidden_layers": value("block_count"),
            "num_attention_heads": heads,
            "num_key_value_heads": value("attention.head_count_kv", heads),
            "head_dim": value("attention.key_length", embedding[1] // heads),
            "intermediate_size": value("feed_forward_length"),
            "max_position_embeddings": value("context_length"),
            # float32 in the file; the decimal that was meant
            "rms_norm_eps": float(f"{value('attention.layer_norm_rms_epsilon'):.6g}"),
            "rope_theta": float(value("rope.freq_base", 10_000.0)),
            "tie_word_embeddings": "lm_head.weight" not in self._tensors,
            "bos_token_id": self._values.get("tokenizer.ggml.bos_token_id"),
            "eos_token_id": self._values.get("tokenizer.ggml.eos_token_id"),
            "dtype": "float32",
        }

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return self._shapes

    def read(self, name: str, index: tuple[slice, ...]) -> np.ndarray:
        if self._last[0] != name:  # shards of one tensor are read one after the other
            tensor = self._tensors[name]
            value = self._dequantize(tensor.data, tensor.tensor_type).reshape(self._shapes[name])
            self._last = (name, self._unpermuted(name, value))
        return self._last[1][index]

    def tokenizer(self) -> Any:
        """The tokenizer in the file. Raises UserError for a kind that is not read."""
        from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
        from transformers import PreTrainedTokenizerFast

        kind, pre = self._values.get("tokenizer.ggml.model"), self._values.get("tokenizer.ggml.pre", "gpt-2")
        if kind != "gpt2" or pre not in PRE_TOKENIZERS:
            raise UserError(
                f"{self.where}: a tokenizer of kind {kind!r} ({pre!r}) is not supported in GGUF; expected 'gpt2' with "
                f"one of {[*PRE_TOKENIZERS]}. Set model.tokenizer to a directory or hub name that has the tokenizer"
            )
        tokens: list[str] = self._values["tokenizer.ggml.tokens"]
        merges = [tuple(m.split(" ")) for m in self._values["tokenizer.ggml.merges"]]
        # Llama 3's takes a word that is a token whole, whatever the merges say
        model = models.BPE({t: i for i, t in enumerate(tokens)}, merges, ignore_merges=pre == "llama-bpe")
        tokenizer = Tokenizer(model)
        if pre == "qwen2":
            tokenizer.normalizer = normalizers.NFC()
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=PRE_TOKENIZERS[pre] is None)
        steps: list[Any] = [pre_tokenizers.Digits(individual_digits=True)] if pre == "smollm" else []
        if (expression := PRE_TOKENIZERS[pre]) is not None:
            steps = [pre_tokenizers.Split(Regex(expression), "isolated")]
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*steps, byte_level])
        tokenizer.decoder = decoders.ByteLevel()
        control, user_defined = 3, 4  # llama.cpp's token types
        types = self._values["tokenizer.ggml.token_type"]
        special = [AddedToken(t, special=True) for t, k in zip(tokens, types, strict=True) if k == control]
        tokenizer.add_special_tokens(special)
        added = [AddedToken(t, normalized=False) for t, k in zip(tokens, types, strict=True) if k == user_defined]
        tokenizer.add_tokens(added)
        roles = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
        ids = {role: self._values.get(f"tokenizer.ggml.{name}_token_id") for role, name in roles.items()}
        bos = ids["bos_token"]
        if bos is not None and self._values.get("tokenizer.ggml.add_bos_token", pre == "llama-bpe"):
            tokenizer.post_processor = processors.TemplateProcessing(
                single=f"{tokens[bos]} $A", special_tokens=[(tokens[bos], bos)]
            )
        made = PreTrainedTokenizerFast(
            tokenizer_object=tokenizer, **{role: tokens[i] for role, i in ids.items() if i is not None}
        )
        made.chat_template = self._values.get("tokenizer.chat_template")
        return made

    def _unpermuted(self, name: str, value: np.ndarray) -> np.ndarray:
        """llama.cpp lays the rows of Llama's q and k in rotary pairs; back to the half-split layout."""
        part = name.split(".")[-2]
        if self._architecture != "llama" or part not in ("q_proj", "k_proj"):
            return value
        config = self.config()
        count = config["num_attention_heads" if part == "q_proj" else "num_key_value_heads"]
        pairs = value.reshape(count, -1, 2, *value.shape[1:])
        return pairs.swapaxes(1, 2).reshape(value.shape)


def _hf_name(name: str) -> str:
    """Hugging Face's name of a tensor; one that has none keeps its own, and is reported as unexpected."""
    if name in TOP_NAMES:
        return TOP_NAMES[name]
    block, _, rest = name.partition(".")[2].partition(".")
    return f"model.layers.{block}.{NAMES[rest]}" if name.startswith("blk.") and rest in NAMES else name
