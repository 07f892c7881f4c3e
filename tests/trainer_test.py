"""The train step: equal on every mesh and split, and its gradient equal to a plain one."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from areal_jax import sharding
from areal_jax.data import packing
from areal_jax.rl.losses import LossConfig, resolve
from areal_jax.trainer import train_step
from areal_jax.trainer.checkpoint import Checkpoints
from areal_jax.trainer.optimizer import OptimizerConfig, learning_rate, make_optimizer
from areal_jax.types import Targets, TrainBatch
from tests.helpers import TINY, tiny_model, trajectory

RNG = np.random.default_rng(0)
BATCH = [trajectory(i, 2 + i % 3, 3 + i % 7, RNG) for i in range(24)]
ADVANTAGES = RNG.standard_normal(24).astype(np.float32)
PLAIN = optax.chain(optax.scale(-1.0))  # the parameters' change is the gradient itself


def packed(row_length=32, rows=8, batch=BATCH, advantages=ADVANTAGES, halvings=0):
    """(batch, its advantages)."""
    config = packing.PackingConfig(row_length, rows, 16, halvings)
    found, layout = packing.pack(batch, config, config.max_micro_batches(len(batch)))
    return found, layout.spread([a * t.loss_mask for a, t in zip(advantages, batch, strict=True)])


def step(mesh_shape=(1,), batch=None, optimizer=PLAIN, loss="decoupled_ppo", model_config=TINY, **options):
    """(proximal log-probs, parameters after one update, sums), on the host."""
    devices = jax.devices()[: int(np.prod(mesh_shape))]
    mesh = sharding.make_mesh(dict(zip(sharding.MESH_AXES, mesh_shape, strict=False)), devices)
    model = tiny_model(model_config, mesh)
    batch, advantages = packed() if batch is None else batch
    halvings = int(np.max(batch.halvings))
    config = train_step.StepConfig(resolve(LossConfig(loss, **options)), halvings=halvings)
    programs = train_step.compile_programs(model, optimizer, config, batch)
    state = train_step.init_state(model.init_params(0), model, optimizer)
    placed = train_step.place(batch, model)
    proximal = programs.before(state, placed).logprobs
    targets = train_step.place_targets(Targets(advantages, proximal), model)
    shardings = jax.tree.map(lambda x: x.sharding, state)
    version, rate = train_step.scalar(2, np.int32, model), train_step.scalar(0.1, np.float32, model)
    state, sums = programs.update(state, placed, targets, version, train_step.Rates(rate, rate))
    assert jax.tree.map(lambda x: x.sharding, state) == shardings
    return jax.device_get((proximal, state.params, sums))


@functools.cache
def on_one_device():
    return step()


def assert_close(a, b, rtol=1e-5, at_least=1e-3):
    """at_least: the size of an array that rounding is measured against, if the array itself is smaller."""
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_allclose(x, y, rtol=rtol, atol=rtol * max(at_least, float(np.abs(y).max())))


def assert_steps_close(a, b, rtol=1e-5):
    """Of `step`: log-probs, parameters and sums, some of which (p against theta) are nothing but rounding."""
    assert_close(a[:2], b[:2], rtol)
    assert_close(a[2], b[2], rtol, at_least=1.0)


@pytest.mark.parametrize("mesh_shape", [(8,), (2, 4), (2, 2, 2), (1, 1, 1, 2), (2, 1, 2, 2)])
def test_every_mesh_equals_one_device(mesh_shape):
    assert_steps_close(step(mesh_shape), on_one_device())


def test_a_mesh_with_adam_equals_one_device():
    """Adam's first update is near the sign of the gradient, so that rounding shows: a looser bound."""
    optimizer = make_optimizer(OptimizerConfig(eps=1e-3))
    assert_steps_close(step((2, 2, 2), optimizer=optimizer), step(optimizer=optimizer), rtol=1e-4)


def test_the_split_into_micro_batches_and_the_order_change_nothing():
    """With a transformer; `invariance_test` has every objective."""
    whole = step(batch=packed(rows=16))
    order = np.random.default_rng(1).permutation(24)
    shuffled = packed(row_length=16, rows=2, batch=[BATCH[i] for i in order], advantages=ADVANTAGES[order])
    assert int(shuffled[0].micro_batches) > 5
    split = step(batch=shuffled)
    assert_close(split[1], whole[1])
    for key in ("tokens", "loss", "entropy", "w", "max_w", "clip_low"):
        np.testing.assert_allclose(split[2][key], whole[2][key], rtol=1e-5)


@pytest.mark.parametrize("mesh_shape", [(1,), (2, 2), (2, 1, 1, 2)])
def test_rows_that_are_cut_into_parts_change_nothing(mesh_shape):
    batch, advantages = packed(row_length=24, rows=4, halvings=1)
    assert set(batch.halvings[: int(batch.micro_batches)]) == {0, 1}
    cut = step(mesh_shape, batch=(batch, advantages))
    whole = on_one_device()
    assert_close(cut[1], whole[1])
    np.testing.assert_allclose(cut[2]["loss"], whole[2]["loss"], rtol=1e-5)


def test_more_sequences_than_a_part_has_tokens_keep_their_sums():
    """Segments count from 1 in each part: 24 sequences of 4 tokens, in parts of 8."""
    rng = np.random.default_rng(0)
    short = [trajectory(i, 1, 3, rng) for i in range(24)]
    found = []
    for halvings in (0, 3):
        batch, advantages = packed(row_length=64, rows=2, batch=short, halvings=halvings)
        assert int(batch.halvings[0]) == halvings
        assert int(batch.segment_ids.max()) > 8
        found.append(step(batch=(batch, advantages), aggregation="seq_mean_token_mean"))
    assert_close(found[1][1], found[0][1])
    np.testing.assert_allclose(found[1][2]["objective"], found[0][2]["objective"], rtol=1e-5)


def test_the_gradient_equals_that_of_separate_padded_sequences():
    """No packing, no loop: one row a sequence, plain autodiff of the mean over tokens."""
    model = tiny_model()
    params = model.init_params(0)
    shape = packing.PackingConfig(16, 1, 16)
    single = [packing.pack([t], shape, 1)[0] for t in BATCH]
    rows = dataclasses.replace(single[0], **{f: np.concatenate([getattr(b, f)[0] for b in single]) for f in FIELDS})
    advantages = ADVANTAGES[:, None] * rows.loss_mask

    def mean_loss(p):
        policy = model.bind(p)
        logits = jax.nn.log_softmax(policy.logits(policy(rows.tokens, rows.positions, jnp.ones_like(rows.tokens))))
        predicted = jnp.take_along_axis(logits[:, :-1], rows.tokens[:, 1:, None], -1)[..., 0]
        logprobs = jnp.pad(predicted, ((0, 0), (1, 0)))
        entropy = jnp.pad(-jnp.sum(jnp.exp(logits) * logits, -1)[:, :-1], ((0, 0), (1, 0)))
        proximal = jax.lax.stop_gradient(logprobs)
        weight = jnp.minimum(jnp.exp(proximal - rows.behaviour_logprobs), 5.0)
        surrogate = -weight * jnp.exp(logprobs - proximal) * advantages  # every ratio is 1: nothing is clipped
        return jnp.sum((surrogate - 0.01 * entropy) * rows.loss_mask) / rows.loss_mask.sum()

    expected = jax.jit(lambda p: jax.tree.map(lambda x, g: x - 0.1 * g, p, jax.grad(mean_loss)(p)))(params)
    _, got, _ = step(entropy_coefficient=0.01)
    assert_close(got, jax.device_get(expected))


FIELDS = [f.name for f in dataclasses.fields(TrainBatch) if f.name not in train_step.WHOLE]


def test_poison_in_masked_and_padded_positions_changes_no_bit():
    clean, advantages = packed()
    mask = np.asarray(clean.loss_mask) > 0
    poisoned = np.where(mask, clean.behaviour_logprobs, np.nan).astype(np.float32)
    dirty = dataclasses.replace(clean, behaviour_logprobs=poisoned)
    _, a, sums_a = on_one_device()
    _, b, sums_b = step(batch=(dirty, np.where(mask, advantages, np.inf).astype(np.float32)))
    jax.tree.map(np.testing.assert_array_equal, a, b)
    jax.tree.map(np.testing.assert_array_equal, sums_a, sums_b)


def test_an_empty_batch_changes_nothing():
    empty, layout = packing.pack([], packing.PackingConfig(32, 8, 16), 2)
    _, after, sums = step(batch=(empty, layout.spread([])))
    jax.tree.map(np.testing.assert_array_equal, after, jax.device_get(tiny_model().init_params(0)))
    assert sums["tokens"].sum() == 0


def test_proximal_log_probs_are_those_of_the_parameters_before_the_step():
    proximal, _, sums = on_one_device()
    batch, _ = packed()
    used = np.asarray(batch.loss_mask) > 0
    w = np.exp(np.clip(proximal - batch.behaviour_logprobs, -20, 20))[used]
    np.testing.assert_allclose(sums["w"].sum(), w.sum(), rtol=1e-5)
    np.testing.assert_allclose(sums["max_w"], w.max(), rtol=1e-5)
    np.testing.assert_allclose(sums["behaviour_k1"].sum(), (batch.behaviour_logprobs - proximal)[used].sum(), rtol=1e-4)


def test_the_staleness_of_a_token_is_that_of_its_own_version():
    """Versions [-1, -1, 3, 3, 4, 4, 5] at version 5, packed behind another sequence."""
    versions = np.array([-1, -1, 3, 3, 4, 4, 5], np.int32)
    mixed = trajectory(0, 2, 5, RNG, policy_versions=versions)
    other = trajectory(1, 3, 9, RNG)
    batch, layout = packing.pack([mixed, other], packing.PackingConfig(32, 1, 16), 1)
    x = train_step.token_inputs(batch, Targets(np.zeros_like(batch.loss_mask)), 0.0, jnp.int32(5), 0.0)
    assert layout.gather(x.staleness)[0].tolist() == [0, 0, 2, 2, 1, 1, 0]
    assert layout.gather(x.staleness)[1].tolist() == [0] * 3 + [5] * 9
    np.testing.assert_array_equal(layout.gather(x.behaviour_logprobs)[0], mixed.behaviour_logprobs)


def test_an_optimizer_state_in_the_hosts_memory_changes_nothing():
    """What is kept between steps lies there, and a second step starts from it."""
    model, optimizer = tiny_model(), make_optimizer(OptimizerConfig())
    batch, advantages = packed()
    found = {}
    for offload in (False, True):
        config = train_step.StepConfig(resolve(LossConfig("ppo")), offload=offload)
        programs = train_step.compile_programs(model, optimizer, config, batch)
        state = train_step.init_state(model.init_params(0), model, optimizer, offload=offload)
        for step in (2, 3):
            targets = train_step.place_targets(Targets(advantages), model)
            version, rate = train_step.scalar(step, np.int32, model), train_step.scalar(0.1, np.float32, model)
            rates = train_step.Rates(rate, rate)
            state, _ = programs.update(state, train_step.place(batch, model), targets, version, rates)
            (moments,) = [s for s in state.opt_state if isinstance(s, optax.ScaleByAdamState)]
            kinds = {x.sharding.memory_kind for x in jax.tree.leaves((moments.mu, moments.nu))}
            assert kinds == {"pinned_host" if offload else "device"}
        found[offload] = jax.device_get(state)
    jax.tree.map(np.testing.assert_array_equal, found[True], found[False])


def test_weight_decay_is_for_matrices_and_clipping_is_by_global_norm():
    params = {"w": jnp.ones((2, 2)), "scale": jnp.ones(2), "embedding": jnp.ones((2, 2)), "q_bias": jnp.ones((2, 2))}
    optimizer = make_optimizer(OptimizerConfig(weight_decay=0.5, vocabulary_weight_decay=0.25))
    state = optimizer.init(params)
    zero = jax.tree.map(jnp.zeros_like, params)
    direction, _ = optimizer.update(zero, state, params)
    np.testing.assert_allclose(direction["w"], -0.5)
    np.testing.assert_allclose(direction["scale"], 0)
    np.testing.assert_allclose(direction["q_bias"], 0)
    np.testing.assert_allclose(direction["embedding"], -0.25)
    # Adam's first moment of a gradient of norm 10 clipped to norm 1 is (1 - b1) times a tenth of it
    _, state = optimizer.update(zero | {"w": jnp.full((2, 2), 5.0)}, state, params)
    (moments,) = [s for s in state if isinstance(s, optax.ScaleByAdamState)]
    np.testing.assert_allclose(moments.mu["w"], 0.1 * 0.5, rtol=1e-5)


def test_learning_rate_by_hand():
    assert learning_rate(0, 10, 1.0, 0.0, 2) == 0.5
    assert learning_rate(2, 10, 1.0, 0.0, 2) == 1.0
    assert learning_rate(9, 10, 1.0, 0.2, 2) == pytest.approx(0.2)
    assert learning_rate(4, 9, 1.0, 0.0, 0) == pytest.approx(0.5)
    assert learning_rate(0, 1, 1.0, 1.0, 0) == 1.0
    assert learning_rate(3, 9, 1.0, 0.2, 1, "linear") == pytest.approx(0.2 + 0.8 * (1 - 2 / 7))
    assert learning_rate(8, 9, 1.0, 0.2, 1, "linear") == pytest.approx(0.2)
    assert [learning_rate(i, 9, 1.0, 0.2, 1, "constant") for i in (1, 8)] == [1.0, 1.0]


def test_a_checkpoint_restores_state_and_books(tmp_path):
    model, optimizer = tiny_model(), make_optimizer(OptimizerConfig())
    state = train_step.init_state(model.init_params(0), model, optimizer)
    checkpoints = Checkpoints(tmp_path)
    for version in (1, 2, 3):
        checkpoints.save(version, state, {"n": version})
    assert checkpoints.versions() == [2, 3]
    like = train_step.init_state(model.init_params(1), model, optimizer)
    restored, books = checkpoints.restore(3, like)
    assert books == {"n": 3}
    assert jax.tree.structure(restored) == jax.tree.structure(state)
    jax.tree.map(np.testing.assert_array_equal, restored, state)
