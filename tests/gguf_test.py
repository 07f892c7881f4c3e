"""GGUF files: every tensor type that is read, llama.cpp's rotary layout undone, its tokenizers, and refusals."""

import json

import gguf
import numpy as np
import pytest
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import AutoConfig

from areal_jax.models import pretrained
from areal_jax.models.families import read_config, tensor_maps
from areal_jax.models.gguf import NAMES, PRE_TOKENIZERS, TOP_NAMES
from areal_jax.models.transformer import build_model
from areal_jax.types import UserError
from tests.families_test import LOGITS, logits_of
from tests.goldens import make
from tests.helpers import one_device_mesh

THEIR_NAMES = {ours: theirs for theirs, ours in (NAMES | TOP_NAMES).items()}


def their_name(name):
    if name in THEIR_NAMES:
        return THEIR_NAMES[name]
    _, _, layer, rest = name.split(".", 3)
    return f"blk.{layer}.{THEIR_NAMES[rest]}"


def permuted(value, heads):
    """As llama.cpp's converter lays out the rows of q and k: halves of a head interleaved."""
    return value.reshape(heads, 2, -1, *value.shape[1:]).swapaxes(1, 2).reshape(value.shape)


def write_gguf(path, config, kind=gguf.GGMLQuantizationType.F32, change=None, add=None):
    """A model with golden weights as a GGUF file; norms and biases stay F32, as converters leave them."""
    architecture = config["model_type"]
    writer = gguf.GGUFWriter(str(path), architecture)
    values = {
        "block_count": config["num_hidden_layers"],
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        **({"attention.key_length": config["head_dim"]} if "head_dim" in config else {}),
        **(change or {}),
    }
    for key, value in values.items():
        if isinstance(value, str):
            writer.add_string(f"{architecture}.{key}", value)
        else:
            writer.add_uint32(f"{architecture}.{key}", value)
    writer.add_float32(f"{architecture}.attention.layer_norm_rms_epsilon", config.get("rms_norm_eps", 1e-6))
    writer.add_float32(f"{architecture}.rope.freq_base", config.get("rope_theta", 10_000.0))
    if add:
        add(writer)
    shapes = {m.name: m.hf_shape for m in tensor_maps(read_config(config, "test"))}
    for tensor, value in make.weights(shapes, config).items():
        if architecture == "llama" and (tensor.endswith(("q_proj.weight", "k_proj.weight"))):
            heads = config["num_attention_heads" if "q_proj" in tensor else "num_key_value_heads"]
            value = permuted(value, heads)
        whole = value.ndim == 1 or kind == gguf.GGMLQuantizationType.F32
        data = value if whole else gguf.quants.quantize(value, kind)
        writer.add_tensor(their_name(tensor), data, raw_dtype=None if whole else kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def load(path):
    found = pretrained.find(str(path))
    model = build_model(found.config(), one_device_mesh())
    return model, found.load_params(model)


@pytest.mark.parametrize("name", ["llama2", "llama-head-dim", "r1-distill-qwen", "qwen2", "qwen3"])
def test_a_gguf_model_computes_what_transformers_does(name, tmp_path):
    path = write_gguf(tmp_path / "model.gguf", make.CASES[name])
    model, params = load(path)
    again = AutoConfig.for_model(**json.loads(json.dumps(pretrained.find(str(path)).hf_config)))
    assert again.hidden_size == model.config.d_model  # what an export writes is a config that transformers reads
    expected = read_config(make.CASES[name], name)
    assert model.config == expected
    np.testing.assert_allclose(logits_of(model, params, make.tokens(name)), LOGITS[name], atol=1e-4, rtol=0)


BLOCKS = make.llama(intermediate_size=64)  # every row a multiple of the quantised blocks' 32
STEPS = {"F16": 2**-10, "BF16": 2**-7, "Q8_0": 1 / 127, "Q4_0": 1 / 7, "Q4_1": 1 / 14}
"""Type -> the most that a number may be off, as a share of the largest in its block of 32."""


@pytest.mark.parametrize("kind", STEPS)
def test_every_tensor_type_is_expanded_within_its_step(kind, tmp_path):
    _, exact = load(write_gguf(tmp_path / "exact.gguf", BLOCKS))
    _, params = load(write_gguf(tmp_path / "model.gguf", BLOCKS, gguf.GGMLQuantizationType[kind]))
    got, want = np.asarray(params["layers"][1]["mlp"]["up"]), np.asarray(exact["layers"][1]["mlp"]["up"])
    error = np.abs(got - want)
    assert 0 < error.max() <= STEPS[kind] * np.abs(want).max()
    np.testing.assert_array_equal(params["final_norm"]["scale"], exact["final_norm"]["scale"])


def test_what_is_not_read_is_refused_by_name(tmp_path):
    path = write_gguf(tmp_path / "q5.gguf", BLOCKS, gguf.GGMLQuantizationType.Q5_0)
    with pytest.raises(UserError, match=r"has type Q5_0, which is not supported.*Q4_1"):
        load(path)
    other = tmp_path / "other.gguf"
    writer = gguf.GGUFWriter(str(other), "mamba")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(UserError, match=r"general\.architecture is 'mamba'.*'llama', 'qwen2', 'qwen3'"):
        load(other)
    scaled = write_gguf(tmp_path / "scaled.gguf", make.CASES["llama2"], change={"rope.scaling.type": "yarn"})
    with pytest.raises(UserError, match="scaled rotary frequencies"):
        load(scaled)


def test_files_that_are_no_gguf_are_named(tmp_path):
    text = tmp_path / "text.gguf"
    text.write_text("this is no model at all, but a text of some length\n" * 10)
    with pytest.raises(UserError, match=r"text\.gguf cannot be read as GGUF"):
        load(text)
    cut = write_gguf(tmp_path / "cut.gguf", make.CASES["llama2"])
    cut.write_bytes(cut.read_bytes()[:4000])
    with pytest.raises(UserError, match=r"cut\.gguf cannot be read as GGUF"):
        load(cut)


def trained(pre):
    """A small byte-level BPE tokenizer of the tokenizers library, split as `pre` says."""
    expression = PRE_TOKENIZERS[pre]
    split = [pre_tokenizers.Split(Regex(expression), "isolated")] if expression else []
    if pre == "smollm":
        split = [pre_tokenizers.Digits(individual_digits=True)]
    tokenizer = Tokenizer(models.BPE(ignore_merges=pre == "llama-bpe"))
    tokenizer.normalizer = normalizers.NFC() if pre == "qwen2" else None
    bytes_ = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=expression is None)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*split, bytes_])
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=["<|end|>"], initial_alphabet=alphabet)
    tokenizer.train_from_iterator(["the sun rises in the east 123 123 123", "the east wind, the sunrise"] * 5, trainer)
    return tokenizer


@pytest.mark.parametrize("pre", ["gpt-2", "smollm", "llama-bpe", "qwen2"])
def test_a_tokenizer_in_the_file_encodes_as_the_library_does(pre, tmp_path):
    original = trained(pre)
    bos = pre == "llama-bpe"
    if bos:
        mark = [("<|end|>", original.token_to_id("<|end|>"))]
        original.post_processor = processors.TemplateProcessing(single="<|end|> $A", special_tokens=mark)
    vocabulary = sorted(original.get_vocab().items(), key=lambda item: item[1])
    merges = json.loads(original.to_str())["model"]["merges"]

    def add(writer):
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(pre)
        writer.add_token_list([t for t, _ in vocabulary])
        writer.add_token_types([3 if t == "<|end|>" else 1 for t, _ in vocabulary])
        writer.add_token_merges([" ".join(m) for m in merges])
        writer.add_eos_token_id(original.token_to_id("<|end|>"))
        if bos:
            writer.add_bos_token_id(original.token_to_id("<|end|>"))
        writer.add_chat_template("{{ messages[0]['content'] }}")

    found = pretrained.find(str(write_gguf(tmp_path / "model.gguf", make.CASES["llama2"], add=add)))
    tokenizer = found.tokenizer()
    for text in ("the sun rises 12345", " the  east\n\nwind", "naïve 日本 🙂", "a<|end|>b"):
        ids = tokenizer.encode(text)
        assert ids == original.encode(text).ids
        assert tokenizer.decode(ids) == ("<|end|>" if bos else "") + text
    assert tokenizer.decode(tokenizer.encode("a<|end|>"), skip_special_tokens=True) == "a"
    assert tokenizer.eos_token == "<|end|>"
    assert tokenizer.pad_token is None
    assert tokenizer.chat_template == "{{ messages[0]['content'] }}"
    assert found.stop_ids() == (original.token_to_id("<|end|>"),)


def test_a_tokenizer_of_another_kind_names_the_remedy(tmp_path):
    path = write_gguf(tmp_path / "m.gguf", make.CASES["llama2"], add=lambda writer: writer.add_tokenizer_model("llama"))
    with pytest.raises(UserError, match=r"kind 'llama'.*model\.tokenizer"):
        pretrained.find(str(path)).tokenizer()
