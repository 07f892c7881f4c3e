"""Every objective x aggregation: the way that a batch is laid out changes neither its gradient nor its metrics.

Through the train step's own `update`, with a model so small (a bigram table) that what is left of differences is the
order of sums.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_jax import sharding
from areal_jax.data import packing
from areal_jax.rl import corrections
from areal_jax.rl.corrections import AGGREGATIONS
from areal_jax.rl.losses import LOSSES, LossConfig, resolve
from areal_jax.trainer import train_step
from areal_jax.types import Output, Targets
from tests.helpers import trajectory

VOCABULARY, WIDTH, LONGEST, MOST = 17, 8, 8, 10
VERSION = 6
TOLERANCE = 1e-6  # of the largest entry
OBJECTIVES = {
    **{name: {"name": name} for name in LOSSES if name != "sft"},
    "staleness_ppo, batch": {"name": "staleness_ppo", "staleness_scope": "batch"},
    "ppo, critic": {"name": "ppo", "entropy_coefficient": 0.1, "kl_estimator": "k2"},
    "decoupled_ppo, sequence mask, loglinear": {
        "name": "decoupled_ppo",
        "proximal": "loglinear",
        "importance_weight": "mask",
        "importance_level": "sequence",
        "importance_low": 0.9,
        "importance_cap": 1.1,
        "opsm_threshold": 0.05,
        "dual_clip": 1.5,
    },
}
LAYOUTS = {
    # (row length, rows, micro-batches, devices)
    "one micro-batch": (24, 12, 1, 1),
    "padded, a sequence a row, a row a micro-batch": (8, 1, 12, 1),
    "packed, two devices": (16, 4, 4, 2),
    "packed, four devices": (16, 4, 4, 4),
}


class Bigram:
    """Logits of the next token from the token alone; stands in for a transformer."""

    def __init__(self, mesh):
        self.mesh = mesh

    def join(self, frozen, trained):
        return trained

    def bind(self, params):
        def hidden(tokens, positions, segment_ids):
            return params["embedding"][tokens]

        hidden.output = lambda: Output(lambda head, x: x @ head, params["head"])
        return hidden


class HeadOnBigram:
    """A critic's head on the bigram's hidden state."""

    backbone = None

    def hidden(self, params, policy_hidden, inputs):
        return policy_hidden


def keep_gradient():
    """An 'optimizer' whose state is the last gradient, so that no parameter's rounding stands between."""
    return optax.GradientTransformation(
        lambda params: jax.tree.map(jnp.zeros_like, params),
        lambda grads, state, params: (jax.tree.map(jnp.zeros_like, grads), grads),
    )


shapes = st.lists(st.tuples(st.integers(1, 2), st.integers(1, LONGEST - 2)), min_size=1, max_size=MOST)


def random_batch(rng, lengths):
    """Trajectories with prompts, masked tokens and versions that never fall; A and p per token.

    lengths: (prompt, response) of each.
    """
    batch = []
    for i, (prompt, response) in enumerate(lengths):
        drawn = np.arange(prompt + response) >= prompt
        versions = np.where(drawn, np.sort(rng.integers(0, VERSION + 1, prompt + response)), -1).astype(np.int32)
        mask = (drawn & (rng.random(prompt + response) < 0.9)).astype(np.float32)
        b = np.where(drawn, -2.8 + 0.4 * rng.standard_normal(prompt + response), 0).astype(np.float32)
        batch.append(
            trajectory(i, prompt, response, rng, policy_versions=versions, loss_mask=mask, behaviour_logprobs=b)
        )
    advantages = [(rng.standard_normal() * t.loss_mask).astype(np.float32) for t in batch]
    proximal = [(t.behaviour_logprobs + 0.1 * rng.standard_normal(len(t.tokens))).astype(np.float32) for t in batch]
    return batch, advantages, proximal


@functools.cache
def program(objective, layout):
    """(mesh rows' sharding, jitted gradients and sums of all aggregations)."""
    devices = LAYOUTS[layout][3]
    mesh = sharding.make_mesh({"data": devices, "fsdp": 1, "tensor": 1}, jax.devices()[:devices])
    rows = sharding.named(mesh, (None, "batch", None))

    def run(params, batch, targets):
        results = {}
        for how in AGGREGATIONS:
            shared = {"aggregation": how, "constant_length": 7, "kl_coefficient": 0.01}
            loss = resolve(LossConfig(**shared | OBJECTIVES[objective]))
            config = train_step.StepConfig(loss, scale_by_ess=True, diagnostics=how == "token_mean")
            zeros = jax.tree.map(jnp.zeros_like, params)
            state, critic = train_step.TrainState(params["policy"], zeros["policy"]), None
            if "critic" in objective:
                critic = HeadOnBigram()
                values = train_step.CriticState(params["critic"], zeros["critic"])
                state = dataclasses.replace(state, critic=values)
            ones = train_step.Rates(jnp.float32(1), jnp.float32(1))
            after, sums = train_step.update(
                Bigram(mesh), critic, keep_gradient(), config, state, batch, targets, jnp.int32(VERSION), ones
            )
            gradient = (after.opt_state, after.critic.opt_state if critic else {})
            results[how] = (gradient, sums)
        return results

    return rows, jax.jit(run, compiler_options={"xla_llvm_disable_expensive_passes": True})


def outcome(objective, layout, params, batch, advantages, proximal):
    row_length, rows, micro_batches, _ = LAYOUTS[layout]
    packed, where = packing.pack(batch, packing.PackingConfig(row_length, rows, LONGEST), micro_batches)
    targets = Targets(
        advantages=where.spread(advantages),
        proximal_logprobs=where.spread(proximal),
        reference_logprobs=where.spread([t.behaviour_logprobs for t in batch]),
    )
    if "critic" in objective:
        returns = where.spread([np.full(len(t.tokens), t.reward) for t in batch])
        targets = dataclasses.replace(targets, values=targets.advantages, returns=returns)
    place, run = program(objective, layout)
    packed, targets = jax.tree.map(lambda x: jax.device_put(x, place) if np.ndim(x) == 3 else x, (packed, targets))
    return jax.device_get(run(params, packed, targets))


def random_params(rng):
    policy = {
        "embedding": rng.standard_normal((VOCABULARY, WIDTH)).astype(np.float32) * 0.4,
        "head": rng.standard_normal((WIDTH, VOCABULARY)).astype(np.float32) * 0.4,
    }
    return {"policy": policy, "critic": {"head": rng.standard_normal(WIDTH).astype(np.float32)}}


def assert_same(got, wanted, what):
    """Gradients to 1e-6 of the largest entry; sums likewise, each of its own size."""
    for how in AGGREGATIONS:
        scale = max(float(np.abs(x).max()) for x in jax.tree.leaves(wanted[how][0]))
        for a, b in zip(jax.tree.leaves(got[how][0]), jax.tree.leaves(wanted[how][0]), strict=True):
            np.testing.assert_allclose(a, b, rtol=0, atol=TOLERANCE * scale + 1e-12, err_msg=f"{what}, {how}")
        for key in wanted[how][1]:
            value, other = np.asarray(wanted[how][1][key]), np.asarray(got[how][1][key])
            if key.startswith("histogram"):  # a ratio on the edge of a bin may round to either side
                assert np.abs(other - value).sum() <= 2, f"{what}, {how}, {key}"
            else:
                size = np.abs(value[np.isfinite(value)]).max(initial=0.0)
                np.testing.assert_allclose(
                    other, value, rtol=0, atol=4e-6 * max(1.0, size), err_msg=f"{what}, {how}, {key}"
                )


@pytest.mark.parametrize("objective", OBJECTIVES)
@settings(max_examples=10, deadline=None, derandomize=True)
@given(lengths=shapes, seed=st.integers(0, 2**31))
def test_padding_packing_order_split_and_data_parallel_degree(objective, lengths, seed):
    rng = np.random.default_rng(seed)
    batch, advantages, proximal = random_batch(rng, lengths)
    params = random_params(rng)
    wanted = outcome(objective, "one micro-batch", params, batch, advantages, proximal)
    order = rng.permutation(len(batch))
    shuffled = [[values[i] for i in order] for values in (batch, advantages, proximal)]
    for layout in LAYOUTS:
        got = outcome(objective, layout, params, *shuffled)
        assert_same(got, wanted, layout)


def test_it_can_fail(monkeypatch):
    """A mean per micro-batch, the usual mistake, is far outside the tolerance."""
    rng = np.random.default_rng(0)
    batch, advantages, proximal = random_batch(rng, [(1, 2), (2, 6), (1, 4)])
    params = random_params(rng)
    real = corrections.aggregate

    def mean(*arguments):
        total, denominator = real(*arguments)
        return total / jnp.maximum(denominator, 1.0), jnp.float32(1)

    monkeypatch.setattr(corrections, "aggregate", mean)
    program.cache_clear()
    wanted, got = (outcome("ppo", layout, params, batch, advantages, proximal) for layout in list(LAYOUTS)[:2])
    program.cache_clear()
    with pytest.raises(AssertionError):
        assert_same(got, wanted, "a mean per micro-batch")
