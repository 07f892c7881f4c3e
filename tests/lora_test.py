"""Adapters of low rank: exact where they begin, alone in what is trained and sent, and whole in what is exported."""

import dataclasses
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from safetensors.numpy import load_file

from areal_jax import build, plan, sharding
from areal_jax.config import refuse_idle_overrides, validate
from areal_jax.metrics import read_metrics
from areal_jax.models.critic import build_critic
from areal_jax.models.linear import PROJECTIONS, LoraConfig, merge_adapters
from areal_jax.models.transformer import build_model
from areal_jax.rl.losses import LossConfig, resolve
from areal_jax.trainer import train_step
from areal_jax.trainer.checkpoint import Checkpoints
from areal_jax.trainer.optimizer import OptimizerConfig, make_optimizer
from areal_jax.transport.weights import MemoryChannel, OrbaxChannel, PartChannel, VersionGone
from areal_jax.types import PolicySnapshot, Targets, UserError
from configs import default
from tests.end_to_end_test import flatten, parameters
from tests.helpers import TINY, one_device_mesh, run_main, tiny_model
from tests.models_test import forward, random_params
from tests.pretrained_test import assert_refused, numbers, paths, pretrained_params, run_export, source  # noqa: F401
from tests.trainer_test import PLAIN, assert_close, packed

LORA = LoraConfig(4, 8.0, tuple(PROJECTIONS))
CONFIG = dataclasses.replace(TINY, lora=LORA)
TOKENS = np.arange(24).reshape(2, 12) % 17
INPUTS = (TOKENS, np.broadcast_to(np.arange(12), (2, 12)), np.ones((2, 12), int))


def size(tree):
    return sum(x.size for x in jax.tree.leaves(tree))


def update(model, params, optimizer=PLAIN, **options):
    """The state after one update at rate .1, and the programs."""
    batch, advantages = packed()
    config = train_step.StepConfig(resolve(LossConfig("ppo")), **options)
    programs = train_step.compile_programs(model, optimizer, config, batch)
    state = train_step.init_state(params, model, optimizer)
    targets = train_step.place_targets(Targets(advantages), model)
    version, rate = train_step.scalar(2, np.int32, model), train_step.scalar(0.1, np.float32, model)
    state, _ = programs.update(state, train_step.place(batch, model), targets, version, train_step.Rates(rate, rate))
    return state, programs


def adapted():
    """A model with adapters, all of whose parameters are random."""
    model = tiny_model(CONFIG)
    return model, random_params(model)


def test_fresh_adapters_change_nothing_and_the_base_is_that_of_a_model_without():
    plain, model = tiny_model(), tiny_model(CONFIG)
    base = plain.init_params(3)
    params = model.adapt(base, seed=3)
    np.testing.assert_allclose(forward(model, params, *INPUTS), forward(plain, base, *INPUTS), atol=1e-5)
    jax.tree.map(np.testing.assert_array_equal, params, model.init_params(3))
    assert any(np.any(x) for x in jax.tree.leaves(model.split(params)[1]))  # A is not zero: B has a gradient


def test_merged_weights_compute_what_the_adapters_do():
    model, params = adapted()
    merged = merge_adapters(*model.split(params), LORA)
    logits = forward(model, params, *INPUTS)
    np.testing.assert_allclose(logits, forward(tiny_model(), merged, *INPUTS), atol=1e-5 * np.abs(logits).max())
    without = forward(tiny_model(), model.split(params)[0], *INPUTS)
    assert np.abs(logits - without).max() > 0.1


def test_only_the_named_projections_have_adapters():
    model = tiny_model(dataclasses.replace(TINY, lora=dataclasses.replace(LORA, target_modules=("v_proj", "o_proj"))))
    names = {path[-2] for path in flatten(model.split(model.abstract_params)[1])}
    assert names == {"v_lora", "o_lora"}


def test_an_update_changes_every_adapter_and_nothing_else():
    model, params = adapted()
    before = jax.device_get(params)
    optimizer = make_optimizer(OptimizerConfig())
    state, programs = update(model, params, optimizer)
    frozen, trained = model.split(before)
    jax.tree.map(np.testing.assert_array_equal, state.frozen, frozen)
    for old, new in zip(jax.tree.leaves(trained), jax.tree.leaves(state.params), strict=True):
        assert np.abs(old - new).max() > 0
    assert size(state.opt_state) == 2 * size(trained) + 1  # Adam's moments and its count
    sizes = programs.executable.memory_analysis()
    changing = 4 * (3 * size(trained) + 1)  # bytes
    assert sizes.alias_size_in_bytes == changing  # donated; what is frozen is neither
    assert changing <= sizes.output_size_in_bytes < changing + 4 * size(frozen)


def test_the_gradient_of_the_adapters_is_that_of_the_merged_weights_projected():
    """W + s A B: the gradient of A is s G B^T and that of B is s A^T G, for the gradient G of the merged weights."""
    model, params = adapted()
    merged = jax.device_get(merge_adapters(*model.split(params), LORA))
    before = flatten(jax.device_get(model.split(params)[1]))
    state, _ = update(model, params)
    full, _ = update(tiny_model(), jax.tree.map(jnp.asarray, merged))
    after = flatten(jax.device_get(state.params))
    weights_after, weights_before = flatten(jax.device_get(full.params)), flatten(merged)
    for path in {p[:-1] for p in before}:
        a, b = before[*path, "a"], before[*path, "b"]
        weights = (*path[:-1], path[-1].removesuffix("_lora"))
        rank = a.shape[-1]
        g = (weights_after[weights] - weights_before[weights]).reshape(a.size // rank, -1)
        of_a, of_b = LORA.scale * g @ b.reshape(rank, -1).T, LORA.scale * a.reshape(-1, rank).T @ g
        assert_close(after[*path, "a"] - a, of_a.reshape(a.shape), rtol=1e-3)  # differences of rounded numbers
        assert_close(after[*path, "b"] - b, of_b.reshape(b.shape), rtol=1e-3)


@pytest.mark.parametrize("options", [{}, {"scan_layers": True, "remat": "full"}])
def test_a_mesh_equals_one_device(options):
    config = dataclasses.replace(CONFIG, **options)
    mesh = sharding.make_mesh({"data": 2, "fsdp": 2, "tensor": 2})
    found = []
    for model in (build_model(config, mesh), tiny_model(CONFIG)):
        params = jax.device_put(jax.device_get(adapted()[1]), jax.tree.map(lambda x: x.sharding, model.abstract_params))
        found.append(jax.device_get(update(model, params)[0].params))
    assert_close(found[0], found[1])


def test_in_bfloat16_the_adapters_stay_float32():
    model = build_model(dataclasses.replace(CONFIG, compute_dtype="bfloat16"), one_device_mesh(), "bfloat16")
    frozen, trained = model.split(model.abstract_params)
    assert {x.dtype for x in jax.tree.leaves(trained)} == {jnp.dtype("float32")}
    assert frozen["embedding"].dtype == jnp.bfloat16
    base = tiny_model().init_params(0)  # as a warm start leaves it
    state, _ = update(model, model.adapt(base, 0), optax.sgd(1.0))
    assert state.frozen["embedding"].dtype == jnp.bfloat16
    for path, x in flatten(jax.device_get(state.params)).items():
        assert x.dtype == np.float32
        assert path[-1] == "a" or np.any(x), path  # B, which was zero, is trained


def test_a_critic_of_its_own_begins_with_the_layers_without_adapters():
    model, params = adapted()
    critic = build_critic(model, "network")
    backbone = critic.init_params(params)["backbone"]
    frozen = model.split(params)[0]
    jax.tree.map(np.testing.assert_array_equal, backbone, {k: frozen[k] for k in backbone})
    assert "head" not in backbone


@pytest.mark.parametrize("kind", ["memory", "orbax"])
def test_adapters_alone_travel_and_the_base_is_read_once(kind, tmp_path):
    model = tiny_model(CONFIG)
    params = {v: random_params(model, v) for v in range(2)}
    frozen = model.split(params[0])[0]
    inner, reads = MemoryChannel() if kind == "memory" else OrbaxChannel(tmp_path), []

    def read(abstract):
        assert jax.tree.structure(abstract) == jax.tree.structure(frozen)
        reads.append(abstract)
        return frozen

    channel = PartChannel(inner, model.split, model.join, read)
    for version, p in params.items():
        channel.publish(PolicySnapshot(version, model.split(p)[1]))
    for version, p in params.items():
        loaded = channel.load(version, model.abstract_params)
        assert loaded.version == version
        jax.tree.map(np.testing.assert_array_equal, loaded.params, model.join(frozen, model.split(p)[1]))
    assert len(reads) == 1
    frozen = jax.tree.map(lambda x: x + 1, frozen)  # of another run, with another base
    channel.forget()
    loaded = channel.load(1, model.abstract_params)
    jax.tree.map(np.testing.assert_array_equal, loaded.params, model.join(frozen, model.split(params[1])[1]))
    assert len(reads) == 2
    assert loaded.params["embedding"] is frozen["embedding"]
    trained = model.split(model.abstract_params)[1]
    sent = inner.load(1, trained).params
    assert size(sent) == size(trained) < size(frozen)


@pytest.mark.parametrize(("gone", "error"), [(False, ValueError), (True, VersionGone)])
def test_a_base_that_goes_while_it_is_read_goes_with_the_version(gone, error, tmp_path):
    """A trainer that starts anew removes the versions of its last run, then what their adapters were of."""
    model = tiny_model(CONFIG)
    weights = tmp_path / "weights"
    OrbaxChannel(weights).publish(PolicySnapshot(0, model.split(model.init_params(0))[1]))

    def read(abstract):
        if gone:
            OrbaxChannel(weights, fresh=True)
        raise ValueError("incomplete")

    channel = PartChannel(OrbaxChannel(weights, publishes=False), model.split, model.join, read)
    with pytest.raises(error):
        channel.load(0, model.abstract_params)


def test_the_plan_counts_optimizer_and_gradients_of_the_adapters_alone():
    config = default.get_config()
    config.model.lora.rank = 4
    gpu = plan.Slice(1, plan.GIB)
    warming = plan.make_plan(config, gpu, gpu)[0].total
    config.warm_start.enabled = False
    trainer, sampler = plan.make_plan(config, gpu, gpu)
    model = build.model_on(one_device_mesh(), config, "trainer", build.find_policy(config).config, on_cpu=False)
    frozen, trained = model.split(model.init_params(0))
    bytes_of = [sum(x.nbytes for x in jax.tree.leaves(t)) for t in (frozen, trained)]
    assert trainer.items["parameters under adapters (bfloat16)"] == bytes_of[0]
    assert trainer.items["adapters (float32)"] == bytes_of[1]
    assert trainer.items["optimizer state (float32)"] == 2 * bytes_of[1]
    assert trainer.items["gradients (sum and micro-batch, float32)"] == 2 * bytes_of[1]
    assert sampler.items["adapters, 3 versions"] == 3 * bytes_of[1]
    assert any(line.startswith("layers.*.attention.q_lora.a") for line in trainer.layout)
    assert warming > trainer.total  # the supervised stages before it train everything
    config.model.lora.rank, config.warm_start.enabled = 0, True
    assert warming == plan.make_plan(config, gpu, gpu)[0].total
    config.model.lora.rank = 4
    together = plan.make_plan(config, gpu, gpu, colocated=True)[1]
    assert "parameters under adapters, and those of the warm-up" not in together.items


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("rank", -1, "config.model.lora.rank is -1: expected at least 0"),
        ("alpha", 0.0, "config.model.lora.alpha is 0.0: expected more than 0"),
        ("target_modules", ("q_proj", "qkv"), "expected one or several of ('q_proj', 'k_proj'"),
        ("target_modules", (), "each once"),
    ],
)
def test_what_cannot_be_meant_is_refused(key, value, words):
    config = default.get_config()
    config.model.lora[key] = value
    with pytest.raises(UserError) as error:
        validate(config)
    assert words in str(error.value)


def test_keys_that_would_be_ignored_are_refused():
    config = default.get_config()
    with pytest.raises(UserError, match=r"model\.lora\.alpha.*read only with LoRA"):
        refuse_idle_overrides(config, {"model.lora.alpha": 16.0})
    config.model.lora.rank = 4
    refuse_idle_overrides(config, {"model.lora.alpha": 16.0})


# --- whole runs ---


OPTIONS = ("--config.model.lora.rank=4", "--config.model.lora.target_modules=('q_proj', 'o_proj', 'down_proj')")


@pytest.fixture(scope="module")
def finished(source, tmp_path_factory):  # noqa: F811
    """A pretrained model, adapted by a trainer and a sampler in processes of their own."""
    workdir = tmp_path_factory.mktemp("runs") / "run"
    changes = {
        "launch.kind": "local", "loss.kl_coefficient": 0.01, "trainer.minibatches": 1, "rollout.max_staleness": 0
    }  # fmt: skip
    done = run_main(
        "--config=tests/small_pretrained.py", f"--config.workdir={workdir}", *OPTIONS, *paths(source),
        *(f"--config.{key}={value}" for key, value in changes.items()),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return workdir


def test_a_run_trains_and_keeps_adapters_alone(finished, source):  # noqa: F811
    assert json.loads((finished / "summary.json").read_text())["compiles_after_warmup"] == 0
    steps = {r["version"]: r for r in read_metrics(finished) if r["kind"] == "step"}
    assert abs(steps[1]["loss/reference_kl"]) < 1e-6  # the reference is the model without adapters
    assert steps[3]["loss/reference_kl"] > 1e-4
    # the sampler has joined what the trainer has, at every version
    assert all(abs(r["behaviour_kl/k1"]) < 1e-5 for r in steps.values())
    names = {path[-2] for path in flatten(parameters(finished))}
    assert names == {"q_lora", "o_lora", "down_lora"}
    base = Checkpoints(finished / "checkpoints").restore_reference(pretrained_params(source))
    jax.tree.map(np.testing.assert_array_equal, base, pretrained_params(source))


def test_merged_and_separate_exports_say_the_same(finished, source, tmp_path):  # noqa: F811
    whole, apart = tmp_path / "whole", tmp_path / "apart"
    assert run_export(f"--workdir={finished}", f"--output={whole}").returncode == 0
    done = run_export(f"--workdir={finished}", f"--output={apart}", "--adapter")
    assert done.returncode == 0, done.stderr
    assert "has the adapters after step 3" in done.stdout
    described = json.loads((apart / "adapter_config.json").read_text())
    assert described["r"] == 4
    assert described["lora_alpha"] == 32.0
    assert described["target_modules"] == ["q_proj", "o_proj", "down_proj"]
    assert described["base_model_name_or_path"] == str(source)
    assert not (apart / "model.safetensors").exists()
    tensors, base = load_file(apart / "adapter_model.safetensors"), load_file(source / "model.safetensors")
    merged, changed = load_file(whole / "model.safetensors"), 0
    for name, weights in merged.items():
        theirs = f"base_model.model.{name.removesuffix('.weight')}"
        change = np.zeros(())
        if f"{theirs}.lora_A.weight" in tensors:
            change = 8.0 * tensors.pop(f"{theirs}.lora_B.weight") @ tensors.pop(f"{theirs}.lora_A.weight")
            changed += bool(np.abs(change).max() > 1e-6)
        np.testing.assert_allclose(weights, base[name] + change, atol=1e-6)
    assert not tensors
    assert changed == 3 * len({n.split(".")[2] for n in merged if n.startswith("model.layers.")})


def test_peft_loads_the_adapters(finished, source, tmp_path):  # noqa: F811
    torch, peft = pytest.importorskip("torch"), pytest.importorskip("peft")
    from transformers import AutoModelForCausalLM

    whole, apart = tmp_path / "whole", tmp_path / "apart"
    assert run_export(f"--workdir={finished}", f"--output={whole}").returncode == 0
    assert run_export(f"--workdir={finished}", f"--output={apart}", "--adapter").returncode == 0
    tokens = torch.arange(3, 19)[None]
    base = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    merged = AutoModelForCausalLM.from_pretrained(whole, dtype=torch.float32)
    with torch.no_grad():
        without = base(tokens).logits
        expected = merged(tokens).logits
        found = peft.PeftModel.from_pretrained(base, apart)(tokens).logits
    np.testing.assert_allclose(found, expected, atol=1e-5 * float(expected.abs().max()))
    assert float((found - without).abs().max()) > 1e-2


def test_a_run_in_one_process_goes_on_from_its_checkpoint(tmp_path):
    """With a new model, whose base is what its warm start made: the second half alone ends where the whole does."""
    options = (
        "--config=tests/small_config.py", f"--config.data.cache_dir={tmp_path}", "--config.launch.kind=colocated",
        "--config.model.lora.rank=2", "--config.rollout.max_staleness=0", "--config.evaluation.every_steps=0",
    )  # fmt: skip
    whole, half = tmp_path / "whole", tmp_path / "half"
    assert run_main(*options, f"--config.workdir={whole}").returncode == 0
    shutil.copytree(whole, half)
    shutil.rmtree(half / "checkpoints" / "3")
    (half / "summary.json").unlink()
    recorded = json.loads((half / "config.json").read_text())
    recorded["config"]["workdir"] = str(half)
    (half / "config.json").write_text(json.dumps(recorded))
    done = run_main(*options, f"--config.workdir={half}")
    assert done.returncode == 0, done.stderr
    assert "resuming after step 2" in done.stdout
    for x, y in zip(numbers(parameters(whole)), numbers(parameters(half)), strict=True):
        np.testing.assert_array_equal(x, y)
    assert_refused(run_export(f"--workdir={whole}", f"--output={tmp_path / 'x'}", "--adapter"), "are of a new model")
    assert run_export(f"--workdir={whole}", f"--output={tmp_path / 'merged'}").returncode == 0
    shutil.rmtree(whole / "checkpoints" / "reference")
    assert_refused(run_export(f"--workdir={whole}", f"--output={tmp_path / 'x'}"), "is gone, which the adapters")
    assert not (tmp_path / "x").exists()
