"""A run of a pretrained model by the command that users type, and its policy written for transformers."""

import json

import jax
import numpy as np
import pytest

from areal_jax.data.tokenizer import build_character_tokenizer
from areal_jax.metrics import read_metrics
from areal_jax.models import pretrained
from areal_jax.models.families import tensor_maps
from areal_jax.models.transformer import build_model
from tests.end_to_end_test import parameters
from tests.families_test import logits_of, write_model
from tests.goldens import make
from tests.helpers import ROOT, environment, one_device_mesh, run_main
from tests.sources_test import ALPHABET, CHAT, write_jsonl

CONFIG = "--config=tests/small_pretrained.py"


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A Qwen2 with a vocabulary padded beyond its tokenizer's, in bfloat16-free small files, with tokenizer."""
    directory = tmp_path_factory.mktemp("model")
    tokenizer = build_character_tokenizer(ALPHABET)
    tokenizer.chat_template = CHAT
    tokenizer.pad_token = tokenizer.eos_token  # as many models have it
    vocabulary = len(tokenizer) + 9
    write_model(directory, make.CASES["qwen2"] | {"vocab_size": vocabulary})
    tokenizer.save_pretrained(directory)
    ids = [tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids("z")]
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": ids, "top_k": 20}))
    parities = [{"question": f"{a} + {b}", "answer": f"#### {(a + b) % 2}"} for a in range(10) for b in range(10)]
    overlong = [{"question": f"{a} + 1 and nothing else at all", "answer": "1"} for a in range(100)]
    write_jsonl(directory / "train.jsonl.gz", parities + overlong)
    return directory


@pytest.fixture(scope="module")
def finished(source, tmp_path_factory):
    workdir = tmp_path_factory.mktemp("runs") / "run"
    done = run_main(CONFIG, f"--config.workdir={workdir}", *paths(source))
    assert done.returncode == 0, done.stderr
    return workdir


def paths(source):
    return (f"--config.model.path={source}", f"--config.data.path={source / 'train.jsonl.gz'}")


def test_the_run_trains_it_through_chat_prompts_and_stop_strings(finished, source):
    steps = [r for r in read_metrics(finished) if r["kind"] == "step"]
    assert [r["version"] for r in steps] == [1, 2, 3]
    assert json.loads((finished / "summary.json").read_text())["compiles_after_warmup"] == 0
    assert all(r["data/skipped"] > 0 for r in steps)
    samples = [json.loads(line) for line in (finished / "samples.jsonl").read_text().splitlines()]
    assert all(s["prompt"].startswith("<|system|>add\n<|user|>") for s in samples)
    assert all(s["prompt"].endswith("=\n<|assistant|>") for s in samples)
    for s in samples:
        before_the_last = s["response"] if s["finish_reason"] == "length" else s["response"][:-1]
        assert not any(mark in before_the_last for mark in "01z")
    assert {s["reward"] for s in samples} <= {2.0, -1.0}
    before = numbers(pretrained_params(source))
    assert any(np.abs(a - b).max() > 0 for a, b in zip(before, numbers(parameters(finished)), strict=True))


def pretrained_params(directory):
    found = pretrained.find(str(directory))
    return found.load_params(build_model(found.config(), one_device_mesh()))


def numbers(tree):
    if isinstance(tree, dict):
        return [x for _, value in sorted((str(k), v) for k, v in tree.items()) for x in numbers(value)]
    return [np.asarray(tree)]


def run_export(*arguments):
    import subprocess
    import sys

    return subprocess.run(
        [sys.executable, "-m", "areal_jax.export", *map(str, arguments)],
        cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=120,
    )  # fmt: skip


@pytest.fixture(scope="module")
def exported(finished):
    out = finished.parent / "exported"
    done = run_export(f"--workdir={finished}", f"--output={out}", "--max_shard_gb=0.00002")
    assert done.returncode == 0, done.stderr
    assert "after step 3" in done.stdout
    return out


def test_what_is_exported_loads_back_bit_for_bit(finished, exported, source):
    for got, want in zip(numbers(pretrained_params(exported)), numbers(parameters(finished)), strict=True):
        np.testing.assert_array_equal(got, want)
    config = json.loads((exported / "config.json").read_text())
    original = json.loads((source / "config.json").read_text())
    assert config == original | {"dtype": "float32"}
    assert len(list(exported.glob("*.safetensors"))) > 1
    generation = json.loads((exported / "generation_config.json").read_text())
    assert generation["top_k"] == 20
    assert len(generation["eos_token_id"]) == 2


def test_transformers_loads_it_as_it_is(exported, source):
    from transformers import AutoConfig, AutoTokenizer, GenerationConfig

    assert AutoConfig.from_pretrained(exported).hidden_size == 32
    tokenizer = AutoTokenizer.from_pretrained(exported)
    assert tokenizer.chat_template == CHAT
    assert tokenizer.get_vocab() == AutoTokenizer.from_pretrained(source).get_vocab()
    assert GenerationConfig.from_pretrained(exported).top_k == 20


def test_torch_computes_the_same_from_it(exported):
    torch = pytest.importorskip("torch")
    from transformers import AutoModelForCausalLM

    theirs, report = AutoModelForCausalLM.from_pretrained(exported, dtype=torch.float32, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    found = pretrained.find(str(exported))
    model = build_model(found.config(), one_device_mesh())
    tokens = np.arange(3, 19)
    with torch.no_grad():
        logits = theirs(torch.from_numpy(tokens)[None]).logits[0].numpy()
    np.testing.assert_allclose(logits_of(model, found.load_params(model), tokens), logits, atol=1e-4)


def test_a_new_model_is_exported_as_a_llama(tmp_path):
    """The embedded model has no config.json to begin with; it gets one that says the same."""
    workdir, out = tmp_path / "run", tmp_path / "out"
    done = run_main(
        "--config=tests/small_config.py", f"--config.workdir={workdir}", f"--config.data.cache_dir={tmp_path}",
        "--config.launch.kind=colocated", "--config.trainer.steps=1",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert run_export(f"--workdir={workdir}", f"--output={out}", "--step=1").returncode == 0
    assert json.loads((out / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]
    for got, want in zip(numbers(pretrained_params(out)), numbers(parameters(workdir)), strict=True):
        np.testing.assert_array_equal(got, want)
    assert pretrained.find(str(out)).tokenizer().encode("12+3=") == [4, 5, 13, 6, 14]
    again = run_export(f"--workdir={workdir}", f"--output={out}")
    assert_refused(again, "is not an empty directory")
    assert_refused(run_export(f"--workdir={workdir}", f"--output={tmp_path / 'x'}", "--step=7"), "there are [1]")
    assert_refused(run_export(f"--workdir={tmp_path}", f"--output={tmp_path / 'x'}"), "holds no run")
    assert_refused(run_export(f"--workdir={workdir}"), "expected --workdir=DIR of a run and --output=DIR")
    assert not (tmp_path / "x").exists()


def assert_refused(done, words):
    assert done.returncode == 1
    assert "areal_jax: error:" in done.stderr
    assert words in done.stderr
    assert "Traceback" not in done.stderr


def test_a_tokenizer_class_that_contradicts_the_file_is_not_used(source):
    """transformers splits text for any Qwen2 as Qwen2's own tokenizer does; this one has single characters."""
    from transformers import AutoTokenizer

    theirs, ours = AutoTokenizer.from_pretrained(source), pretrained.find(str(source)).tokenizer()
    text = "1 + 2\n"
    assert ours.encode(text) == build_character_tokenizer(ALPHABET).encode(text)
    assert theirs.encode(text) != ours.encode(text)  # or this guard has nothing left to guard against


def test_half_an_export_is_not_left_behind(finished, tmp_path, monkeypatch):
    from areal_jax import export

    def fails(*_):
        raise OSError("the disk is full")

    monkeypatch.setattr(export, "_generation_config", fails)
    with pytest.raises(OSError, match="disk is full"):
        export.export(finished, tmp_path / "out", None, "float32", 10**9)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["--config.model.path=/nowhere/at/all"], "model.path '/nowhere/at/all' does not exist"),
        (["--config.data.path=/nowhere.jsonl"], "/nowhere.jsonl cannot be read"),
        (["--config.data.question_key=problem"], "see data.question_key"),
        (["--config.data.overlong=refuse"], "data.overlong='skip'"),
        (["--config.rollout.max_response_length=5000", "--config.trainer.row_length=6000"], "was made for 4096"),
        (["--config.model.layers=7"], "config.model.layers is set to 7"),
        (["--config.model.tokenizer=/nowhere"], "no tokenizer that can be loaded in /nowhere"),
        (["--config.warm_start.enabled=True"], "warm_start.enabled=False"),
        (["--config.mesh.trainer.tensor=3"], "tensor is 3 and does not divide the model's heads = 4"),
        (["--config.data.template=few_shot"], "few_shot needs at least one example"),
    ],
)
def test_what_does_not_fit_ends_in_one_message(overrides, words, source, tmp_path):
    done = run_main(
        CONFIG, f"--config.workdir={tmp_path / 'run'}", *paths(source), "--config.launch.kind=colocated", *overrides,
        HF_HUB_OFFLINE="1", XLA_FLAGS=f"--xla_force_host_platform_device_count={3 if 'tensor' in overrides[0] else 1}",
    )  # fmt: skip
    assert_refused(done, words)


def test_every_parameter_of_ours_has_one_name_of_theirs(source):
    found = pretrained.find(str(source))
    model = build_model(found.config(), one_device_mesh())
    paths_ours = {
        tuple(k.key for k in path) for path, _ in jax.tree_util.tree_flatten_with_path(model.abstract_params)[0]
    }
    maps = tensor_maps(model.config)
    assert {m.path for m in maps} == paths_ours
    assert len({m.name for m in maps}) == len(maps)
