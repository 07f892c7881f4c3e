"""The config: complete, checked, and helpful about mistakes."""

import pytest

from areal_jax import build, objective
from areal_jax import config as config_lib
from areal_jax.launch import local
from areal_jax.rl.corrections import AGGREGATIONS
from areal_jax.rl.losses import LOSSES
from areal_jax.rollout.blocks import BlockPool
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
        ({"rollout.injected_staleness": 2}, ["injected_staleness is 2", "max_staleness 4.0", "max_staleness=0"]),
        ({"loss.name": "sft"}, ["'sft'", "decoupled_ppo", "gspo"]),
        ({"loss.name": "ppo", "loss.proximal": "recompute"}, ["'recompute'", "'ppo'", "reads no proximal"]),
        ({"loss.name": "reinforce", "loss.proximal": "loglinear"}, ["'loglinear'", "'reinforce'", "decoupled"]),
        ({"loss.name": "gspo", "loss.importance_weight": "clamp"}, ["'clamp'", "'gspo'", "twice"]),
        (
            {"loss.name": "staleness_ppo", "loss.staleness_base": "ppo", "loss.importance_weight": "mask"},
            ["'mask'", "'staleness_ppo'", "twice"],
        ),
        ({"loss.name": "ppo", "loss.proximal": "behaviour"}, ["'behaviour'", "'ppo'", "reads no proximal"]),
        (
            {"loss.name": "reinforce", "loss.proximal": "behaviour", "loss.importance_weight": "clamp"},
            ["'behaviour'", "'clamp'", "correct nothing"],
        ),
        ({"reward.shuffle": True, "rollout.zero_variance_groups": "refill"}, ["shuffle", "'refill'", "'keep'"]),
        ({"reward.kl_coefficient": 0.1}, ["kl_coefficient is 0.1", "'group_norm'", "loss.kl_coefficient"]),
        ({"loss.proximal_check": True}, ["proximal_check", "'loglinear'", "'auto'"]),
        ({"loss.importance_weight": "mask", "loss.importance_cap": 0.4}, ["importance_low 0.5", "importance_cap 0.4"]),
        ({"loss.name": "cispo", "loss.dual_clip": 3.0}, ["dual_clip is 3.0", "'cispo'", "decoupled_ppo"]),
        ({"loss.dual_clip": 0.5}, ["dual_clip is 0.5", "more than 1"]),
        ({"advantage.name": "gae"}, ["'gae'", "critic.kind 'none'", "'head' or 'network'"]),
        ({"critic.kind": "head"}, ["'group_norm'", "critic.kind 'head'"]),
        ({"loss.name": "topr", "advantage.name": "reinforce_pp"}, ["'topr'", "'reinforce_pp'", "per trajectory"]),
        ({"advantage.name": "batch_norm", "advantage.whiten": True}, ["whiten is True", "'batch_norm'"]),
        (
            {"rollout.group_size": 1, "advantage.name": "batch_norm", "rollout.zero_variance_groups": "refill"},
            ["group_size is 1", "'refill'"],
        ),
        (
            {"rollout.group_size": 1, "advantage.name": "reinforce_pp", "advantage.group_baseline": True},
            ["group_size is 1", "'reinforce_pp'"],
        ),
        ({"reward.overlong_buffer": 100}, ["overlong_buffer is 100", "max_response_length 72"]),
        ({"reward.scale": 0.0}, ["reward.scale is 0.0"]),
        ({"loss.cispo_high": 0.9}, ["cispo_high is 0.9"]),
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


@pytest.mark.parametrize("name", [name for name in LOSSES if name != "sft"])
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_every_objective_is_chosen_by_its_name(name, aggregation):
    config = default.get_config()
    config.loss.update({"name": name, "aggregation": aggregation})
    config_lib.validate(config)
    chosen = objective.loss_config(config)
    assert (chosen.name, chosen.aggregation) == (name, aggregation)
    assert chosen.constant_length == config.rollout.max_response_length


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"loss.name": "reinforce"}, ["max_staleness is 4", "'reinforce'", "loss.importance_weight"]),
        ({"loss.importance_weight": "none"}, ["decoupled_ppo", "uncorrected"]),
        ({"loss.name": "reinforce", "loss.importance_weight": "clamp"}, []),
        ({"rollout.zero_variance_groups": "drop", "advantage.name": "batch_norm"}, ["'drop'", "'batch_norm'"]),
        ({"rollout.zero_variance_groups": "refill"}, []),
        ({"loss.name": "reinforce", "rollout.max_staleness": 0.0}, []),
        ({}, []),
        ({"loss.name": "ppo"}, []),
    ],
)
def test_what_may_be_meant_is_warned_of(changes, words):
    config = default.get_config()
    config.update_from_flattened_dict(changes)
    config_lib.validate(config)
    found = objective.warnings(config)
    assert len(found) == (1 if words else 0)
    for word in words:
        assert word in found[0]


@pytest.mark.parametrize(
    ("changes", "key", "reason"),
    [
        ({"loss.name": "ppo"}, "loss.cispo_high", "with loss.name 'cispo'"),
        ({"loss.name": "gspo"}, "loss.clip_low", "'ppo' or 'decoupled_ppo'"),
        ({"loss.name": "ppo"}, "loss.importance_cap", "importance weights"),
        ({}, "loss.importance_low", "'mask'"),
        ({}, "advantage.gamma", "'gae' and 'reinforce_pp'"),
        ({}, "critic.learning_rate", "critic.kind"),
        ({"critic.kind": "network", "advantage.name": "gae"}, "critic.coefficient", "'head'"),
        ({}, "loss.kl_estimator", "kl_coefficient"),
        ({}, "rollout.max_refills", "'refill'"),
    ],
)
def test_an_override_that_nothing_reads_is_refused(changes, key, reason):
    config = default.get_config()
    config.update_from_flattened_dict(changes)
    with pytest.raises(UserError, match="would be ignored") as error:
        config_lib.refuse_idle_overrides(config, {**changes, key: 0.5})
    assert key in str(error.value)
    assert reason in str(error.value)
    config_lib.refuse_idle_overrides(config, changes)


def test_every_key_of_a_part_is_known_to_be_read_or_not():
    for key in objective.READ_WHEN:
        assert key in config_lib.flatten(default.get_config()), key


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
        (
            ["--config=configs/math.py", "--config.loss.name=ppo", "--config.loss.m2po_threshold=.1"],
            ["m2po_threshold", "would be ignored", "'m2po'"],
        ),
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


@pytest.mark.parametrize("slots", [1, 3, 7, 64])
@pytest.mark.parametrize("prefill_tokens", [1, 15, 40, 16384])
@pytest.mark.parametrize("cache", [{}, {"cache": "paged"}, {"cache": "paged", "block_size": 1, "cache_tokens": 89}])
def test_the_engine_s_sizes_follow_from_any_config(slots, prefill_tokens, cache):
    config = presets.get_config("tiny")
    config.rollout.update({"slots": slots, "prefill_tokens": prefill_tokens, **cache})
    config_lib.validate(config)
    sizes = build.engine_config(config, (1,), row_shards=1)
    assert sizes.longest_refill == min(prefill_tokens, sizes.max_length)
    assert all(0 < n < slots for n in sizes.fewer)
    if sizes.paging:
        pool = BlockPool(sizes.paging, slots, sizes.max_length)
        assert pool.tables.shape[1] >= 8  # blocks are small beside a sequence
