"""Hugging Face checkpoints: streamed into shards, written back bit for bit, and refused with every fault named."""

import json
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from areal_jax import sharding
from areal_jax.models import pretrained
from areal_jax.models.checkpoint_io import INDEX, save_params
from areal_jax.models.families import read_config, tensor_maps
from areal_jax.models.transformer import build_model
from areal_jax.types import UserError
from tests.families_test import load, write_model
from tests.goldens import make
from tests.helpers import ROOT, environment, one_device_mesh


def numbers(tree):
    return [np.asarray(x) for x in jax.tree.leaves(tree)]


def assert_equal(a, b):
    for x, y in zip(numbers(a), numbers(b), strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("shape", [(8, 1, 1), (1, 8, 1), (2, 2, 2), (1, 2, 4)])
def test_any_mesh_holds_the_same_numbers_in_its_own_shards(shape, tmp_path):
    directory = write_model(tmp_path, make.CASES["qwen3-bias"])
    mesh = sharding.make_mesh(dict(zip(("data", "fsdp", "tensor"), shape, strict=True)))
    model, params = load(directory, mesh)
    _, whole = load(directory)
    assert_equal(params, whole)
    for x, like in zip(jax.tree.leaves(params), jax.tree.leaves(model.abstract_params), strict=True):
        assert x.sharding.is_equivalent_to(like.sharding, x.ndim)
        assert x.dtype == like.dtype
    # the numbers are those of the file, in our layout
    q = load_file(directory / "model.safetensors")["model.layers.1.self_attn.q_proj.weight"]
    np.testing.assert_array_equal(params["layers"][1]["attention"]["q"], q.reshape(4, 16, 32).transpose(2, 0, 1))


@pytest.mark.parametrize("name", make.CASES)
@pytest.mark.parametrize("shard_bytes", [10**9, 9000])
def test_what_is_written_is_what_was_read(name, shard_bytes, tmp_path):
    """Bit for bit, in one file or several, from a mesh."""
    source = write_model(tmp_path / "in", make.CASES[name])
    model, params = load(source, sharding.make_mesh({"data": 2, "fsdp": 2, "tensor": 2}))
    out = tmp_path / "out"
    out.mkdir()
    save_params(params, model.config, out, "float32", shard_bytes)
    (out / "config.json").write_bytes((source / "config.json").read_bytes())
    written = {}
    for file in sorted(out.glob("*.safetensors")):
        part = load_file(file)
        assert len(part) == 1 or sum(x.nbytes for x in part.values()) <= shard_bytes
        written |= part
    read = load_file(source / "model.safetensors")
    assert written.keys() == read.keys()
    for key, value in read.items():
        np.testing.assert_array_equal(written[key], value)
    assert (out / INDEX).exists() == (shard_bytes == 9000)
    assert_equal(load(out)[1], params)


def test_bfloat16_files_are_read_exactly_and_written_rounded(tmp_path):
    source = write_model(tmp_path / "in", make.CASES["llama3"])
    exact = load_file(source / "model.safetensors")
    narrow = {k: v.astype(ml_dtypes.bfloat16) for k, v in exact.items()}
    save_file(narrow, source / "model.safetensors", metadata={"format": "pt"})
    model, params = load(source)
    maps = {m.name: m for m in tensor_maps(model.config)}
    assert params["head"].dtype == jnp.float32
    np.testing.assert_array_equal(params["head"], narrow["lm_head.weight"].astype(np.float32).T)
    out = tmp_path / "out"
    out.mkdir()
    save_params(params, model.config, out, "bfloat16", 10**9)
    written = load_file(out / "model.safetensors")
    assert written.keys() == maps.keys()
    for key, value in written.items():
        assert value.dtype == ml_dtypes.bfloat16
        np.testing.assert_array_equal(value, narrow[key])


def test_a_sampler_reads_matrices_in_the_dtype_it_computes_in(tmp_path):
    found = pretrained.find(str(write_model(tmp_path, make.CASES["llama2"])))
    model = build_model(found.config(), one_device_mesh(), "bfloat16")
    params = found.load_params(model)
    assert {x.dtype for x in jax.tree.leaves(params)} == {jnp.dtype("bfloat16"), jnp.dtype("float32")}
    assert params["final_norm"]["scale"].dtype == jnp.float32


PEAK = """
import json, sys, threading, time
import jax, numpy as np
from areal_jax import sharding
from areal_jax.models import pretrained
from areal_jax.models.transformer import build_model

def anonymous():
    with open("/proc/self/status") as f:
        return next(int(line.split()[1]) for line in f if line.startswith("RssAnon")) * 1024

found = pretrained.find(sys.argv[1])
model = build_model(found.config(), sharding.make_mesh({"data": 1, "fsdp": 4, "tensor": 2}))
jax.block_until_ready(jax.device_put(np.zeros(8), jax.devices()[0]))
before = peak = anonymous()
done = threading.Event()

def watch():
    global peak
    while not done.is_set():
        peak = max(peak, anonymous())
        time.sleep(0.0005)

thread = threading.Thread(target=watch)
thread.start()
params = found.load_params(model)
done.set()
thread.join()
kept = sum(s.data.nbytes for x in jax.tree.leaves(params) for s in x.addressable_shards)
print(json.dumps({"peak": peak - before, "kept": kept}))
"""


def test_peak_memory_of_loading_stays_near_what_is_kept(tmp_path):
    """On eight fake devices: within 1.3 times the largest tensor of what this host keeps."""
    config = make.llama(hidden_size=512, intermediate_size=1024, vocab_size=40_000, num_hidden_layers=2)
    shapes = {m.name: m.hf_shape for m in tensor_maps(read_config(config, "test"))}
    largest = max(4 * int(np.prod(s)) for s in shapes.values())  # the embedding: 82 MB in float32
    save_file({k: np.ones(s, ml_dtypes.bfloat16) for k, s in shapes.items()}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(config))
    done = subprocess.run(
        [sys.executable, "-c", PEAK, str(tmp_path)], cwd=ROOT, capture_output=True, text=True, timeout=120, check=True,
        env=environment(XLA_FLAGS="--xla_force_host_platform_device_count=8"),
    )  # fmt: skip
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["kept"] > 1.9 * largest  # embedding and head, each once
    assert result["peak"] > 0.9 * result["kept"], result  # or it was not measured
    assert result["peak"] < result["kept"] + 1.3 * largest, result


# --- faults ---


def damaged(tmp_path, change):
    directory = write_model(tmp_path, make.CASES["llama2"])
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors")
    return directory


def test_missing_extra_and_misshaped_tensors_are_all_listed(tmp_path):
    def change(tensors):
        del tensors["model.layers.0.mlp.up_proj.weight"]
        tensors["model.layers.9.mlp.up_proj.weight"] = np.zeros(1, np.float32)
        tensors["model.norm.weight"] = np.zeros(33, np.float32)

    with pytest.raises(UserError) as error:
        load(damaged(tmp_path, change))
    for words in (
        "missing model.layers.0.mlp.up_proj.weight [48, 32]",
        "unexpected model.layers.9.mlp.up_proj.weight",
        "model.norm.weight has shape [33], expected [32]",
    ):
        assert words in str(error.value)


def test_tensors_that_a_checkpoint_may_repeat_are_passed_over(tmp_path):
    def change(tensors):
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.zeros(4, np.float32)

    assert_equal(load(damaged(tmp_path, change))[1], load(write_model(tmp_path / "whole", make.CASES["llama2"]))[1])
    tied = write_model(tmp_path / "tied", make.CASES["qwen2"])
    _, expected = load(tied)
    tensors = load_file(tied / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    save_file(tensors, tied / "model.safetensors")
    assert_equal(load(tied)[1], expected)


def test_quantised_weights_are_refused(tmp_path):
    def change(tensors):
        tensors["model.norm.weight"] = np.zeros(32, np.int8)

    with pytest.raises(UserError, match=r"model\.norm\.weight is stored as I8.*quantised"):
        load(damaged(tmp_path, change))


def test_files_that_are_cut_short_or_missing_are_named(tmp_path):
    directory = write_model(tmp_path, make.CASES["llama2"])
    file = directory / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(UserError, match=r"model\.safetensors cannot be read.*cut short"):
        load(directory)
    file.unlink()
    with pytest.raises(UserError, match=re.escape(f"{directory} holds no model.safetensors")):
        load(directory)
    (directory / INDEX).write_text(json.dumps({"weight_map": {"a": "model-00001-of-00002.safetensors"}}))
    with pytest.raises(UserError, match=r"lacks model-00001-of-00002\.safetensors"):
        load(directory)
    (directory / INDEX).write_text("{")
    with pytest.raises(UserError, match="is damaged"):
        load(directory)
    (directory / "config.json").write_text("{")
    with pytest.raises(UserError, match=r"config\.json cannot be read"):
        load(directory)


def test_a_path_that_is_nothing_says_what_was_expected(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    for path, words in {
        str(tmp_path): "without a config.json",
        str(tmp_path / "none"): "does not exist",
        "./none": "does not exist",
        str(tmp_path / "none.gguf"): "does not exist",
        "somebody/some-model": "the hub has not given it",
        "a name with spaces": "the hub has not given it",
    }.items():
        with pytest.raises(UserError, match=words):
            pretrained.find(path)


def test_a_model_in_the_hubs_cache_is_found_offline(tmp_path, monkeypatch):
    """The layout of huggingface_hub's cache, with nothing to ask."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    repository = tmp_path / "models--somebody--some-model"
    write_model(repository / "snapshots" / "0123abcd", make.CASES["llama3"])
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("0123abcd")
    found = pretrained.find("somebody/some-model")
    assert found.config() == read_config(make.CASES["llama3"], "")
    found.load_params(build_model(found.config(), one_device_mesh()))


def test_stop_ids_come_from_the_generation_config(tmp_path):
    directory = write_model(tmp_path, make.CASES["llama2"] | {"eos_token_id": 7})
    assert pretrained.find(str(directory)).stop_ids() == (7,)
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 9]}))
    assert pretrained.find(str(directory)).stop_ids() == (7, 9)
    (directory / "generation_config.json").write_text(json.dumps({"temperature": 0.6}))
    assert pretrained.find(str(directory)).stop_ids() == (7,)
