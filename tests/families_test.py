"""Every family against transformers: logits, greedy continuations, and that each key of a config counts."""

import dataclasses
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

from areal_jax import sharding
from areal_jax.models import pretrained
from areal_jax.models.families import FAMILIES, read_config, tensor_maps, to_hf
from areal_jax.models.transformer import build_model
from areal_jax.rollout.engine import Engine
from areal_jax.rollout.programs import EngineConfig, make_program
from areal_jax.rollout.schedule import Request
from areal_jax.types import PolicySnapshot, UserError
from tests.goldens import make
from tests.helpers import one_device_mesh

GOLDEN = json.loads((make.HERE / "families.json").read_text())
LOGITS = np.load(make.HERE / "families.npz")


def write_model(directory: pathlib.Path, config: dict) -> pathlib.Path:
    """A Hugging Face directory with the golden weights of a config."""
    directory.mkdir(parents=True, exist_ok=True)
    shapes = {m.name: m.hf_shape for m in tensor_maps(read_config(config, "test"))}
    save_file(make.weights(shapes, config), directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def load(directory, mesh=None):
    found = pretrained.find(str(directory))
    model = build_model(found.config(), mesh or one_device_mesh())
    return model, found.load_params(model)


def logits_of(model, params, tokens):
    @jax.jit
    def run(params, tokens):
        policy = model.bind(params)
        return policy.logits(policy(tokens, jnp.arange(tokens.shape[1])[None], jnp.ones_like(tokens)))

    return np.asarray(run(params, jnp.asarray(tokens)[None]))[0]


def greedy(model, params, prompt, count):
    longest = len(prompt) + count
    config = EngineConfig(
        slots=2, max_prompt_length=len(prompt), max_length=longest, chunk=16, row_ladder=(1,),
        length_ladder=(len(prompt), longest), prefill_tokens=longest, eos_ids=(), kv_on_update="keep",
    )  # fmt: skip
    engine = Engine(make_program(model, config), PolicySnapshot(0, params), 0)
    engine.submit([Request(0, np.asarray(prompt, np.int32), count, 0.0)])
    done = []
    while engine.unfinished:
        done += engine.step()
    return done[0].tokens[len(prompt) :].tolist()


def test_the_goldens_are_of_the_cases_and_cover_every_family():
    assert {name: record["config"] for name, record in GOLDEN.items()} == make.CASES
    assert {c["architectures"][0] for c in make.CASES.values()} == set(FAMILIES)
    for record in GOLDEN.values():
        assert len(set(record["greedy"])) > 8  # no continuation that just repeats itself


@pytest.mark.parametrize("name", make.CASES)
def test_logits_and_greedy_continuation_equal_transformers(name, tmp_path):
    model, params = load(write_model(tmp_path, make.CASES[name]))
    prompt = make.tokens(name)
    np.testing.assert_allclose(logits_of(model, params, prompt), LOGITS[name], atol=1e-4, rtol=0)
    assert greedy(model, params, prompt, make.GREEDY) == GOLDEN[name]["greedy"]


@pytest.mark.parametrize("name", make.CASES)
def test_goldens_are_what_transformers_computes(name):
    pytest.importorskip("torch")
    logits, continuation = make.derive(name)
    np.testing.assert_allclose(logits, LOGITS[name], atol=2e-5, rtol=0)
    assert continuation == GOLDEN[name]["greedy"]


@pytest.mark.parametrize("name", ["llama3", "gemma3-planted", "qwen2"])
def test_a_mesh_changes_nothing(name, tmp_path):
    mesh = sharding.make_mesh({"data": 2, "fsdp": 2, "tensor": 2})
    model, params = load(write_model(tmp_path, make.CASES[name]), mesh)
    prompt = np.stack([make.tokens(name)] * 4)

    @jax.jit
    def run(params, tokens):
        policy = model.bind(params)
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
        return policy.logits(policy(tokens, positions, jnp.ones_like(tokens)))

    np.testing.assert_allclose(run(params, prompt)[3], LOGITS[name], atol=1e-4, rtol=0)


PLANTED = [
    ("llama3", {"rope_theta": 10_000.0}),
    *(("llama3", {"rope_scaling": make.LLAMA3 | {key: value}}) for key, value in [
        ("factor", 8.0), ("low_freq_factor", 1.0), ("high_freq_factor", 4.0), ("original_max_position_embeddings", 64),
        ("rope_type", "linear"),
    ]),
    ("llama-head-dim", {"rms_norm_eps": 1e-6}),
    ("llama-biases", {"hidden_act": "silu"}),
    ("llama-linear-rope", {"rope_scaling": None}),
    ("mistral-window", {"sliding_window": None}),
    ("qwen2-window", {"sliding_window": 6}),
    ("qwen2-window", {"max_window_layers": 2}),
    ("qwen2-window", {"use_sliding_window": False}),
    ("gemma3-planted", {"rope_theta": 1e6}),
    ("gemma3-planted", {"rope_local_base_freq": 10_000.0}),
    ("gemma3-planted", {"query_pre_attn_scalar": 256}),
    ("gemma3-planted", {"final_logit_softcapping": None}),
    ("gemma3-planted", {"sliding_window": 4}),
    ("gemma3-planted", {"sliding_window_pattern": 2}),
    ("gemma3-planted", {"rope_scaling": None}),
    ("gemma3", {"hidden_activation": "silu"}),
    ("rope-parameters", {"rope_parameters": {"rope_type": "default", "rope_theta": 701.0}}),
]  # fmt: skip
"""Keys whose planted value is put back: the golden logits must then be missed, or the key is not honoured."""


@pytest.mark.parametrize(("name", "change"), PLANTED, ids=lambda x: x if isinstance(x, str) else "-".join(x))
def test_every_numeric_key_counts(name, change, tmp_path):
    model, params = load(write_model(tmp_path, make.CASES[name] | change))
    assert np.abs(logits_of(model, params, make.tokens(name)) - LOGITS[name]).max() > 1e-3


@pytest.mark.parametrize(
    ("name", "change"),
    [("llama-biases", {"attention_bias": False}), ("llama-biases", {"mlp_bias": False}),
     ("qwen3-bias", {"attention_bias": False}), ("qwen2", {"tie_word_embeddings": False}),
     ("llama-head-dim", {"head_dim": 10}), ("llama2", {"num_key_value_heads": 4})],
)  # fmt: skip
def test_keys_that_change_the_tensors_are_checked_against_them(name, change, tmp_path):
    """A config that asks for other tensors than the file holds ends in a list of them."""
    directory = write_model(tmp_path, make.CASES[name])
    (directory / "config.json").write_text(json.dumps(make.CASES[name] | change))
    with pytest.raises(UserError, match=r"missing|unexpected|has shape"):
        load(directory)


@pytest.mark.parametrize("name", make.CASES)
def test_a_config_of_ours_becomes_the_config_json_that_it_came_from(name):
    config = read_config(make.CASES[name], name)
    written = to_hf(config)
    assert read_config(json.loads(json.dumps(written)), name) == config


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"architectures": ["MixtralForCausalLM"]}, ["MixtralForCausalLM", "LlamaForCausalLM"]),
        ({"architectures": []}, ["architectures is []"]),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, ["rope_type is 'yarn'", "llama3"]),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, ["quantization_config is 'gptq'"]),
        ({"num_local_experts": 8}, ["num_local_experts is 8"]),
        ({"hidden_act": "relu"}, ["hidden_act is 'relu'", "silu"]),
        ({"partial_rotary_factor": 0.5}, ["partial_rotary_factor is 0.5"]),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": None}}, ["rope_theta is None"]),
    ],
)
def test_what_is_not_supported_is_refused_by_name(change, words):
    config = make.CASES["llama2"] | change
    if not config["architectures"]:
        config["model_type"] = "mamba"
    with pytest.raises(UserError) as error:
        read_config(config, "config.json")
    for word in words:
        assert word in str(error.value)


def test_gemma_refuses_what_its_own_config_may_ask_for():
    for change in ({"attn_logit_softcapping": 50.0}, {"use_bidirectional_attention": True}):
        with pytest.raises(UserError, match=next(iter(change))):
            read_config(make.CASES["gemma3"] | change, "config.json")


def test_an_option_mix_that_no_family_has_cannot_be_exported():
    config = dataclasses.replace(read_config(make.CASES["llama2"], ""), logit_soft_cap=3.0)
    with pytest.raises(UserError, match="cannot be exported"):
        to_hf(config)
