"""`--dry_run`: exact for what is counted, near XLA's own figure for what is estimated, and it refuses."""

import dataclasses
import json

import jax
import numpy as np
import pytest

from areal_jax import build, plan
from areal_jax.data import packing
from areal_jax.models.transformer import TransformerConfig, build_model
from areal_jax.rl.losses import LossConfig, resolve
from areal_jax.rollout.programs import empty_state
from areal_jax.trainer import train_step
from areal_jax.trainer.optimizer import OptimizerConfig, make_optimizer
from areal_jax.types import UserError
from configs import default
from configs import math as presets
from tests.helpers import one_device_mesh, run_main

QWEN2 = {
    "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_act": "silu", "rms_norm_eps": 1e-6,
    "max_position_embeddings": 32768, "vocab_size": 151936, "rope_theta": 1e6, "num_key_value_heads": 2,
}  # fmt: skip
SHAPES = {
    "qwen2.5-0.5b": QWEN2 | {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24,
                             "num_attention_heads": 14, "tie_word_embeddings": True},
    "qwen2.5-1.5b": QWEN2 | {"hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28,
                             "num_attention_heads": 12, "tie_word_embeddings": True},
    "qwen3-1.7b": {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_act": "silu", "rms_norm_eps": 1e-6,
        "max_position_embeddings": 40960, "vocab_size": 151936, "rope_theta": 1e6, "num_key_value_heads": 8,
        "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28, "num_attention_heads": 16,
        "head_dim": 128, "tie_word_embeddings": True,
    },
    "r1-distill-qwen-1.5b": QWEN2 | {"hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28,
                                     "num_attention_heads": 12, "tie_word_embeddings": False, "rope_theta": 1e4},
    "r1-distill-qwen-7b": QWEN2 | {"hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28,
                                   "num_attention_heads": 28, "num_key_value_heads": 4, "vocab_size": 152064,
                                   "tie_word_embeddings": False, "rope_theta": 1e4},
}  # fmt: skip
"""The published shapes of the presets' models."""
PARAMETERS = {
    "qwen2.5-0.5b": 494_032_768, "qwen2.5-1.5b": 1_543_714_304, "qwen3-1.7b": 1_720_574_976,
    "r1-distill-qwen-1.5b": 1_777_088_000, "r1-distill-qwen-7b": 7_615_616_512,
}  # fmt: skip
SLICES = {
    "qwen2.5-0.5b": ("1x80", "1x80"), "qwen2.5-1.5b": ("2x80", "1x80"), "qwen3-1.7b": ("4x80", "1x80"),
    "r1-distill-qwen-1.5b": ("4x80", "1x80"), "r1-distill-qwen-7b": ("8x80", "1x80"),
}  # fmt: skip
"""What the presets' docstrings state: the trainer's devices, and those of one sampler."""


def preset_with_shape(name, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(SHAPES[name]))
    config = presets.get_config(name)
    config.model.path = str(tmp_path)
    return config


@pytest.mark.parametrize("name", SHAPES)
def test_a_preset_fits_the_slice_that_it_states_in_about_the_memory_that_it_states(name, tmp_path):
    plans = plan.make_plan(preset_with_shape(name, tmp_path), *map(plan.parse_slice, SLICES[name]))
    assert plans[0].parameters == PARAMETERS[name]
    assert "it fits" in plan.report(plans, share_devices=False)
    stated = presets.PRESETS[name].__doc__
    for p in plans:
        assert f"about {round(p.total / plan.GIB)} GiB" in stated, (p.role, p.total / plan.GIB)


def test_what_cannot_fit_is_refused_with_the_largest_part_and_the_remedy(tmp_path):
    config = preset_with_shape("r1-distill-qwen-7b", tmp_path)
    config.trainer.micro_batch_rows = 8
    with pytest.raises(UserError) as error:
        plan.report(plan.make_plan(config, plan.Slice(1, 80 * plan.GIB), plan.Slice(1, 80 * plan.GIB)), False)
    for words in (
        "parameters: 7,615,616,512",
        "the trainer would need",
        "'optimizer state (float32)'",
        "mesh.trainer.fsdp",
    ):
        assert words in str(error.value)
    with pytest.raises(UserError, match="slots is 24 and the sampler's mesh has data x fsdp = 5"):
        plan.make_plan(config, plan.Slice(4, plan.GIB), plan.Slice(5, plan.GIB))
    config.mesh.sampler.tensor = 8
    config.mesh.sampler.data = 1
    with pytest.raises(UserError, match="tensor is 8 and does not divide the model's heads = 28"):
        plan.make_plan(config, plan.Slice(4, plan.GIB), plan.Slice(8, plan.GIB))


def test_state_is_counted_exactly_over_the_shards():
    config = default.get_config()
    config.mesh.trainer.update({"data": 1, "fsdp": 2, "tensor": 2})
    made = plan.make_plan(config, plan.Slice(4, plan.GIB, is_cpu=True), plan.Slice(1, plan.GIB, is_cpu=True))[0]
    policy = build.find_policy(config)
    from areal_jax import sharding

    mesh = sharding.make_mesh({"data": 1, "fsdp": 2, "tensor": 2}, jax.devices()[:4])
    model = build.model_on(mesh, config, "trainer", policy.config, on_cpu=True)
    params = model.init_params(0)
    on_first = sum(s.data.nbytes for x in jax.tree.leaves(params) for s in x.addressable_shards if s.device.id == 0)
    assert made.items["parameters (float32)"] == on_first
    assert made.items["optimizer state (float32)"] == 2 * on_first
    (gate,) = [line for line in made.layout if line.startswith("layers.*.mlp.gate")]
    assert gate.split("  ")[-1].strip() == "2 x 32.0 KiB"
    assert "128 x 256" in gate
    assert "128: fsdp, 256: tensor" in gate
    (odd,) = [line for line in made.layout if line.startswith("embedding")]
    assert "17 x 128" in odd
    assert "128: fsdp " in odd  # 17 tokens are not split over tensor 2
    config.optimizer.first_moment_dtype = "bfloat16"
    made = plan.make_plan(config, plan.Slice(4, plan.GIB, is_cpu=True), plan.Slice(1, plan.GIB, is_cpu=True))[0]
    assert made.items["optimizer state (bfloat16, float32)"] == 1.5 * on_first


def test_colocated_counts_the_trainers_model():
    config = default.get_config()
    apart = plan.make_plan(config, plan.Slice(1, plan.GIB), plan.Slice(1, plan.GIB))
    together = plan.make_plan(config, plan.Slice(1, plan.GIB), plan.Slice(1, plan.GIB), colocated=True)
    state = apart[0].items["parameters (float32)"]
    assert together[0] == apart[0]
    assert together[1].items["parameters, 3 versions"] == 3 * state
    assert apart[1].items["parameters, 3 versions"] < 3 * state  # bfloat16, on what is no CPU
    assert "both roles on the same devices" in plan.report(together, share_devices=True)


@pytest.mark.parametrize(("rows", "length"), [(4, 128), (1, 512), (8, 64)])
def test_activations_are_near_what_xla_reserves(rows, length):
    """The estimate covers the compiled update's temporary memory, and not more than twice it."""
    config = TransformerConfig(
        vocab_size=3000, layers=4, d_model=128, heads=8, kv_heads=2, head_dim=16, d_ff=512, remat="none"
    )
    model = build_model(config, one_device_mesh())
    batch, _ = packing.pack([], packing.PackingConfig(length, rows, length), 2)
    step = train_step.StepConfig(resolve(LossConfig("ppo")))
    programs = train_step.compile_programs(model, make_optimizer(OptimizerConfig()), step, batch)
    state = 4 * model.parameter_count()
    reserved = programs.executable.memory_analysis().temp_size_in_bytes
    logits = rows * train_step.logprob_columns(0, rows, length) * 3000 * plan.LOGIT_BYTES
    estimate = 2 * state + plan.activation_bytes(config, rows, length, 1) + logits
    assert 0.8 * reserved < estimate < 2 * reserved, (estimate, reserved)


def test_a_critic_and_a_reference_are_counted():
    config = default.get_config()
    plain = plan.make_plan(config, plan.Slice(1, plan.GIB), plan.Slice(1, plan.GIB))[0]
    config.loss.kl_coefficient = 0.1
    config.critic.kind, config.advantage.name = "network", "gae"
    more = plan.make_plan(config, plan.Slice(1, plan.GIB), plan.Slice(1, plan.GIB))[0]
    state = plain.items["parameters (float32)"]
    added = {k: v for k, v in more.items.items() if k not in plain.items}
    assert added["reference's parameters (float32)"] == state
    head = 4 * config.model.d_model * build.find_model(config)[1].vocab_size
    assert added["critic: parameters, optimizer, gradients"] == 5 * (state - head)
    assert more.total == plain.total + sum(added.values())


def test_rematerialisation_and_blocks_lower_the_estimate():
    config = TransformerConfig(vocab_size=3000, layers=24, d_model=512, heads=8, kv_heads=2, head_dim=64, d_ff=2048)
    sizes = {
        remat: plan.activation_bytes(dataclasses.replace(config, remat=remat), 1, 4096, 1)
        for remat in ("none", "dots", "full")
    }
    assert sizes["none"] > sizes["dots"] > sizes["full"]


def test_dry_run_reads_no_weights_and_leaves_nothing(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(SHAPES["qwen2.5-0.5b"]))
    arguments = ["--config=configs/math.py:qwen2.5-0.5b", f"--config.model.path={tmp_path / 'model'}", "--dry_run"]
    workdir = f"--config.workdir={tmp_path / 'run'}"
    done = run_main(*arguments, workdir, "--trainer_slice=1x80", "--sampler_slice=1x80")
    assert done.returncode == 0, done.stderr
    for words in (
        "parameters: 494,032,768",
        "trainer: 1 device(s) of 80.00 GiB, mesh data 1 x fsdp 1 x tensor 1",
        "it fits",
    ):
        assert words in done.stdout
    assert not (tmp_path / "run").exists()
    refused = run_main(*arguments, "--trainer_slice=1x8", "--sampler_slice=1x80")
    assert refused.returncode == 1
    assert "the trainer would need more" in refused.stderr
    assert run_main(*arguments, "--trainer_slice=huge").stderr.endswith("expected DEVICESxGIB, such as 8x80\n")


@pytest.mark.parametrize("changes", [{}, {"rollout.cache": "paged"}, {"rollout.prefill_tokens": 64}])
def test_the_sampler_s_plan_covers_what_its_programs_take(changes):
    """XLA's own figures for the largest program beside the buffers, and the buffers themselves."""
    config = default.get_config()
    with config.unlocked():
        config.update_from_flattened_dict({"rollout.slots": 16, **changes})
    policy = build.find_policy(config)
    model = build.model_on(one_device_mesh(), config, "sampler", policy.config, on_cpu=True)
    program = build.make_sampling_program(config, model, policy)
    state = empty_state(model, program.config, 0)
    made = plan.make_plan(config, plan.Slice(1, plan.GIB, True), plan.Slice(1, plan.GIB, True))[1].items
    cache = next(size for name, size in made.items() if name.startswith("keys and values"))
    held = sum(x.nbytes for x in jax.tree.leaves((state.cache.layers, state.tokens, state.logprobs, state.versions)))
    assert cache == held
    rows = program.config.row_ladder[-1]
    nothing = program.config.padded([], rows)
    compiled = [program.decode.lower(model.abstract_params, state, None, np.int32(0), np.int32(0)).compile()]
    for length in (n for n in program.config.length_ladder if program.config.fits(rows, n)):
        compiled.append(program.refill.lower(model.abstract_params, state, nothing, length).compile())
    if program.config.max_length > program.config.longest_refill:
        compiled.append(program.extend.lower(model.abstract_params, state, nothing[:1], np.int32(0)).compile())
    taken = max(c.memory_analysis().temp_size_in_bytes for c in compiled)
    assert taken < 2 * made["prefill or decode step"] + (1 << 20)
