"""Log-probs and measurements, by hand."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from areal_jax.rl import diagnostics
from areal_jax.rl.logprobs import token_logprobs, token_values
from areal_jax.rl.losses import LossConfig, resolve
from areal_jax.types import Output
from tests.helpers import trajectory
from tests.losses_test import MIXED, inputs, run

e = np.exp


def test_token_logprobs_by_hand():
    """Index t describes tokens[t]: the state at t - 1 predicts it; the first of each sequence is 0."""
    hidden = jnp.array([[[0.0, 1.0], [2.0, 0.0], [5.0, 5.0], [1.0, 3.0]]])
    tokens, positions = jnp.array([[0, 1, 0, 1]]), jnp.array([[0, 1, 0, 1]])
    logprobs, entropy = token_logprobs(hidden, Output(lambda _, h: h, ()), tokens, positions > 0, 2.0, columns=1)

    def log_softmax(z, i):
        z = np.asarray(z) / 2.0
        return z[i] - np.log(np.exp(z).sum())

    np.testing.assert_allclose(logprobs[0], [0, log_softmax([0, 1], 1), 0, log_softmax([5, 5], 1)], atol=1e-6)
    np.testing.assert_allclose(entropy[0, 3], np.log(2), atol=1e-6)
    assert float(entropy[0, 2]) == 0


def test_token_values_by_hand():
    hidden = jnp.array([[[0.0, 1.0], [2.0, 0.0], [5.0, 5.0], [1.0, 3.0]]])
    values = token_values(hidden, jnp.array([10.0, 1.0]), jnp.array([[0, 1, 0, 1]]))
    np.testing.assert_allclose(values[0], [0, 1, 0, 55])


def metrics(x, config, entropy=None):
    sums = diagnostics.token_sums(run(x, config), jnp.ones_like(x.mask) if entropy is None else entropy, config)
    return diagnostics.finalize(jax.device_get(sums), config)


def test_a_mixed_version_sequence_over_all_tokens_and_by_staleness():
    """Versions 3, 3, 4, 4, 5 at version 5: log r = [.5, 0, 0, .4, 0], log w = [.4, 0, -.3, .6, 0]."""
    config = resolve(LossConfig("decoupled_ppo", importance_cap=1.5))
    m = metrics(inputs(**MIXED), config)
    r, w = np.exp([0.5, 0, 0, 0.4, 0]), np.exp([0.4, 0, -0.3, 0.6, 0])
    rho = r / w
    for name, expected in {
        "importance/r_mean": r.mean(),
        "importance/r_max": r.max(),
        "importance/r_min": 1.0,
        "importance/w_mean": w.mean(),
        "importance/w_max": w.max(),
        "importance/w_min": w.min(),
        "importance/above_cap_fraction": 1 / 5,
        "importance/ess_token": w.sum() ** 2 / (5 * (w**2).sum()),
        "importance/ess_sequence": 1.0,
        "importance/ess_token/d1": (e(-0.3) + e(0.6)) ** 2 / (2 * (e(-0.6) + e(1.2))),
        "behaviour_kl/k1": -0.9 / 5,
        "behaviour_kl/k3": (r - 1 - np.log(r)).mean(),
        "behaviour_kl/proximal_k1": -0.7 / 5,
        "behaviour_kl/proximal_k3": (w - 1 - np.log(w)).mean(),
        "behaviour_kl/update_k1": -np.log(rho).mean(),
        "behaviour_kl/update_k3": (rho - 1 - np.log(rho)).mean(),
        "clip/high_fraction": 1 / 5,  # the third: rho = e^.3
        "clip/low_fraction": 0.0,
        "clip/zero_gradient_fraction": 1 / 5,
        "clip/effective_epsilon_mean": 0.2,
        "clip/effective_epsilon_min": 0.2,
        "policy/entropy": 1.0,
        # buckets: the first two tokens are 2 versions old, the next two 1, the last 0
        "staleness/fraction/d2": 0.4,
        "staleness/fraction/d0": 0.2,
        "importance/r_mean/d2": r[:2].mean(),
        "importance/w_mean/d1": w[2:4].mean(),
        "behaviour_kl/k1/d0": 0.0,
        "clip/high_fraction/d1": 0.5,
        "importance/above_cap_fraction/d1": 0.5,
    }.items():
        assert m[name] == pytest.approx(expected, rel=1e-5, abs=1e-7), name
    assert not any("d3-4" in name for name in m)


def test_without_a_proximal_policy_the_effective_sample_is_that_of_r():
    m = metrics(inputs(**MIXED), resolve(LossConfig("ppo")))
    r = e([0.5, 0, 0, 0.4, 0])
    assert m["importance/ess_token"] == pytest.approx(r.sum() ** 2 / (5 * (r**2).sum()), rel=1e-5)


def test_quantiles_of_equal_ratios_are_these():
    x = inputs()
    m = metrics(x._replace(behaviour_logprobs=x.logprobs), resolve(LossConfig("ppo")))
    assert m["importance/r_p1"] == m["importance/r_p99"] == m["importance/r_max"] == 1.0


def test_every_age_has_its_bucket():
    ages = [0, 1, 2, 3, 4, 5, 8, 9, 16, 17, 400]
    m = metrics(inputs(n=11, staleness=[ages]), resolve(LossConfig("staleness_ppo")))
    counts = {name: round(m[f"staleness/fraction/{name}"] * 11) for name in diagnostics.BUCKETS}
    assert list(counts.values()) == [1, 1, 1, 2, 2, 2, 2]
    assert m["clip/effective_epsilon_min"] == pytest.approx(0.02)


def test_quantiles_are_within_a_bin_of_the_exact_ones():
    rng = np.random.default_rng(0)
    log_r = (rng.standard_normal((1, 5000)) * 0.3).astype(np.float32)
    zeros = np.zeros((1, 5000))
    ones = np.ones((1, 5000), np.int32)
    x = inputs(n=5000, logprobs=log_r - 3, behaviour_logprobs=zeros - 3, advantages=zeros, segment_ids=ones,
               staleness=ones, mask=ones, proximal_logprobs=zeros)  # fmt: skip
    m = metrics(x, resolve(LossConfig("ppo")))
    for q in (1, 50, 99):
        exact = np.quantile(log_r, q / 100)
        assert np.log(m[f"importance/r_p{q}"]) == pytest.approx(exact, rel=0.05, abs=0.005)
    assert diagnostics.quantile(np.zeros(diagnostics.BINS), 0.5) == 1.0


@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf, 1e30, -1e30])
def test_nothing_masked_reaches_a_metric(poison):
    mask = np.array([[1, 0, 1, 0, 0, 1, 1]])
    clean = inputs(mask=mask)
    fields = ("logprobs", "proximal_logprobs", "behaviour_logprobs", "advantages")
    dirty = clean._replace(**{f: jnp.where(mask > 0, getattr(clean, f), poison) for f in fields})
    for config in (
        resolve(LossConfig("staleness_ppo")),
        resolve(LossConfig("decoupled_ppo", proximal="loglinear", proximal_check=True)),
    ):
        assert metrics(dirty, config, jnp.where(mask > 0, 1.0, poison)) == metrics(clean, config)


def test_clamped_log_ratios_are_counted():
    x = inputs(n=2, logprobs=[[500.0, -1.0]], proximal_logprobs=[[0.0, -1.0]], behaviour_logprobs=[[0.0, -1.0]])
    for name in ("ppo", "decoupled_ppo", "gspo"):
        m = metrics(x, resolve(LossConfig(name)))
        assert m["importance/log_ratio_clamped_fraction"] == 0.5
        assert all(np.isfinite(value) for value in m.values())


def test_a_batch_without_tokens_has_finite_metrics():
    m = metrics(inputs(mask=np.zeros((1, 7))), resolve(LossConfig("decoupled_ppo")))
    assert all(np.isfinite(value) for value in m.values())


def test_loglinear_is_compared_with_what_was_recomputed():
    x = inputs(**MIXED)
    m = metrics(x, resolve(LossConfig("decoupled_ppo", proximal="loglinear", proximal_check=True)))
    exact = np.array([0.4, 0, -0.3, 0.6, 0])  # p - b
    guessed = np.array([2 / 3 * 0.5, 0, 0, 0.2, 0])
    assert m["proximal/abs_error"] == pytest.approx(np.abs(exact - guessed).mean(), rel=1e-5)
    assert m["proximal/w_error"] == pytest.approx(np.abs(np.exp(exact) - np.exp(guessed)).mean(), rel=1e-5)


def test_sums_of_parts_are_the_sums_of_the_whole():
    config = resolve(LossConfig("decoupled_ppo"))
    x = inputs(staleness=[[0, 1, 2, 3, 4, 5, 20]])
    first = jnp.array([[1, 1, 1, 0, 0, 0, 0.0]])
    entropy = jnp.ones((1, 7))

    def sums(mask):
        return diagnostics.token_sums(run(x._replace(mask=mask), config), entropy, config)

    whole = sums(jnp.ones((1, 7)))
    joined = diagnostics.combine(diagnostics.combine(diagnostics.empty(whole), sums(first)), sums(1 - first))
    for key in whole:
        if not key.startswith("sample"):  # here one sequence is cut in two, which packing never does
            np.testing.assert_allclose(joined[key], whole[key], rtol=1e-6, err_msg=key)


def test_staleness_metrics_by_hand():
    rng = np.random.default_rng(0)
    mixed = trajectory(0, 2, 3, rng, policy_versions=np.array([-1, -1, 3, 4, 5], np.int32))
    fresh = trajectory(1, 1, 1, rng, policy_versions=np.array([-1, 5], np.int32))
    m = diagnostics.staleness_metrics([mixed, fresh], version=5)
    assert m["staleness/token_mean"] == pytest.approx((2 + 1 + 0 + 0) / 4)
    assert m["staleness/sequence_mean"] == 1.0
    assert m["staleness/token_max"] == 2
    assert m["staleness/hist"] == [2, 1, 1]
    assert m["staleness/mixed_fraction"] == 0.5
    assert m["staleness/versions_per_sequence"] == 2.0
    with pytest.raises(ValueError, match="newer than the trainer"):
        diagnostics.staleness_metrics([mixed], version=4)
    halved = dataclasses.replace(mixed, loss_mask=np.array([0, 0, 0, 1, 1], np.float32))
    m = diagnostics.staleness_metrics([halved, fresh], version=5)
    assert (m["staleness/token_max"], m["staleness/hist"]) == (1, [2, 1])
    nothing = dataclasses.replace(mixed, loss_mask=np.zeros(5, np.float32))
    m = diagnostics.staleness_metrics([nothing], version=5)
    assert m["staleness/token_mean"] == m["staleness/sequence_max"] == 0
    with pytest.raises(ValueError, match="newer than the trainer"):
        diagnostics.staleness_metrics([nothing], version=4)


def test_batch_metrics_by_hand():
    rng = np.random.default_rng(0)
    batch = [
        trajectory(i, 2, 3 + i, rng, prompt_id=i // 2, reward=r, finish_reason=f)
        for i, (r, f) in enumerate([(1.0, "stop"), (1.0, "stop"), (0.0, "length"), (0.0, "stop")])
    ]
    m = diagnostics.batch_metrics(batch)
    assert m["reward/mean"] == 0.5
    assert m["length/mean"] == 4.5
    assert m["length/max"] == 6
    assert m["length/truncated_fraction"] == 0.25
    assert m["length/incorrect_truncated_fraction"] == 0.5
    assert m["length/correct_truncated_fraction"] == 0
    assert m["group/all_pass_fraction"] == m["group/all_fail_fraction"] == 0.5
    assert m["length/correct_mean"] == 3.5


def test_advantage_and_value_metrics_by_hand():
    masks = [np.array([0, 1, 1]), np.array([1, 0])]
    advantages = [np.array([9.0, 1.0, -1.0]), np.array([3.0, 9.0])]
    m = diagnostics.advantage_metrics(advantages, masks)
    assert m["advantage/mean"] == pytest.approx(1.0)
    assert m["advantage/positive_fraction"] == pytest.approx(2 / 3)
    returns, values = [np.array([0, 1.0, 2.0]), np.array([3.0, 0])], [np.array([9, 1.0, 2.0]), np.array([2.0, 9])]
    residual = np.var([0, 0, 1.0]) / np.var([1.0, 2, 3])
    assert diagnostics.value_metrics(values, returns, masks)["value/explained_variance"] == pytest.approx(1 - residual)
    constant = [np.ones(3), np.ones(2)]
    assert diagnostics.value_metrics(values, constant, masks)["value/explained_variance"] == 0.0
    v = np.random.default_rng(0).standard_normal(200).astype(np.float32)
    residue = (np.float32(0.7) - v) + v  # constant but for rounding
    assert np.ptp(residue) > 0
    assert diagnostics.value_metrics([v], [residue], [np.ones(200)])["value/explained_variance"] == 0.0
    assert diagnostics.advantage_metrics(advantages, [m * 0 for m in masks]) == {}
