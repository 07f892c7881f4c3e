"""From rewards to advantages: shaping, estimators by hand, what has no signal."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_jax.rl import advantages as adv
from areal_jax.rl import rewards
from areal_jax.rl.advantages import AdvantageConfig, Outcomes
from tests.helpers import trajectory


def outcomes(sequence_rewards, groups, lengths=None, **changes):
    masks = [np.ones(n, np.float32) for n in (lengths or [1] * len(sequence_rewards))]
    return Outcomes(np.array(sequence_rewards, np.float32), np.array(groups), **{"masks": masks} | changes)


def test_group_advantages_by_hand():
    sequence_rewards, groups = np.array([1.0, 0, 0, 1, 1, 1, 5]), np.array([7, 7, 7, 2, 2, 2, 9])
    std = np.sqrt(((2 / 3) ** 2 + 2 * (1 / 3) ** 2) / 2)
    np.testing.assert_allclose(
        adv.group_norm(sequence_rewards, groups), [2 / 3 / std, -1 / 3 / std, -1 / 3 / std, 0, 0, 0, 0], rtol=1e-5
    )
    np.testing.assert_allclose(adv.dr_grpo(sequence_rewards, groups)[:3], [2 / 3, -1 / 3, -1 / 3], rtol=1e-6)
    np.testing.assert_allclose(adv.rloo(sequence_rewards, groups)[:3], [1, -0.5, -0.5], rtol=1e-6)
    for estimate in (adv.group_norm, adv.dr_grpo, adv.rloo):
        assert (estimate(sequence_rewards, groups)[3:] == 0).all()  # zero variance, and a singleton


def test_a_group_whose_equal_rewards_have_no_exact_mean_gets_exactly_zero():
    """Three times .1 in float32: the mean of the sum is not .1, and a residue over 1e-6 would be a signal."""
    for estimate in (adv.group_norm, adv.dr_grpo, adv.rloo):
        assert (estimate(np.full(3, 0.1, np.float32), np.zeros(3)) == 0).all()
    same = outcomes([0.1] * 3, [0] * 3)
    for values in adv.batch_norm(same, AdvantageConfig()):
        assert (values == 0).all()


def test_batch_norm_whitens_over_tokens():
    """Rewards 1 and -1 over 3 tokens and 1: mean .5, variance .75."""
    found = adv.batch_norm(outcomes([1.0, -1.0], [0, 1], [3, 1]), AdvantageConfig())
    np.testing.assert_allclose(found[0], np.full(3, 0.5 / np.sqrt(0.75)), rtol=1e-5)
    np.testing.assert_allclose(found[1], [-1.5 / np.sqrt(0.75)], rtol=1e-5)


def test_one_value_per_trajectory_lies_on_counted_tokens_and_has_the_token_rewards_in_it():
    masks = [np.array([0, 1, 0, 1], np.float32), np.array([1, 1], np.float32)]
    token_rewards = [np.array([9, -0.25, 9, 0.5], np.float32), np.array([0.0, 0.5], np.float32)]
    found = adv.estimate(
        outcomes([1.0, 0.0], [0, 0], masks=masks, token_rewards=token_rewards), AdvantageConfig("dr_grpo")
    )
    np.testing.assert_allclose(found[0], [0, 0.375, 0, 0.375])  # 1.25 against a mean of .875
    np.testing.assert_allclose(found[1], [-0.375, -0.375])


def test_gae_by_hand():
    """gamma .5, lambda .5, values [1, 2, 4], the reward 8 at the end, the token at index 2 masked."""
    values = np.array([7, 1, 100, 2, 4], np.float32)
    masks = [np.array([0, 1, 0, 1, 1], np.float32)]
    found = adv.gae(outcomes([8.0], [0], masks=masks, values=[values]), AdvantageConfig("gae", gamma=0.5, lam=0.5))
    d3 = 8 - 4
    d2 = 0.5 * 4 - 2
    d1 = 0.5 * 2 - 1
    np.testing.assert_allclose(found[0], [0, d1 + 0.25 * (d2 + 0.25 * d3), 0, d2 + 0.25 * d3, d3])


def test_gae_without_discount_is_what_is_left_to_gain():
    rng = np.random.default_rng(0)
    values = rng.standard_normal(6).astype(np.float32)
    (found,) = adv.gae(outcomes([3.0], [0], [6], values=[values]), AdvantageConfig("gae"))
    np.testing.assert_allclose(found, 3.0 - values, rtol=1e-5)
    with pytest.raises(ValueError, match="values of a critic"):
        adv.gae(outcomes([3.0], [0], [6]), AdvantageConfig("gae"))


def test_reinforce_pp_by_hand():
    """Returns with gamma .5: [.5, 1] and [-1]; with the group's mean off, [.5, 1] and [-1] of rewards 2 and 0."""
    data = outcomes([1.0, -1.0], [0, 0], [2, 1])
    expected = np.array([0.5, 1.0, -1.0])
    expected = (expected - expected.mean()) / expected.std()
    for changed, config in (
        (data, AdvantageConfig("reinforce_pp", gamma=0.5)),
        (data._replace(rewards=data.rewards + 1), AdvantageConfig("reinforce_pp", gamma=0.5, group_baseline=True)),
    ):
        np.testing.assert_allclose(np.concatenate(adv.estimate(changed, config)), expected, rtol=1e-5)


def test_returns_carry_token_rewards_back():
    token_rewards = [np.array([0.0, 1.0, 2.0], np.float32)]
    (found,) = adv.returns(outcomes([10.0], [0], [3], token_rewards=token_rewards), 1.0)
    np.testing.assert_allclose(found, [13, 13, 12])


def test_whitening_ignores_what_is_masked():
    masks = [np.array([1, 0, 1], np.float32), np.array([1, 0], np.float32)]
    values = [np.array([1, np.nan, 3], np.float32), np.array([5, np.inf], np.float32)]
    found = adv.whiten(values, masks)
    np.testing.assert_allclose(np.concatenate(found), [-np.sqrt(1.5), 0, 0, np.sqrt(1.5), 0], rtol=1e-5)
    assert all((f == 0).all() for f in adv.whiten(values, [m * 0 for m in masks]))


@settings(max_examples=50, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 3), st.sampled_from([0.0, 0.1, 1.0]), st.integers(0, 4)), min_size=1, max_size=20
    ),
    st.randoms(),
)
def test_advantages_follow_their_samples_in_any_order(members, random):
    groups, sequence_rewards, lengths = (np.array(c) for c in zip(*members, strict=True))
    order = list(range(len(members)))
    random.shuffle(order)
    values = [np.linspace(0, 1, n).astype(np.float32) for n in lengths]
    here = outcomes(sequence_rewards, groups, lengths.tolist(), values=values)
    there = outcomes(sequence_rewards[order], groups[order], lengths[order].tolist(), values=[values[i] for i in order])
    for name in adv.ADVANTAGES:
        a, b = (adv.estimate(o, AdvantageConfig(name, gamma=0.9, lam=0.8)) for o in (here, there))
        for i, j in enumerate(order):
            np.testing.assert_allclose(a[j], b[i], atol=1e-5)
            assert np.isfinite(b[i]).all()


# --- shaping ---


def answered(length, reward, finish_reason="stop", prompt_id=0):
    return trajectory(
        0, 2, length, np.random.default_rng(0), reward=reward, finish_reason=finish_reason, prompt_id=prompt_id
    )


def test_shaping_by_hand():
    batch = [answered(5, 1.0), answered(5, 0.0), answered(5, 100.0)]
    config = rewards.ShapingConfig(bias=-0.5, scale=10.0, max_response_length=10)
    np.testing.assert_allclose(rewards.shape(batch, config), [5, -5, 20])
    np.testing.assert_allclose(rewards.shape(batch, rewards.ShapingConfig(clip=50.0)), [1, 0, 50])


def test_the_overlong_penalty_by_hand():
    """Limit 10, buffer 4, factor 2: nothing up to 6 tokens, -.5 each above; scaled with the reward."""
    config = rewards.ShapingConfig(overlong_buffer=4, overlong_factor=2.0, max_response_length=10)
    batch = [answered(n, 1.0) for n in (1, 6, 7, 10)]
    np.testing.assert_allclose(rewards.shape(batch, config), [1, 1, 0.5, -1])
    doubled = dataclasses.replace(config, scale=2.0)
    np.testing.assert_allclose(rewards.shape(batch, doubled), [2, 2, 1, -2])


def test_truncated_samples_are_known_by_their_finish_reason():
    """The one that stopped by itself at the limit is not truncated."""
    batch = [answered(10, 5.0, "stop"), answered(10, -5.0, "length"), answered(3, 5.0)]
    config = rewards.ShapingConfig(truncated="zero_reward", bias=1.0, max_response_length=10)
    np.testing.assert_allclose(rewards.shape(batch, config), [6, 0, 6])
    masked = rewards.mask_truncated(batch, rewards.ShapingConfig(truncated="mask"))
    assert [bool(t.loss_mask.any()) for t in masked] == [True, False, True]
    assert rewards.mask_truncated(batch, rewards.ShapingConfig()) == batch


def test_groups_without_variance_lose_their_tokens():
    batch = [answered(3, r, prompt_id=p) for p, r in ((0, 1.0), (0, 1.0), (1, 0.0), (1, 1.0), (2, 0.1))]
    kept = [bool(t.loss_mask.any()) for t in rewards.mask_zero_variance(batch)]
    assert kept == [False, False, True, True, False]


def test_the_kl_reward_by_hand():
    t = answered(3, 1.0)
    t = dataclasses.replace(t, loss_mask=np.array([0, 0, 1, 0, 1], np.float32))
    reference = np.array([np.nan, 0, -1, np.inf, -2], np.float32)
    found = rewards.kl_reward(t, reference, 0.1)
    b = t.behaviour_logprobs
    np.testing.assert_allclose(found, [0, 0, -0.1 * (b[2] + 1), 0, -0.1 * (b[4] + 2)], rtol=1e-5)
