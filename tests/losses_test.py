"""Objectives and corrections: identities, hand-computed values, gradients in every region, numerical hazards."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from areal_jax.rl import corrections
from areal_jax.rl.corrections import PolicyLoss, policy_loss
from areal_jax.rl.losses import LOSSES, LossConfig, TokenInputs, m2po_bound, reads_proximal, resolve
from areal_jax.rl.values import value_loss
from tests import reference_losses

OBJECTIVES = [name for name in LOSSES if name != "sft"]
FREE_OF_VERSIONS = [name for name in OBJECTIVES if name != "staleness_ppo"]


def config_of(name, **options) -> LossConfig:
    return resolve(LossConfig(name, **options))


def inputs(rng=None, n=7, **changes) -> TokenInputs:
    rng = rng or np.random.default_rng(0)
    fields = {
        "logprobs": -rng.random((1, n)) - 0.1,
        "proximal_logprobs": -rng.random((1, n)) - 0.1,
        "behaviour_logprobs": -rng.random((1, n)) - 0.1,
        "advantages": rng.standard_normal((1, n)),
        "mask": np.ones((1, n)),
        "staleness": np.zeros((1, n), np.int32),
        "segment_ids": np.ones((1, n), np.int32),
        "statistic": np.float32(0),
    } | changes
    integers = ("staleness", "segment_ids")
    return TokenInputs(**{k: jnp.asarray(v, jnp.int32 if k in integers else jnp.float32) for k, v in fields.items()})


def run(x: TokenInputs, config: LossConfig, entropy=None, reference=None) -> PolicyLoss:
    """The loss of `x` as the whole optimiser batch."""
    x = x._replace(statistic=corrections.batch_statistic(x, config))
    return policy_loss(x, jnp.zeros_like(x.mask) if entropy is None else entropy, reference, config)


def gradient(x: TokenInputs, config: LossConfig, **options) -> np.ndarray:
    """Of the sum, by the way that the train step differentiates it."""
    return np.asarray(jax.grad(lambda t: run(x._replace(logprobs=t), config, **options).total)(x.logprobs))


# --- identities ---


@pytest.mark.parametrize("options", [{}, {"dual_clip": 3.0}, {"opsm_threshold": 0.1}, {"proximal": "behaviour"}])
def test_p_equal_b_makes_decoupled_exactly_ppo(options):
    x = inputs()
    if "proximal" not in options:
        x = x._replace(proximal_logprobs=x.behaviour_logprobs)
    a, b = config_of("decoupled_ppo", **options), config_of("ppo", **(options | {"proximal": "auto"}))
    assert float(run(x, a).total) == float(run(x, b).total)
    np.testing.assert_array_equal(gradient(x, a), gradient(x, b))


@pytest.mark.parametrize("name", OBJECTIVES)
def test_on_policy_every_ratio_is_one_and_the_gradient_minus_a(name):
    x = inputs(staleness=[[0, 1, 4, 4, 0, 2, 9]])
    x = x._replace(proximal_logprobs=x.logprobs, behaviour_logprobs=x.logprobs)
    result = run(x, config_of(name))
    assert float(jnp.sum(result.tokens.clipped_low + result.tokens.clipped_high + result.rejected)) == 0
    np.testing.assert_allclose(gradient(x, config_of(name)), -x.advantages, rtol=1e-6)
    if LOSSES[name].surrogate:
        np.testing.assert_array_equal(result.tokens.loss, -x.advantages)


def test_first_minibatch_decoupled_gradient_is_minus_w_a():
    x = inputs()
    x = x._replace(proximal_logprobs=x.logprobs)  # recompute: theta = p before the first update
    w = jnp.exp(x.proximal_logprobs - x.behaviour_logprobs)
    np.testing.assert_allclose(
        gradient(x, config_of("decoupled_ppo", importance_cap=1e9)), -w * x.advantages, rtol=1e-5
    )
    np.testing.assert_allclose(
        gradient(x, config_of("decoupled_ppo", importance_cap=1.1)), -jnp.minimum(w, 1.1) * x.advantages, rtol=1e-5
    )


def test_loglinear_splits_r_into_rho_and_w():
    d = np.array([[0, 1, 3, 4, 8, 16, 2]])
    x = inputs(staleness=d)
    used = corrections.with_proximal(x, config_of("decoupled_ppo", proximal="loglinear"))
    r, alpha = np.exp(x.logprobs - x.behaviour_logprobs), d / (d + 1)
    np.testing.assert_allclose(np.exp(used.logprobs - used.proximal_logprobs), r ** (1 - alpha), rtol=1e-5)
    np.testing.assert_allclose(np.exp(used.proximal_logprobs - used.behaviour_logprobs), r**alpha, rtol=1e-5)
    assert used.proximal_logprobs[0, 0] == x.behaviour_logprobs[0, 0]  # of the newest version: exactly b


@pytest.mark.parametrize("name", FREE_OF_VERSIONS)
def test_relabelling_versions_changes_nothing_in_version_free_losses(name):
    config = config_of(name)
    assert float(run(inputs(), config).total) == float(run(inputs(staleness=np.full((1, 7), 9)), config).total)


@pytest.mark.parametrize("options", [{"name": "staleness_ppo"}, {"name": "decoupled_ppo", "proximal": "loglinear"}])
def test_relabelling_versions_changes_the_others(options):
    config = config_of(**options)
    assert float(run(inputs(), config).total) != float(run(inputs(staleness=np.full((1, 7), 9)), config).total)


# --- by hand: versions [-1, -1, 3, 3, 4, 4, 5] consumed at version 5 ---

MIXED = {
    "logprobs": [[0, 0, -1.0, -1.0, -1.0, -1.0, -1.0]],
    "proximal_logprobs": [[0, 0, -1.1, -1.0, -1.3, -0.8, -1.0]],
    "behaviour_logprobs": [[0, 0, -1.5, -1.0, -1.0, -1.4, -1.0]],
    "advantages": [[0, 0, 1.0, -1.0, 1.0, -1.0, 2.0]],
    "mask": [[0, 0, 1, 1, 1, 1, 1]],
    "staleness": [[0, 0, 2, 2, 1, 1, 0]],
}
e = np.exp
S = e(0.18)  # the mean of log r = [.5, 0, 0, .4, 0]


def sigmoid(x):
    return 1 / (1 + e(-x))


BY_HAND = {
    # r = [e^.5, 1, 1, e^.4, 1]; the first is clipped at 1.2, the fourth (A < 0) is not
    "ppo": ({}, [-1.2, 1, -1, e(0.4), -2]),
    "ppo dual": ({"dual_clip": 1.3}, [-1.2, 1, -1, 1.3, -2]),
    # rho = [e^.1, 1, e^.3, e^-.2, 1], w = [e^.4, 1, e^-.3, e^.6, 1]; third: 1.2; fourth: max(rho, .8) = e^-.2
    "decoupled_ppo": ({}, [-e(0.4) * e(0.1), 1, -e(-0.3) * 1.2, e(0.6) * e(-0.2), -2]),
    "decoupled_ppo clamp": ({"importance_cap": 1.5}, [-e(0.4) * e(0.1), 1, -e(-0.3) * 1.2, 1.5 * e(-0.2), -2]),
    "decoupled_ppo mask": (
        {"importance_weight": "mask", "importance_low": 0.8, "importance_cap": 1.5},
        [-e(0.4) * e(0.1), 1, 0, 0, -2],
    ),
    "decoupled_ppo none": ({"importance_weight": "none"}, [-e(0.1), 1, -1.2, e(-0.2), -2]),
    # the geometric mean of w is e^((.4 - .3 + .6) / 5) = e^.14
    "decoupled_ppo sequence": (
        {"importance_level": "sequence"},
        [-e(0.14) * e(0.1), e(0.14), -e(0.14) * 1.2, e(0.14) * e(-0.2), -2 * e(0.14)],
    ),
    # alpha = [2/3, 2/3, 1/2, 1/2, 0]: rho = [e^(.5/3), 1, 1, e^.2, 1], w = [e^(1/3), 1, 1, e^.2, 1]
    "decoupled_ppo loglinear": ({"proximal": "loglinear"}, [-e(1 / 3) * e(0.5 / 3), 1, -1, e(0.2) * e(0.2), -2]),
    # decay .5: eps = [.05, .05, .1, .1, .2]; first: e^.1 -> 1.05; third -> 1.1; fourth -> .9
    "staleness_ppo": (
        {"staleness_decay": 0.5},
        [-e(0.4) * 1.05, 1, -e(-0.3) * 1.1, e(0.6) * 0.9, -2],
    ),
    # mean staleness 6/5: eps = .2 * .5^1.2 for all
    "staleness_ppo sequence": (
        {"staleness_decay": 0.5, "staleness_scope": "sequence", "staleness_base": "ppo"},
        [-1 - 0.2 * 0.5**1.2, 1, -1, e(0.4), -2],
    ),
    "staleness_ppo batch": (
        {"staleness_decay": 0.5, "staleness_scope": "batch", "staleness_base": "ppo"},
        [-1 - 0.2 * 0.5**1.2, 1, -1, e(0.4), -2],
    ),
    # A > 0: s = e^.18 is over 1.0004; A < 0: it is not clipped
    "gspo": ({}, [-1.0004, S, -1.0004, S, -2.0008]),
    # -clip(r, 0, 1.5) A theta with theta = -1
    "cispo": ({"cispo_high": 1.5}, [1.5, -1, 1, -e(0.4), 2]),
    "sapo": (
        {},
        [-4 * sigmoid(e(0.5) - 1), 4 / 1.05 / 2, -2, 4 / 1.05 * sigmoid(1.05 * (e(0.4) - 1)), -4],
    ),
    # only the first is pushed (A > 0, r > 1): its .25 is over .04; the fourth has moved against its advantage
    "m2po": ({}, [0, 1, -1, e(0.4), -2]),
    "m2po loose": ({"m2po_threshold": 0.26}, [-e(0.5), 1, -1, e(0.4), -2]),
    # the sum of log r is .9: nothing is tapered
    "topr": ({}, [1, -1, 1, -1, 2]),
    # e^theta - e^b = [.145, 0, 0, .121, 0]: with .1 the first is masked; the penalty stays on all
    "dppo": ({"dppo_threshold": 0.1}, [0.25e-3, 1, -1, e(0.4) + 0.16e-3, -2]),
    "reinforce": ({}, [1, -1, 1, -1, 2]),
    "reinforce clamp": (
        {"importance_weight": "clamp", "importance_cap": 1.7},
        [e(0.4), -1, e(-0.3), -1.7, 2],
    ),
    # the mean of b - theta is -.18: nothing is rejected
    "reinforce opsm": ({"opsm_threshold": 0.01}, [1, -1, 1, -1, 2]),
}


@pytest.mark.parametrize("case", BY_HAND)
def test_a_mixed_version_sequence_by_hand(case):
    options, expected = BY_HAND[case]
    result = run(inputs(**MIXED), config_of(case.split()[0], **options))
    np.testing.assert_allclose(result.tokens.loss[0], [0, 0, *expected], rtol=2e-6)
    assert float(result.denominator) == 5
    assert float(result.total) == pytest.approx(sum(expected), rel=1e-5)


def test_what_was_clipped_is_said():
    result = run(inputs(**MIXED), config_of("staleness_ppo", staleness_decay=0.5))
    np.testing.assert_array_equal(result.tokens.clipped_high[0], [0, 0, 1, 0, 1, 0, 0])
    np.testing.assert_array_equal(result.tokens.clipped_low[0], [0, 0, 0, 0, 0, 1, 0])
    np.testing.assert_array_equal(result.gradient[0] == 0, [1, 1, 1, 0, 1, 1, 0])
    dual = run(inputs(**MIXED), config_of("ppo", dual_clip=1.3))
    np.testing.assert_array_equal(dual.dual_clipped[0], [0, 0, 0, 0, 0, 1, 0])
    masked = run(inputs(**MIXED), config_of("decoupled_ppo", importance_weight="mask", importance_cap=1.5))
    np.testing.assert_array_equal(masked.rejected[0], [0, 0, 0, 0, 0, 1, 0])


def test_topr_tapers_bad_sequences_that_the_policy_has_left():
    x = inputs(**MIXED | {"logprobs": [[0, 0, -1.6, -1.0, -1.2, -1.5, -1.0]]})  # log r sums to -.4
    taper = e(-0.4)
    np.testing.assert_allclose(
        run(x, config_of("topr")).tokens.loss[0], [0, 0, 1.6, -taper, 1.2, -taper * 1.5, 2], rtol=1e-6
    )


def test_opsm_rejects_bad_sequences_that_the_policy_has_left_and_keeps_them_in_the_denominator():
    """Two sequences in a row; the mean of b - theta is .1 in the first and .3 in the second."""
    x = inputs(
        n=6,
        logprobs=[[-1.0, -1.0, -1.2, -1.6, -1.0, -1.0]],
        behaviour_logprobs=[[-1.0, -1.0, -0.9, -1.0, -1.0, -0.7]],
        advantages=[[-1.0, -1.0, -1.0, -1.0, 2.0, -1.0]],
        segment_ids=[[1, 1, 1, 2, 2, 2]],
    )
    result = run(x, config_of("reinforce", opsm_threshold=0.2))
    np.testing.assert_allclose(result.tokens.loss[0], [-1, -1, -1.2, 0, 2, 0], rtol=1e-6)
    np.testing.assert_array_equal(result.rejected[0], [0, 0, 0, 1, 0, 1])
    assert float(result.denominator) == 6


def test_the_clip_range_at_the_documented_stalenesses():
    d = np.array([[0, 1, 4, 8, 16, 32, 45]])
    result = run(inputs(staleness=d), config_of("staleness_ppo"))
    np.testing.assert_allclose(result.tokens.epsilon[0], [0.2, 0.19, 0.163, 0.133, 0.088, 0.039, 0.02], atol=5e-4)


def test_the_m2po_bound_drops_the_largest_until_the_mean_is_small_enough():
    """Squares .01, .04, .09, .25 of pushed tokens: means .01, .025, .047, .0975."""
    x = inputs(
        n=6,
        logprobs=[[-0.9, -1.2, -0.7, -1.5, -2.0, -0.5]],
        behaviour_logprobs=[[-1.0] * 6],
        advantages=[[1.0, -1.0, 2.0, -3.0, 1.0, 0.0]],  # the fifth moved the other way, the sixth has no advantage
    )
    for threshold, bound in ((0.04, 0.04), (0.05, 0.09), (0.005, -1.0), (0.1, math.inf)):
        assert float(m2po_bound(x, config_of("m2po", m2po_threshold=threshold))) == pytest.approx(bound, rel=1e-5)
    kept = reference_losses.m2po_kept(x.logprobs[0], x.behaviour_logprobs[0], x.advantages[0], 0.04)
    np.testing.assert_array_equal(kept, [1, 1, 0, 0, 1, 1])


# --- aggregation ---


def test_aggregations_by_hand():
    """A row of three sequences: 2 of 3 tokens count, 2 of 2, and 0 of 1; two positions of padding."""
    loss = jnp.array([[1.0, 2.0, 4.0, 10.0, 20.0, 100.0, 50.0, 60.0]])
    mask = jnp.array([[0.0, 1.0, 1.0, 1.0, 1.0, 0.0, 0.0, 0.0]])
    segment_ids = jnp.array([[1, 1, 1, 2, 2, 3, 0, 0]])
    expected = {
        "token_mean": (36, 4),
        "seq_mean_token_mean": (3 + 15, 2),
        "seq_mean_token_sum": (36, 2),
        "constant": (36, 2 * 9),
    }
    assert set(expected) == set(corrections.AGGREGATIONS)
    for how, (total, denominator) in expected.items():
        got = corrections.aggregate(loss, mask, segment_ids, how, 9)
        assert (float(got[0]), float(got[1])) == (total, denominator), how


# --- penalties ---


def test_kl_penalties_by_hand():
    x = inputs(n=2, logprobs=[[-1.0, -2.0]], advantages=[[0.0, 0.0]])
    reference = jnp.array([[-1.3, -1.5]])
    d = np.array([-0.3, 0.5])  # ref - theta
    for estimator, values in (("k2", d**2 / 2), ("k3", e(d) - 1 - d)):
        config = config_of("ppo", kl_coefficient=0.1, kl_estimator=estimator)
        assert float(run(x, config, reference=reference).total) == pytest.approx(0.1 * values.sum(), rel=1e-5)
        np.testing.assert_allclose(gradient(x, config, reference=reference)[0], 0.1 * -d, rtol=1e-5)


def test_the_entropy_bonus_is_taken_off():
    x = inputs(advantages=np.zeros((1, 7)))
    config = config_of("ppo", entropy_coefficient=0.5)
    assert float(run(x, config, entropy=jnp.full((1, 7), 2.0)).total) == pytest.approx(-7.0)


def test_value_loss_by_hand():
    """V = [1, .2, -1], V_old = [0, 0, 0], G = [2, 0, 0]; clip .5: the first may only reach .5."""
    v, old, g = jnp.array([[1.0, 0.2, -1.0]]), jnp.zeros((1, 3)), jnp.array([[2.0, 0.0, 0.0]])
    mask = jnp.ones((1, 3))
    loss, clipped = value_loss(v, old, g, mask, 0.5)
    np.testing.assert_allclose(loss[0], [1.5**2 / 2, 0.02, 0.5], rtol=1e-6)
    np.testing.assert_array_equal(clipped[0], [1, 0, 0])
    np.testing.assert_allclose(value_loss(v, old, g, mask, 0.0)[0][0], [0.5, 0.02, 0.5], rtol=1e-6)
    poisoned = v.at[0, 0].set(jnp.nan)
    without = jnp.array([[0.0, 1.0, 1.0]])
    for values in (v, poisoned):
        got = jax.value_and_grad(lambda u: jnp.sum(value_loss(u, old, g, without, 0.5)[0]))(values)
        assert float(got[0]) == pytest.approx(0.52)
        np.testing.assert_allclose(got[1][0], [0, 0.2, -1], rtol=1e-6)


# --- step size ---


def test_the_step_scale_by_hand():
    """Two sequences with log-weights .2 and -.4, a third without a token that counts."""
    x = inputs(
        n=5,
        logprobs=[[-1.0, -1.0, -1.0, -1.0, -1.0]],
        behaviour_logprobs=[[-1.1, -1.1, -0.8, -0.8, -9.0]],
        mask=[[1, 1, 1, 1, 0]],
        segment_ids=[[1, 1, 2, 2, 3]],
    )
    clean = corrections.clean(x)
    sample = corrections.effective_sample(clean.logprobs - clean.behaviour_logprobs, clean)
    w = np.array([e(0.2), e(-0.4)])
    assert float(sample.sequences) == 2
    expected = w.sum() ** 2 / (w**2).sum()
    assert float(corrections.step_scale(sample)) == pytest.approx(math.sqrt(expected / 2), rel=1e-5)
    clean = corrections.clean(x._replace(mask=jnp.zeros((1, 5))))
    none = corrections.effective_sample(clean.logprobs - clean.behaviour_logprobs, clean)
    assert float(corrections.step_scale(none)) == 1.0
    for xp in (jnp, np):
        joined = [corrections.join(sample, none, xp), corrections.join(none, sample, xp)]
        assert [float(corrections.step_scale(j)) for j in joined] == [pytest.approx(math.sqrt(expected / 2))] * 2


@pytest.mark.parametrize("far", [0.0, -40.0, 300.0])
def test_the_effective_sample_of_products_far_beyond_any_float(far):
    """Log-weights 30 and 20 apart: what all have in common does not matter, and nothing is capped."""
    rng = np.random.default_rng(0)
    logs = far + np.array([0.0, -1.0, -10.0, -12.0, -20.0, 30.0, 29.5, 3.0])
    w = e(logs - logs.max())
    expected = w.sum() ** 2 / (w**2).sum() / 8

    def sample(values):
        n = 4 * len(values)  # each sequence's weight is shared by its four tokens
        x = inputs(rng, n=n, segment_ids=[np.repeat(np.arange(1, len(values) + 1), 4)])
        return corrections.effective_sample(jnp.asarray([np.repeat(values / 4, 4)], jnp.float32), x)

    assert float(corrections.effective_share(sample(logs))) == pytest.approx(expected, rel=1e-4)
    parts = functools.reduce(corrections.join, [sample(logs[:3]), sample(logs[3:5]), sample(logs[5:])])
    assert float(corrections.effective_share(parts)) == pytest.approx(expected, rel=1e-4)


# --- gradients against float64 finite differences, in every region ---

RATIOS = np.array([0.4, 0.97, 1.6, 2.5])  # below, inside, above the clip; above dual clip
SWITCHES = {
    "plain": {},
    "dual clip": {"dual_clip": 2.0},
    "clamp": {"importance_weight": "clamp", "importance_cap": 1.05},
    "mask": {"importance_weight": "mask", "importance_low": 0.95, "importance_cap": 1.2},
    "mask, sequence": {"importance_weight": "mask", "importance_level": "sequence", "importance_cap": 1.2},
    "clamp, sequence": {"importance_weight": "clamp", "importance_level": "sequence", "importance_cap": 1.03},
    "none": {"importance_weight": "none"},
    "sequence": {"staleness_scope": "sequence"},
    "batch": {"staleness_scope": "batch", "staleness_base": "ppo"},
    "loglinear": {"proximal": "loglinear"},
    "opsm": {"opsm_threshold": 0.1},
}


def makes_sense(name, switch):
    options = SWITCHES[switch]
    if "dual_clip" in options:
        return LOSSES[name].surrogate
    if "staleness_scope" in options:
        return name == "staleness_ppo"
    if "importance_weight" in options:
        return config_of(name).importance_weight != "none" or name == "reinforce"
    return "proximal" not in options or reads_proximal(config_of(name))


@pytest.mark.parametrize(("name", "switch"), [(n, s) for n in OBJECTIVES for s in SWITCHES if makes_sense(n, s)])
def test_gradients_against_a_float64_finite_difference_in_every_region(name, switch):
    """Eight sequences of two tokens: each sign of A with each region of the objective's own ratio."""
    narrow = {"cispo_low": 0.5, "cispo_high": 1.5} if name == "cispo" else {}
    config = config_of(name, **SWITCHES[switch], **narrow)
    ratios = np.where(RATIOS == 0.97, 1.0001, RATIOS) if name == "gspo" else RATIOS
    log_ratios = np.repeat(np.log(np.tile(ratios, 2)), 2)
    b = np.full(16, -1.0)
    p = b + np.tile([0.1, -0.02], 8)
    around = p if name in ("decoupled_ppo", "staleness_ppo") and switch != "batch" else b
    theta = around + log_ratios
    a = np.repeat([1.5, -0.7], 8) * np.tile([1.0, 1.1], 8)
    d, segments = np.arange(16) % 4, np.repeat(np.arange(1, 9), 2)
    expected = reference_losses.gradient(config, theta, b, p, a, d, segments)
    x = inputs(
        n=16, logprobs=[theta], behaviour_logprobs=[b], proximal_logprobs=[p], advantages=[a], staleness=[d],
        segment_ids=[segments],
    )  # fmt: skip
    got = gradient(x, config)[0]
    np.testing.assert_allclose(got, expected, rtol=3e-5, atol=1e-6)
    np.testing.assert_allclose(run(x, config).gradient[0], got, rtol=1e-6)
    values = reference_losses.per_token(config, theta, theta, b, p, a, d, segments)
    np.testing.assert_allclose(run(x, config).tokens.loss[0], values, rtol=3e-6, atol=1e-7)
    without = (np.abs(expected) < 1e-9).sum()
    if switch == "plain" and LOSSES[name].surrogate:
        # clipped, or dropped: A > 0 above (two ratios), A < 0 below (one); two tokens each
        assert without == 6
    if switch == "dual clip" and name == "ppo":
        assert without == 8
    if switch == "plain" and name == "cispo":
        weights = expected / -a
        assert (np.isclose(weights, 0.5).sum(), np.isclose(weights, 1.5).sum()) == (4, 8)
    if switch == "opsm":
        assert without >= 2


# --- numerical hazards ---


def test_the_gradient_at_the_clip_bound_is_whole():
    """jnp.clip's would be half of it."""
    x = inputs(n=1, logprobs=[[np.log(np.float32(1.2))]], behaviour_logprobs=[[0.0]], advantages=[[1.0]])
    ratio = float(jnp.exp(x.logprobs[0, 0]))
    np.testing.assert_allclose(gradient(x, config_of("ppo", clip_high=ratio - 1.0))[0, 0], -ratio, rtol=1e-5)


VARIANTS = [(name, {}) for name in LOSSES]
VARIANTS += [("decoupled_ppo", {"importance_weight": "mask", "importance_level": "sequence"})]
VARIANTS += [("decoupled_ppo", {"proximal": "loglinear"}), ("m2po", {"opsm_threshold": 0.01, "dual_clip": 2.0})]
VARIANTS += [("ppo", {"aggregation": how, "constant_length": 3}) for how in corrections.AGGREGATIONS]


@pytest.mark.parametrize(("name", "options"), VARIANTS)
@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf, 1e30, -1e30])
def test_nothing_masked_reaches_a_loss_or_a_gradient(name, options, poison):
    """Two sequences, one of them wholly masked, and padding."""
    mask = np.array([[1, 0, 1, 0, 0, 0, 1]])
    clean = inputs(mask=mask, segment_ids=[[1, 1, 1, 2, 2, 0, 3]])
    config = config_of(name, kl_coefficient=0.1, entropy_coefficient=0.1, **options)
    extra = {"entropy": jnp.full(mask.shape, 0.5), "reference": clean.proximal_logprobs}

    def poisoned(array):
        return jnp.where(mask > 0, array, poison)

    fields = ("logprobs", "proximal_logprobs", "behaviour_logprobs", "advantages")
    dirty = clean._replace(**{f: poisoned(getattr(clean, f)) for f in fields})
    dirty_extra = {k: poisoned(v) for k, v in extra.items()}
    np.testing.assert_array_equal(gradient(dirty, config, **dirty_extra), gradient(clean, config, **extra))
    assert np.isfinite(gradient(dirty, config, **dirty_extra)).all()
    assert not gradient(dirty, config, **dirty_extra)[mask == 0].any()
    jax.tree.map(np.testing.assert_array_equal, run(dirty, config, **dirty_extra), run(clean, config, **extra))


@pytest.mark.parametrize(("name", "options"), VARIANTS)
def test_a_batch_without_a_token_that_counts(name, options):
    x = inputs(mask=np.zeros((1, 7)), logprobs=np.full((1, 7), np.nan))
    config = config_of(name, **options)
    assert float(run(x, config).total) == float(run(x, config).denominator) == 0
    np.testing.assert_array_equal(gradient(x, config), np.zeros((1, 7)))


@pytest.mark.parametrize("name", OBJECTIVES)
@pytest.mark.parametrize("far", [500.0, -500.0])
def test_extreme_log_ratios_overflow_nowhere(name, far):
    x = inputs(n=2, logprobs=[[far, -1.0]], proximal_logprobs=[[0.0, -1.0]], behaviour_logprobs=[[0.0, -1.0]])
    for advantages in ([[1.0, 1.0]], [[-1.0, -1.0]]):
        seen = x._replace(advantages=jnp.array(advantages))
        assert np.isfinite(gradient(seen, config_of(name))).all()
        assert np.isfinite(float(run(seen, config_of(name)).total))


@pytest.mark.parametrize(("name", "options"), VARIANTS)
def test_jit_equals_eager(name, options):
    config = config_of(name, **options)
    x = inputs(segment_ids=[[1, 1, 1, 2, 2, 2, 2]])
    jitted = jax.jit(lambda t: run(x._replace(logprobs=t), config))(x.logprobs)
    for a, b in zip(jax.tree.leaves(jitted), jax.tree.leaves(run(x, config)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-7)


def test_auto_is_decided_by_the_objective():
    def decided(name, **options):
        found = resolve(LossConfig(name, **options))
        return found.importance_weight, reads_proximal(found), corrections.needs_proximal_forward(found)

    assert decided("decoupled_ppo") == ("clamp", True, True)
    assert decided("decoupled_ppo", importance_weight="none") == ("none", True, True)
    assert decided("staleness_ppo", staleness_base="ppo") == ("none", False, False)
    assert decided("reinforce") == ("none", False, False)
    assert decided("reinforce", importance_weight="mask") == ("mask", True, True)
    assert decided("decoupled_ppo", proximal="loglinear") == ("clamp", True, False)
    assert decided("decoupled_ppo", proximal="loglinear", proximal_check=True) == ("clamp", True, True)
    assert resolve(LossConfig("ppo")).proximal == "recompute"


def test_a_kl_needs_a_reference():
    with pytest.raises(ValueError, match="reference"):
        run(inputs(), config_of("ppo", kl_coefficient=0.1))
