"""The config: complete, checked, and helpful about mistakes."""

import pytest

from areal_jax import config as config_lib
from areal_jax.launch import local
from areal_jax.types import UserError
from configs import default
from configs import math as presets
from tests.helpers import run_main


@pytest.mark.parametrize("preset", presets.PRESETS)
def test_every_preset_is_valid_and_adds_no_key(preset):
    config = presets.get_config(preset)
    config_lib.validate(config)
    assert config_lib.flatten(config).keys() == config_lib.flatten(default.get_config()).keys()
    assert config.preset == preset


def test_every_check_is_of_a_key_that_exists_and_its_default_passes():
    flat = config_lib.flatten(default.get_config())
    for key, (holds, expected) in config_lib.CHECKS.items():
        assert holds(flat[key]), key
        assert expected.startswith("expected")


def test_every_key_is_checked_or_free():
    free = {"preset", "workdir", "data.cache_dir", "transport.host", "transport.address"}
    free |= {"launch.trainer_devices", "launch.sampler_devices", "model.path", "model.revision", "model.tokenizer"}
    free |= {"data." + key for key in ("path", "heldout_path", "question_key", "answer_key", "system_prompt")}
    free |= {"data." + key for key in ("train_split", "validation_split", "test_split", "shot_format")}
    for key, value in config_lib.flatten(default.get_config()).items():
        checked = key in config_lib.CHECKS or isinstance(value, bool) or key.startswith("mesh.")
        crossed = key in ("model.heads", "trainer.row_length", "rollout.queue_capacity")
        assert checked or crossed or key in free, key


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"rollout.max_staleness": -1.0}, ["rollout.max_staleness is -1.0", "0, 1, 2"]),
        ({"rollout.max_staleness": float("nan")}, ["rollout.max_staleness is nan"]),
        ({"loss.name": "poo"}, ["'poo'", "decoupled_ppo"]),
        ({"reward.name": "kindness"}, ["'kindness'", "exact_answer"]),
        ({"rollout.max_response_length": 200}, ["max_response_length 200", "row_length is 128", "raise it to 216"]),
        ({"trainer.minibatches": 3}, ["256 samples", "minibatches = 3"]),
        ({"rollout.queue_capacity": 100}, ["queue_capacity is 100", "256 samples", "at least 256"]),
        ({"rollout.group_size": 1}, ["group_size is 1", "group_norm"]),
        ({"mesh.trainer.data": 0}, ["mesh.trainer.data is 0"]),
        ({"mesh.sampler.fsdp": -2}, ["mesh.sampler.fsdp is -2"]),
        ({"transport.max_message_bytes": 4096}, ["max_message_bytes is 4096", "slots = 64"]),
        ({"mesh.trainer.data": 3}, ["micro_batch_rows is 16", "data x fsdp = 3"]),
        ({"mesh.sampler.tensor": 3}, ["mesh.sampler.tensor is 3", "model.heads = 8"]),
        ({"model.kv_heads": 3}, ["heads is 8", "kv_heads 3"]),
        ({"model.head_dim": 15}, ["head_dim is 15", "even"]),
        ({"data.name": "gsm9k"}, ["data.name is 'gsm9k'", "tfds/NAME"]),
        ({"data.template": "few_shot"}, ["data.shots is 0", "at least one example"]),
        ({"data.question_format": "Q:"}, ["{question}"]),
        ({"data.test_fraction": 0.6, "data.validation_fraction": 0.5}, ["0.6", "0.5", "less than 1"]),
        (
            {"data.name": "jsonl", "warm_start.enabled": False, "reward.name": "math"},
            ["model.path is empty", "'jsonl'"],
        ),
        ({"data.name": "jsonl", "warm_start.enabled": False}, ["reward.name is 'exact_answer'", "'math' or 'text'"]),
        ({"rollout.stop_strings": ("",)}, ["stop_strings", "none empty"]),
        ({"reward.incorrect": 1.0}, ["reward.incorrect is 1.0", "at most 0"]),
        ({"reward.workers": 0}, ["reward.workers is 0"]),
        ({"trainer.remat": "some"}, ["'some'", "dots"]),
    ],
)
def test_bad_values_are_named_with_the_remedy(changes, words):
    config = default.get_config()
    for key, value in changes.items():
        config.update_from_flattened_dict({key: value})
    with pytest.raises(UserError) as error:
        config_lib.validate(config)
    for word in words:
        assert word in str(error.value)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            ["--config=configs/math.py", "--config.rollout.max_stalness=3"],
            ["did you mean config.rollout.max_staleness?"],
        ),
        (["--config=configs/math.py", "--config.trainer.steps=many"], ["trainer.steps=many"]),
        (["--config=configs/math.py:tiny-skil"], ["unknown preset 'tiny-skil'", "'tiny-skill'"]),
        (["--config=configs/maths.py"], ["configs/maths.py"]),
        (["--config=configs/math.py", "--config.rollout.max_staleness=-2"], ["max_staleness is -2"]),
        (["--config=configs/math.py", "--rolee=trainer"], ["rolee"]),
        (["--config=configs/math.py", "stray"], ["unexpected argument 'stray'"]),
        ([], ["no config: pass --config=configs/math.py"]),
    ],
)
def test_mistakes_on_the_command_line_end_in_one_message(arguments, words):
    done = run_main(*arguments)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert done.stderr.startswith("areal_jax: error:")
    for word in words:
        assert word in done.stderr


def test_cores_are_shared_out():
    config = default.get_config()
    assert local.placements(config, 0, [0, 1]) == [{"AREAL_JAX_CORES": "0,1"}, {"AREAL_JAX_CORES": "1"}]
    config.launch.samplers = 2
    shares = [p["AREAL_JAX_CORES"] for p in local.placements(config, 0, [2, 3, 5, 7])]
    assert shares == ["2,3,5,7", "5", "7"]
    config.launch.samplers = 1
    assert local.placements(config, 0, [0]) == [{}, {}]  # nothing to share


def test_accelerators_are_shared_out(monkeypatch):
    config = default.get_config()
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    config.launch.samplers = 2
    shares = [p["CUDA_VISIBLE_DEVICES"] for p in local.placements(config, 8, [0])]
    assert shares == ["0,1,2,3", "4,5", "6,7"]
    config.launch.trainer_devices = "0,1,2,3,4,5"
    assert [p["CUDA_VISIBLE_DEVICES"] for p in local.placements(config, 8, [0])] == ["0,1,2,3,4,5", "6", "7"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "a,b,c,d,e,f,g,h")
    assert [p["CUDA_VISIBLE_DEVICES"] for p in local.placements(config, 8, [0])] == ["a,b,c,d,e,f", "g", "h"]
    config.launch.sampler_devices = "5,6"
    with pytest.raises(UserError, match="disjoint"):
        local.placements(config, 8, [0])
    config.launch.trainer_devices, config.launch.sampler_devices = "", "1,2,3"
    with pytest.raises(UserError, match="disjoint"):
        local.placements(config, 8, [0])


def test_the_kind_follows_the_devices():
    assert [local.choose_kind("auto", n) for n in (0, 1, 2)] == ["local", "colocated", "local"]
    assert local.choose_kind("local", 1) == "local"
