"""A training step as a whole: what runs before it, who is counted, penalties, the critic."""

import copy
import dataclasses
import functools
import re

import jax
import numpy as np
import pytest

from areal_jax import sharding
from areal_jax.compiles import CompileCounter
from areal_jax.learner import Learner
from areal_jax.rl import diagnostics
from areal_jax.rl.advantages import AdvantageConfig, estimate, group_norm
from areal_jax.rollout.admission import AdmissionGate
from areal_jax.rollout.groups import Intake
from areal_jax.trainer import train_step
from areal_jax.trainer.checkpoint import Checkpoints
from areal_jax.types import Targets, UserError
from configs import default
from tests.helpers import ROOT, TINY, tiny_model, trajectory

SAMPLES = 24
VERSION = 3


MODEL = tiny_model(dataclasses.replace(TINY, layers=1))


@functools.cache
def on_host(seed):
    return jax.device_get(MODEL.init_params(seed))


def fresh(seed):
    """Parameters of its own for every caller: a step takes those it is given."""
    return jax.device_put(on_host(seed), jax.tree.map(lambda x: x.sharding, MODEL.abstract_params))


def learner(**changes):
    return compiled(tuple(sorted(changes.items())))


@functools.cache
def compiled(changes):
    c = default.get_config()
    c.rollout.update({"max_prompt_length": 4, "max_response_length": 12, "group_size": 4})
    c.trainer.update({"batch_prompts": 6, "row_length": 32, "micro_batch_rows": 4, "minibatches": 1})
    c.update_from_flattened_dict(dict(changes))
    return Learner(c, MODEL)


def batch(version=VERSION, rewards=None, seed=0, **changes):
    rng = np.random.default_rng(seed)
    made = []
    for i in range(SAMPLES):
        t = trajectory(i, 2 + i % 3, 3 + i % 7, rng, **changes)
        stamped = np.where(t.policy_versions >= 0, version, -1).astype(np.int32)
        reward = t.reward if rewards is None else float(rewards[i])
        b = np.where(stamped >= 0, -2.8 + 0.1 * rng.standard_normal(len(stamped)), 0).astype(np.float32)
        made.append(dataclasses.replace(t, policy_versions=stamped, reward=reward, behaviour_logprobs=b))
    return made


def counted_forwards(made: Learner, samples):
    calls = []
    made = copy.copy(made)
    real = made.programs.before

    def before(state, packed):
        calls.append(packed)
        return real(state, packed)

    made.programs = made.programs._replace(before=before)
    made.step(made.init_state(fresh(0)), samples, VERSION)
    return len(calls)


def test_micro_batch_rows_are_those_of_one_device():
    c = default.get_config()
    mesh = sharding.make_mesh({"data": 2, "fsdp": 2, "tensor": 1}, jax.devices()[:4])
    made = Learner(c, tiny_model(dataclasses.replace(TINY, layers=1), mesh))
    assert made.empty_batch().tokens.shape[1:] == (4 * c.trainer.micro_batch_rows, c.trainer.row_length)


@pytest.mark.parametrize(
    ("changes", "version", "forwards"),
    [
        ({}, VERSION, 0),  # on policy, one minibatch: p could not differ from b
        ({}, VERSION - 1, 1),
        ({"trainer.minibatches": 3}, VERSION, 3),  # one for each minibatch: once for the batch
        ({"trainer.minibatches": 3}, VERSION - 1, 3),
        ({"loss.name": "ppo", "trainer.minibatches": 3}, VERSION - 1, 0),
        ({"loss.proximal": "loglinear"}, VERSION - 1, 0),
        ({"loss.proximal": "loglinear", "loss.proximal_check": True}, VERSION - 1, 1),
        ({"loss.name": "reinforce"}, VERSION - 1, 0),
        ({"loss.name": "reinforce", "loss.importance_weight": "clamp"}, VERSION - 1, 1),
        # what weighs or rejects by w alone needs to know it, also where the tokens are new
        ({"loss.name": "reinforce", "loss.importance_weight": "clamp"}, VERSION, 1),
        ({"loss.importance_weight": "mask"}, VERSION, 1),
        ({"critic.kind": "head", "advantage.name": "gae", "loss.name": "ppo"}, VERSION, 1),
    ],
)
def test_the_policy_before_the_step_is_run_only_when_something_reads_it(changes, version, forwards):
    assert counted_forwards(learner(**changes), batch(version)) == forwards


def test_on_policy_the_skipped_forward_changes_next_to_nothing():
    """With b as the policy itself recorded it, p = b and p recomputed are one up to rounding."""
    made = learner()
    state = made.init_state(fresh(0))
    samples = batch()
    part = made._pack(samples, VERSION)
    drawn = made.programs.before(state, part[0].batch).logprobs
    recorded = Learner._gather([drawn], part)
    samples = [
        dataclasses.replace(t, behaviour_logprobs=np.where(t.policy_versions >= 0, b, 0).astype(np.float32))
        for t, b in zip(samples, recorded, strict=True)
    ]
    params = jax.device_get(state.params)
    skipped, metrics = made.step(state, samples, VERSION)
    older = [dataclasses.replace(t, policy_versions=np.minimum(t.policy_versions, VERSION - 1)) for t in samples]
    state = made.init_state(jax.device_put(params))
    recomputed, _ = made.step(state, older, VERSION)
    assert metrics["importance/w_max"] == 1.0
    for a, b in zip(jax.tree.leaves(skipped.params), jax.tree.leaves(recomputed.params), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


def moved(made, samples, reference=None, version=VERSION):
    """(change of the policy's parameters in one step, metrics), the parameters as one vector."""
    after, metrics = made.step(made.init_state(fresh(0)), samples, version, reference)
    pairs = zip(jax.tree.leaves(after.params), jax.tree.leaves(on_host(0)), strict=True)
    return np.concatenate([(np.asarray(a) - b).ravel() for a, b in pairs]), metrics


def test_the_proximal_policy_is_that_before_the_first_minibatch():
    """Two updates by hand, p from the parameters before both: the Learner's step comes to the same."""
    options = {"trainer.minibatches": 2, "optimizer.learning_rate": 1e-2}
    made, samples = learner(**options), batch(VERSION - 1)
    state = made.init_state(fresh(0))
    parts = made._pack(samples, VERSION)
    proximal = [jax.device_get(made.programs.before(state, p.batch).logprobs) for p in parts]
    outcomes = made._outcomes(samples, VERSION, parts, [None, None], [None, None])
    advantages = group_norm(outcomes.rewards, outcomes.group_ids)
    one = train_step.scalar(made.learning_rate(VERSION), np.float32, MODEL)
    for part, p in zip(parts, proximal, strict=True):
        a = part.layout.spread([advantages[i] * samples[i].loss_mask for i in part.members])
        targets = train_step.place_targets(Targets(a, p), MODEL)
        version = train_step.scalar(VERSION, np.int32, MODEL)
        state, _ = made.programs.update(state, part.batch, targets, version, train_step.Rates(one, one))
    after, _ = made.step(made.init_state(fresh(0)), samples, VERSION)
    jax.tree.map(np.testing.assert_array_equal, after.params, state.params)


def test_the_effective_sample_size_scales_what_is_done():
    uneven = batch()
    rng = np.random.default_rng(0)
    for t in uneven:
        t.behaviour_logprobs[t.prompt_length :] += rng.normal()
    plain, _ = moved(learner(**{"loss.name": "ppo"}), uneven)
    scaled, metrics = moved(learner(**{"loss.name": "ppo", "optimizer.scale_by_ess": True}), uneven)
    assert 0 < metrics["optimizer/step_scale_min"] < 0.7
    np.testing.assert_allclose(scaled, plain * metrics["optimizer/step_scale_min"], atol=2e-7)
    assert metrics["optimizer/step_scale_min"] == pytest.approx(np.sqrt(metrics["importance/ess_sequence"]), rel=1e-5)


def test_the_critics_loss_is_a_mean_over_tokens_under_every_aggregation():
    changes = {}
    for how in ("token_mean", "seq_mean_token_sum", "constant"):
        made = learner(
            **{"critic.kind": "head", "advantage.name": "gae", "loss.name": "ppo", "loss.aggregation": how,
               "optimizer.max_grad_norm": 1e9, "trainer.diagnostics": False}
        )  # fmt: skip
        state = made.init_state(fresh(0))
        changes[how] = made.step(state, batch(), VERSION)[1]["optimizer/critic_grad_norm"]
    assert changes["seq_mean_token_sum"] == pytest.approx(changes["token_mean"], rel=1e-4)
    assert changes["constant"] == pytest.approx(changes["token_mean"], rel=1e-4)


def test_the_critic_is_fitted_to_returns_that_are_not_whitened():
    """At the first step the values are 0: with gamma = lambda = 1 each token's return is the reward."""
    options = {"critic.kind": "head", "advantage.name": "gae", "loss.name": "ppo"}
    seen = {}
    for whiten in (False, True):
        made = copy.copy(learner(**options, **{"advantage.whiten": whiten}))
        real = made.programs.update
        made.programs = made.programs._replace(
            update=lambda state, b, targets, *rest, w=whiten, real=real: (
                seen.__setitem__(w, jax.device_get(targets)),
                real(state, b, targets, *rest),
            )[1]
        )
        made.step(made.init_state(fresh(0)), batch(), VERSION)
    np.testing.assert_allclose(seen[True].returns, seen[False].returns)
    assert set(np.unique(seen[True].returns)) == {0.0, 1.0}
    counted = seen[True].advantages[seen[True].advantages != 0]
    assert counted.mean() == pytest.approx(0, abs=1e-5)
    assert counted.std() == pytest.approx(1, abs=1e-3)


def test_a_kl_in_the_reward_lowers_what_strays_from_the_reference():
    """All rewards equal, and a sampler surer of a sample than the reference is: that sample's advantage is negative."""
    samples = batch(rewards=np.ones(SAMPLES))
    samples[0] = dataclasses.replace(samples[0], behaviour_logprobs=samples[0].behaviour_logprobs * 0.1)
    made = learner(**{"reward.kl_coefficient": 0.1, "advantage.name": "dr_grpo"})
    parts = made._pack(samples, VERSION)
    references = made._references(parts, fresh(7))
    outcomes = made._outcomes(samples, VERSION, parts, [None], references)
    reference = Learner._gather(references, parts)[0]
    t = samples[0]
    expected = -0.1 * (t.behaviour_logprobs - reference) * t.loss_mask
    np.testing.assert_allclose(outcomes.token_rewards[0], expected, rtol=1e-5)
    assert outcomes.token_rewards[0].sum() < 0
    assert estimate(outcomes, AdvantageConfig("dr_grpo"))[0].min() < 0


def documented_metrics():
    """The names in the table of docs/algorithms.md, their braces expanded -> whether they are given by staleness."""

    def expand(name):
        match = re.search(r"\{([^{}]*)\}", name)
        if not match:
            return [name]
        return [x for option in match[1].split(",") for x in expand(name.replace(match[0], option, 1))]

    table = (ROOT / "docs" / "algorithms.md").read_text().split("## Diagnostics")[1]
    found = {}
    for line in table.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("| `"):
            found |= {x: cells[1] == "yes" for name in re.findall(r"`([^`]+)`", cells[0]) for x in expand(name)}
    return found


def test_the_documented_metrics_are_those_that_there_are():
    reference = fresh(7)
    given = Intake(1.0, "train", 0).metrics() | {"staleness/started_ahead": AdmissionGate(4, 1.0).take_ahead()}
    stale = batch(VERSION - 2)
    rewards = np.array([t.reward for t in stale])
    assert 0 < rewards.mean() < 1
    given |= diagnostics.staleness_metrics(stale, VERSION) | diagnostics.batch_metrics(stale)
    for changes in (
        {"loss.kl_coefficient": 0.1, "optimizer.scale_by_ess": True},
        {"critic.kind": "head", "advantage.name": "gae"},
        {"loss.proximal": "loglinear", "loss.proximal_check": True},
    ):
        given |= step_metrics(learner(**changes), stale, reference)
    buckets = {f"/{name}" for name in diagnostics.BUCKETS}
    by_staleness = {name.removesuffix("/d2") for name in given if name.endswith("/d2")} - {"staleness/fraction"}
    plain = {name for name in given if not any(name.endswith(b) for b in buckets)}
    documented = documented_metrics()
    elsewhere = {"tokens/trained", "packing/efficiency"}  # documented with the run's other metrics
    assert plain - elsewhere == documented.keys()
    assert by_staleness == {name for name, bucketed in documented.items() if bucketed}
    assert all(np.isfinite(v).all() for v in given.values())


def test_diagnostics_can_be_left_out():
    m = step_metrics(learner(), batch(VERSION - 2))
    plain = step_metrics(learner(**{"trainer.diagnostics": False}), batch(VERSION - 2))
    assert "policy/entropy" not in plain
    assert plain["loss/total"] == pytest.approx(m["loss/total"], rel=1e-5)


def step_metrics(made, samples, reference=None):
    return made.step(made.init_state(fresh(0)), samples, VERSION, reference)[1]


def test_zero_variance_groups_leave_the_denominator_when_dropped():
    rewards = np.tile([1, 0, 1, 0], 6)
    rewards[:8] = 1  # two of six groups all right
    kept = step_metrics(learner(), batch(rewards=rewards))
    dropped = step_metrics(learner(**{"rollout.zero_variance_groups": "drop"}), batch(rewards=rewards))
    tokens = [int(t.loss_mask.sum()) for t in batch(rewards=rewards)]
    assert kept["tokens/trained"] == sum(tokens)
    assert dropped["tokens/trained"] == sum(tokens[8:])
    ratio = sum(tokens) / sum(tokens[8:])
    assert dropped["optimizer/grad_norm"] == pytest.approx(kept["optimizer/grad_norm"] * ratio, rel=1e-4)


def test_a_step_with_nothing_to_learn_from_changes_no_bit():
    made = learner(**{"rollout.zero_variance_groups": "drop", "trainer.minibatches": 2})
    state = made.init_state(fresh(0))
    before = jax.device_get(state)
    after, metrics = made.step(state, batch(rewards=np.ones(SAMPLES)), VERSION)
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(after), before)
    assert metrics["tokens/trained"] == 0
    assert all(np.isfinite(v) for v in metrics.values())


def test_truncated_samples_inform_their_group_and_nothing_else():
    samples = batch(rewards=np.tile([1, 0, 0, 0], 6))
    samples = [dataclasses.replace(t, finish_reason="length") if t.reward else t for t in samples]
    m = step_metrics(learner(**{"reward.truncated": "mask"}), samples)
    assert m["tokens/trained"] == sum(t.loss_mask.sum() for t in samples if not t.reward)
    assert m["advantage/mean"] < 0  # of those that are left, against a baseline with the others in it


def test_a_kl_in_the_reward_and_in_the_loss():
    samples = batch(VERSION - 1)
    reference = fresh(7)
    plain = step_metrics(learner(), samples)
    for key in ("reward.kl_coefficient", "loss.kl_coefficient"):
        made = learner(**{key: 0.5, "advantage.name": "dr_grpo"})
        assert made.uses_reference
        with pytest.raises(ValueError, match="reference"):
            step_metrics(made, samples)
        m = step_metrics(made, samples, reference)
        assert m["optimizer/grad_norm"] != pytest.approx(plain["optimizer/grad_norm"], rel=1e-3)
    assert m["loss/reference_kl"] > 0
    own = step_metrics(learner(**{"loss.kl_coefficient": 0.5}), samples, fresh(0))
    assert own["loss/reference_kl"] == pytest.approx(0, abs=1e-6)  # to the policy itself
    assert own["optimizer/grad_norm"] == pytest.approx(plain["optimizer/grad_norm"], rel=1e-4)


@pytest.mark.parametrize("kind", ["head", "network"])
def test_the_critic_learns_what_the_returns_are(kind):
    """The reward is told by the first prompt token: explained variance must come to be high."""
    made = learner(
        **{"critic.kind": kind, "advantage.name": "gae", "critic.learning_rate": 1e-2, "critic.clip": 0.0,
           "loss.name": "ppo", "optimizer.learning_rate": 1e-3}
    )  # fmt: skip
    samples = [
        dataclasses.replace(t, tokens=np.concatenate([[3 + int(t.reward)], t.tokens[1:]]).astype(np.int32))
        for t in batch()
    ]
    state = made.init_state(fresh(0))
    history = []
    for _ in range(60):
        state, metrics = made.step(state, samples, VERSION)
        history.append(metrics)
    assert history[0]["value/mean"] == 0  # the head starts at zero: the first advantages are the rewards
    assert history[0]["loss/value"] == pytest.approx(
        np.average([t.reward**2 / 2 for t in samples], weights=[t.loss_mask.sum() for t in samples])
    )
    assert history[-1]["value/explained_variance"] > 0.5
    assert history[-1]["loss/value"] < 0.4 * history[0]["loss/value"]


def test_a_network_of_its_own_leaves_the_policy_alone():
    """The first step's advantages are the rewards (values 0): the policy moves as it does beside a head that cannot
    push it."""
    found = []
    for kind, coefficient in (("network", 0.5), ("head", 0.0), ("head", 0.5)):
        options = {"critic.kind": kind, "advantage.name": "gae", "critic.coefficient": coefficient}
        made = learner(**options, **{"trainer.diagnostics": False})
        state, _ = made.step(made.init_state(fresh(0)), batch(), VERSION)
        found.append(jax.device_get(state.params))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-7), found[0], found[1])
    # a head of zeros sends nothing back in the first step either
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-7), found[1], found[2])


def test_a_checkpoint_keeps_the_critic_and_the_reference(tmp_path):
    made = learner(**{"critic.kind": "network", "advantage.name": "gae"})
    state, _ = made.step(made.init_state(fresh(0)), batch(), VERSION)
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, state, {})
    restored, _ = checkpoints.restore(1, made.init_state(fresh(5)))
    jax.tree.map(np.testing.assert_array_equal, restored, state)
    checkpoints.save_reference(state.params)
    found = checkpoints.restore_reference(made.model.abstract_params)
    jax.tree.map(np.testing.assert_array_equal, found, state.params)
    assert checkpoints.versions() == [1]


def test_nothing_compiles_after_the_first_step_whatever_the_lengths():
    c = default.get_config()
    c.rollout.update({"max_prompt_length": 4, "max_response_length": 12, "group_size": 4})
    c.trainer.update({"batch_prompts": 6, "row_length": 32, "micro_batch_rows": 4, "row_halvings": 1})
    made, counter = Learner(c, MODEL), CompileCounter()
    state, rng, shapes = made.init_state(fresh(0)), np.random.default_rng(0), set()
    for version in range(51):
        most = int(rng.integers(2, 13))
        samples = [trajectory(i, int(rng.integers(1, 5)), int(rng.integers(1, most + 1)), rng) for i in range(24)]
        state, metrics = made.step(state, samples, version)
        shapes.add(metrics["packing/efficiency"])
        if version == 0:
            counter.warm()
    assert counter.after_warmup == 0
    assert len(shapes) > 40


def test_an_update_that_is_not_finite_is_left_out_and_too_many_end_the_run(tmp_path):
    c = default.get_config()
    c.rollout.update({"max_prompt_length": 4, "max_response_length": 12, "group_size": 4})
    c.trainer.update({"batch_prompts": 6, "row_length": 32, "micro_batch_rows": 4, "minibatches": 1})
    c.optimizer.max_skipped = 1
    made, bad = Learner(c, MODEL, dumps=tmp_path), batch()
    bad[0].behaviour_logprobs[-1] = np.nan
    state = made.init_state(fresh(0))
    before = jax.device_get(state)
    for _ in range(2):  # only what is skipped in a row counts
        state, metrics = made.step(state, bad, VERSION)
        assert metrics["optimizer/skipped_updates"] == 1
        jax.tree.map(np.testing.assert_array_equal, before, state)
        state, metrics = made.step(state, batch(), VERSION)
        assert metrics["optimizer/skipped_updates"] == 0
        assert not np.array_equal(before.params["embedding"], state.params["embedding"])
        before = jax.device_get(state)
    state, _ = made.step(state, bad, VERSION)
    with pytest.raises(UserError, match=r"the loss is nan.*update 2 in a row.*nonfinite-\d+.npz"):
        made.step(state, bad, VERSION)
    (dump,) = tmp_path.iterdir()
    with np.load(dump) as arrays:
        assert np.isnan(arrays["behaviour_logprobs"]).sum() == 1
        assert arrays["tokens"].shape == arrays["advantages"].shape
