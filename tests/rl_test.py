"""Objectives, advantages and diagnostics: identities, hand-computed values, numerical hazards."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_jax.rl import advantages as adv
from areal_jax.rl import diagnostics
from areal_jax.rl.logprobs import token_logprobs
from areal_jax.rl.losses import LOSSES, LossConfig, TokenInputs, importance_weight
from tests.helpers import trajectory

POLICY_LOSSES = ["ppo", "decoupled_ppo", "staleness_ppo"]


def inputs(rng=None, n=7, **changes):
    rng = rng or np.random.default_rng(0)
    fields = {
        "logprobs": -rng.random((1, n)) - 0.1,
        "proximal_logprobs": -rng.random((1, n)) - 0.1,
        "behaviour_logprobs": -rng.random((1, n)) - 0.1,
        "advantages": rng.standard_normal((1, n)),
        "mask": np.ones((1, n)),
        "staleness": np.zeros((1, n), np.int32),
    }
    fields |= changes
    return TokenInputs(**{k: jnp.asarray(v, jnp.int32 if k == "staleness" else jnp.float32) for k, v in fields.items()})


def total(name, x, **options):
    return jnp.sum(LOSSES[name](x, LossConfig(name, **options)).loss * x.mask)


def gradient(name, x, **options):
    return np.asarray(jax.grad(lambda t: total(name, x._replace(logprobs=t), **options))(x.logprobs))


def test_p_equal_b_makes_decoupled_exactly_ppo():
    x = inputs()
    x = x._replace(proximal_logprobs=x.behaviour_logprobs)
    assert float(total("decoupled_ppo", x)) == float(total("ppo", x))
    np.testing.assert_array_equal(gradient("decoupled_ppo", x), gradient("ppo", x))


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_on_policy_every_ratio_is_one_and_the_gradient_minus_a(name):
    x = inputs()
    x = x._replace(proximal_logprobs=x.logprobs, behaviour_logprobs=x.logprobs)
    result = LOSSES[name](x, LossConfig(name))
    np.testing.assert_array_equal(result.loss, -x.advantages)
    assert float(jnp.sum(result.clipped_low + result.clipped_high)) == 0
    np.testing.assert_allclose(gradient(name, x), -x.advantages, rtol=1e-6)


def test_first_minibatch_decoupled_gradient_is_minus_w_a():
    x = inputs()
    x = x._replace(proximal_logprobs=x.logprobs)  # recompute: theta = p before the first update
    w = jnp.exp(x.proximal_logprobs - x.behaviour_logprobs)
    np.testing.assert_allclose(gradient("decoupled_ppo", x, importance_cap=1e9), -w * x.advantages, rtol=1e-5)
    np.testing.assert_allclose(
        gradient("decoupled_ppo", x, importance_cap=1.1), -jnp.minimum(w, 1.1) * x.advantages, rtol=1e-5
    )


def test_a_mixed_version_sequence_by_hand():
    """Versions [-1, -1, 3, 3, 4, 4, 5] consumed at version 5: d = [., ., 2, 2, 1, 1, 0]."""
    x = inputs(
        logprobs=[[0, 0, -1.0, -1.0, -1.0, -1.0, -1.0]],
        proximal_logprobs=[[0, 0, -1.1, -1.0, -1.3, -0.8, -1.0]],
        behaviour_logprobs=[[0, 0, -1.5, -1.0, -1.0, -1.4, -1.0]],
        advantages=[[0, 0, 1.0, -1.0, 1.0, -1.0, 2.0]],
        mask=[[0, 0, 1, 1, 1, 1, 1]],
        staleness=[[0, 0, 2, 2, 1, 1, 0]],
    )
    e = np.exp
    # ppo, eps .2: r = [e^.5, 1, 1, e^.4, 1]; the first is clipped at 1.2, the fourth (A < 0) is not
    np.testing.assert_allclose(LOSSES["ppo"](x, LossConfig("ppo")).loss[0], [0, 0, -1.2, 1, -1, e(0.4), -2], rtol=1e-6)
    # decoupled: rho = [e^.1, 1, e^.3, e^-.2, 1], w = [e^.4, 1, e^-.3, e^.6, 1]
    # third: min(e^.3, 1.2) = 1.2; fourth (A < 0): max(rho, .8) = e^-.2 = .8187
    expected = [0, 0, -e(0.4) * e(0.1), 1, -e(-0.3) * 1.2, e(0.6) * e(-0.2), -2]
    np.testing.assert_allclose(LOSSES["decoupled_ppo"](x, LossConfig("decoupled_ppo")).loss[0], expected, rtol=1e-6)
    # staleness, decay .5, floor .1: eps = [.05, .05, .1, .1, .2]; first: e^.1 -> 1.05; third -> 1.1; fourth -> .9
    expected = [0, 0, -e(0.4) * 1.05, 1, -e(-0.3) * 1.1, e(0.6) * 0.9, -2]
    result = LOSSES["staleness_ppo"](x, LossConfig("staleness_ppo", staleness_decay=0.5))
    np.testing.assert_allclose(result.loss[0], expected, rtol=1e-6)
    np.testing.assert_array_equal(result.clipped_high[0], [0, 0, 1, 0, 1, 0, 0])
    np.testing.assert_array_equal(result.clipped_low[0], [0, 0, 0, 0, 0, 1, 0])


def test_the_clip_range_at_the_documented_stalenesses():
    d = np.array([[0, 1, 4, 8, 16, 32, 45]])
    result = LOSSES["staleness_ppo"](inputs(staleness=d), LossConfig("staleness_ppo"))
    np.testing.assert_allclose(result.epsilon[0], [0.2, 0.19, 0.163, 0.133, 0.088, 0.039, 0.02], atol=5e-4)


def test_relabelling_versions_changes_nothing_in_version_free_losses():
    for name in ("ppo", "decoupled_ppo"):
        assert float(total(name, inputs())) == float(total(name, inputs(staleness=np.full((1, 7), 9))))
    assert float(total("staleness_ppo", inputs())) != float(
        total("staleness_ppo", inputs(staleness=np.full((1, 7), 9)))
    )


def test_the_gradient_at_the_clip_bound_is_whole():
    """jnp.clip's would be half of it."""
    at_bound = np.log(np.float32(1.2))
    x = inputs(n=1, logprobs=[[at_bound]], behaviour_logprobs=[[0.0]], advantages=[[1.0]])
    ratio = float(jnp.exp(x.logprobs[0, 0]))
    high = ratio - 1.0  # the ratio exactly on the bound
    np.testing.assert_allclose(gradient("ppo", x, clip_high=high)[0, 0], -ratio, rtol=1e-5)


@pytest.mark.parametrize("name", [*POLICY_LOSSES, "sft"])
@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf, 1e30, -1e30])
def test_nothing_masked_reaches_a_loss_a_gradient_or_a_metric(name, poison):
    mask = np.array([[1, 0, 1, 0, 0, 1, 1]])
    clean = inputs(mask=mask)
    dirty = {
        f: jnp.where(mask > 0, getattr(clean, f), poison)
        for f in ("logprobs", "proximal_logprobs", "behaviour_logprobs", "advantages")
    }
    dirty = clean._replace(**dirty)
    config = LossConfig(name)
    np.testing.assert_array_equal(gradient(name, clean), np.where(mask > 0, gradient(name, dirty), 0))
    assert np.isfinite(gradient(name, dirty)).all()
    entropy = jnp.full(mask.shape, 0.5)
    expected = diagnostics.token_sums(clean, LOSSES[name](clean, config), entropy, config)
    poisoned = jnp.where(mask > 0, entropy, poison)
    got = diagnostics.token_sums(dirty, LOSSES[name](dirty, config), poisoned, config)
    for key, value in expected.items():
        np.testing.assert_array_equal(got[key], value, err_msg=key)


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_extreme_log_ratios_are_clamped_and_counted(name):
    x = inputs(n=2, logprobs=[[500.0, -1.0]], proximal_logprobs=[[0.0, -1.0]], behaviour_logprobs=[[0.0, -1.0]])
    assert np.isfinite(gradient(name, x)).all()
    config = LossConfig(name)
    sums = diagnostics.token_sums(x, LOSSES[name](x, config), jnp.zeros((1, 2)), config)
    metrics = diagnostics.finalize({k: float(v) for k, v in sums.items()}, config)
    assert metrics["importance/log_ratio_clamped_fraction"] == 0.5


def region_inputs():
    """Every region: sign of A x ratio below, inside, above the clip, with p apart from b."""
    ratios = np.log([0.5, 0.97, 1.6] * 2)
    behaviour = np.full(6, -2.0)
    proximal = behaviour + 0.1
    return {
        "ppo": (behaviour + ratios, behaviour, proximal),
        "decoupled_ppo": (proximal + ratios, behaviour, proximal),
        "staleness_ppo": (proximal + ratios, behaviour, proximal),
    }


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_gradients_against_a_float64_finite_difference_in_every_region(name):
    theta, b, p = region_inputs()[name]
    a, d = np.array([1.5] * 3 + [-0.7] * 3), np.array([0, 3, 1] * 2)

    def reference(t):
        anchor, weight = (b, 1.0) if name == "ppo" else (p, np.minimum(np.exp(p - b), 5.0))
        eps = 0.2 * np.maximum(0.1, 0.95**d) if name == "staleness_ppo" else 0.2
        ratio = np.exp(t - anchor)
        return weight * np.maximum(-ratio * a, -np.clip(ratio, 1 - eps, 1 + eps) * a)

    h = 1e-6
    expected = (reference(theta + h) - reference(theta - h)) / (2 * h)
    x = inputs(n=6, logprobs=[theta], behaviour_logprobs=[b], proximal_logprobs=[p], advantages=[a], staleness=[d])
    np.testing.assert_allclose(gradient(name, x)[0], expected, rtol=2e-4, atol=1e-6)
    assert (np.abs(expected) < 1e-9).sum() == 2  # the two clipped regions


def test_importance_weight_none_is_one():
    x = inputs()
    np.testing.assert_array_equal(
        importance_weight(x, LossConfig("decoupled_ppo", importance_weight="none")), np.ones((1, 7))
    )


def test_token_logprobs_by_hand():
    """Index t describes tokens[t]: the state at t - 1 predicts it; the first of each sequence is 0."""
    hidden = jnp.array([[[0.0, 1.0], [2.0, 0.0], [5.0, 5.0], [1.0, 3.0]]])
    tokens, positions = jnp.array([[0, 1, 0, 1]]), jnp.array([[0, 1, 0, 1]])
    logprobs, entropy = token_logprobs(hidden, lambda h: h, tokens, positions, 2.0)

    def log_softmax(z, i):
        z = np.asarray(z) / 2.0
        return z[i] - np.log(np.exp(z).sum())

    np.testing.assert_allclose(logprobs[0], [0, log_softmax([0, 1], 1), 0, log_softmax([5, 5], 1)], atol=1e-6)
    np.testing.assert_allclose(entropy[0, 3], np.log(2), atol=1e-6)
    assert float(entropy[0, 2]) == 0


def test_group_advantages_by_hand():
    rewards, groups = np.array([1.0, 0, 0, 1, 1, 1, 5]), np.array([7, 7, 7, 2, 2, 2, 9])
    std = np.sqrt(((2 / 3) ** 2 + 2 * (1 / 3) ** 2) / 2)
    np.testing.assert_allclose(
        adv.group_norm(rewards, groups), [2 / 3 / std, -1 / 3 / std, -1 / 3 / std, 0, 0, 0, 0], rtol=1e-5
    )
    np.testing.assert_allclose(adv.dr_grpo(rewards, groups)[:3], [2 / 3, -1 / 3, -1 / 3], rtol=1e-6)
    np.testing.assert_allclose(adv.rloo(rewards, groups)[:3], [1, -0.5, -0.5], rtol=1e-6)
    for name in ("group_norm", "dr_grpo", "rloo"):
        assert (adv.ADVANTAGES[name](rewards, groups)[3:] == 0).all()  # zero variance, and a singleton
    whitened = adv.batch_norm(rewards, groups)
    assert abs(whitened.mean()) < 1e-6
    assert whitened.std() == pytest.approx(1, abs=1e-5)
    assert (adv.batch_norm(np.full(3, 0.1), groups[:3]) == 0).all()


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.sampled_from([0.0, 0.1, 1.0])), min_size=1, max_size=20), st.randoms())
def test_advantages_follow_their_samples_in_any_order(members, random):
    groups, rewards = (np.array(c) for c in zip(*members, strict=True))
    order = list(range(len(members)))
    random.shuffle(order)
    for estimate in adv.ADVANTAGES.values():
        np.testing.assert_allclose(estimate(rewards, groups)[order], estimate(rewards[order], groups[order]), atol=1e-5)


def test_staleness_metrics_by_hand():
    rng = np.random.default_rng(0)
    mixed = trajectory(0, 2, 3, rng, policy_versions=np.array([-1, -1, 3, 4, 5], np.int32))
    fresh = trajectory(1, 1, 1, rng, policy_versions=np.array([-1, 5], np.int32))
    m = diagnostics.staleness_metrics([mixed, fresh], version=5)
    assert m["staleness/token_mean"] == pytest.approx((2 + 1 + 0 + 0) / 4)
    assert m["staleness/sequence_mean"] == 1.0
    assert m["staleness/token_max"] == 2
    assert m["staleness/mixed_fraction"] == 0.5
    assert m["staleness/versions_per_sequence"] == 2.0
    with pytest.raises(ValueError, match="newer than the trainer"):
        diagnostics.staleness_metrics([mixed], version=4)


def test_batch_metrics_by_hand():
    rng = np.random.default_rng(0)
    batch = [
        trajectory(i, 2, 3 + i, rng, prompt_id=i // 2, reward=r, finish_reason=f)
        for i, (r, f) in enumerate([(1.0, "stop"), (1.0, "stop"), (0.0, "length"), (0.0, "stop")])
    ]
    m = diagnostics.batch_metrics(batch, np.array([0.5, -0.5, 0.0, 0.0]))
    assert m["reward/mean"] == 0.5
    assert m["length/mean"] == 4.5
    assert m["length/truncated_fraction"] == 0.25
    assert m["group/all_pass_fraction"] == m["group/all_fail_fraction"] == 0.5
    assert m["length/correct_mean"] == 3.5
    assert dataclasses.replace(batch[0]).response_length == 3
