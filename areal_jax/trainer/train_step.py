"""The jitted functions of the trainer: the proximal forward and one optimiser update.

Both loop over the micro-batches in use of a packed minibatch with a dynamic trip count, so that one compiled program
serves batches of every size. Gradients are summed in float32 and divided once by the minibatch's token count.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float

from areal_jax import sharding
from areal_jax.models.transformer import Model
from areal_jax.rl import diagnostics
from areal_jax.rl.logprobs import token_logprobs
from areal_jax.rl.losses import LOSSES, LossConfig, TokenInputs
from areal_jax.types import Params, TrainBatch


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """What an update changes. Donated to the step: use only the state that it returns."""

    params: Params
    opt_state: Any


class Programs(NamedTuple):
    """The trainer's compiled functions."""

    proximal: Any
    """(params, batch) -> float32 [M, R, L]: log-probs of the batch's tokens under `params`."""
    update: Any
    """(state, batch, proximal_logprobs, version, learning_rate) -> (state, sums)."""


def init_state(params: Params, model: Model, optimizer: optax.GradientTransformation) -> TrainState:
    """Optimizer state beside its parameters, sharded like them."""
    return TrainState(params, jax.jit(optimizer.init, out_shardings=_opt_shardings(model, optimizer))(params))


def compile_programs(
    model: Model,
    optimizer: optax.GradientTransformation,
    config: LossConfig,
    temperature: float,
    batch: TrainBatch,
) -> Programs:
    """Compiles both functions ahead of time for batches shaped like `batch`; they compile nothing later.

    temperature: the sampling temperature, at which all log-probs are taken.
    """
    proximal = jax.jit(lambda params, b: proximal_logprobs(model, temperature, params, b))

    def step(state: TrainState, b: TrainBatch, p: Array, version: Array, rate: Array) -> tuple[TrainState, Any]:
        return update(model, optimizer, config, temperature, state, b, p, version, rate)

    params = model.abstract_params
    opt_state = jax.tree.map(_abstract, jax.eval_shape(optimizer.init, params), _opt_shardings(model, optimizer))
    placed = jax.tree.map(_abstract, batch, batch_shardings(model))
    old = jax.ShapeDtypeStruct(batch.tokens.shape, jnp.float32, sharding=batch_shardings(model).tokens)
    scalars = [jax.ShapeDtypeStruct((), t, sharding=sharding.replicated(model.mesh)) for t in (jnp.int32, jnp.float32)]
    state_shardings = jax.tree.map(lambda x: x.sharding, TrainState(params, opt_state))
    return Programs(
        proximal=proximal.lower(params, placed).compile(),
        update=jax.jit(step, donate_argnums=0, out_shardings=(state_shardings, None))
        .lower(TrainState(params, opt_state), placed, old, *scalars)
        .compile(),
    )


def batch_shardings(model: Model) -> TrainBatch:
    """Rows over the data and fsdp axes; everything else whole."""
    rows = sharding.named(model.mesh, (None, "batch", None))
    fields = [f.name for f in dataclasses.fields(TrainBatch)]
    return TrainBatch(*[rows if f != "micro_batches" else sharding.replicated(model.mesh) for f in fields])


def place(batch: TrainBatch, model: Model) -> TrainBatch:
    """Moves a packed batch to the mesh."""
    return jax.device_put(batch, batch_shardings(model))


def scalar(value: float, dtype: Any, model: Model) -> Array:
    """A replicated scalar argument of a compiled step."""
    return jax.device_put(np.asarray(value, dtype), sharding.replicated(model.mesh))


def proximal_logprobs(model: Model, temperature: float, params: Params, batch: TrainBatch) -> Float[Array, "M R L"]:
    """Log-probs of the batch's tokens under `params`, held fixed for the whole training step."""

    def one(i: Array, out: Array) -> Array:
        micro = _micro_batch(batch, i)
        return out.at[i].set(_forward(model, temperature, params, micro)[0])

    return jax.lax.fori_loop(0, batch.micro_batches, one, jnp.zeros(batch.tokens.shape, jnp.float32))


def update(
    model: Model,
    optimizer: optax.GradientTransformation,
    config: LossConfig,
    temperature: float,
    state: TrainState,
    batch: TrainBatch,
    proximal: Float[Array, "M R L"],
    version: Array,
    learning_rate: Array,
) -> tuple[TrainState, diagnostics.Sums]:
    """One optimiser update over a packed minibatch; returns the new state and the sums for the metrics."""

    def loss(params: Params, i: Array) -> tuple[Array, diagnostics.Sums]:
        micro = _micro_batch(batch, i)
        logprobs, entropy = _forward(model, temperature, params, micro)
        x = TokenInputs(
            logprobs=logprobs,
            proximal_logprobs=proximal[i],
            behaviour_logprobs=micro.behaviour_logprobs,
            advantages=micro.advantages,
            mask=micro.loss_mask,
            staleness=jnp.where(micro.loss_mask > 0, version - micro.policy_versions, 0),
        )
        losses = LOSSES[config.name](x, config)
        objective = losses.loss - config.entropy_coefficient * entropy
        total = jnp.sum(jnp.where(x.mask > 0, objective, 0.0))
        return total, diagnostics.token_sums(x, losses, entropy, config)

    gradient = jax.grad(loss, has_aux=True)

    def accumulate(i: Array, carry: tuple[Params, diagnostics.Sums]) -> tuple[Params, diagnostics.Sums]:
        grads, sums = gradient(state.params, i)
        return jax.tree.map(jnp.add, carry[0], grads), diagnostics.combine(carry[1], sums)

    zero_sums = jax.tree.map(jnp.zeros_like, jax.eval_shape(loss, state.params, jnp.int32(0))[1])
    zeros = (jax.tree.map(jnp.zeros_like, state.params), zero_sums)
    grads, sums = jax.lax.fori_loop(0, batch.micro_batches, accumulate, zeros)
    tokens = jnp.maximum(jnp.sum(batch.loss_mask), 1.0)
    grads = jax.tree.map(lambda g: g / tokens, grads)
    direction, opt_state = optimizer.update(grads, state.opt_state, state.params)
    params = jax.tree.map(lambda p, u: p + learning_rate * u, state.params, direction)
    return TrainState(params, opt_state), sums | {"max_grad_norm": optax.tree.norm(grads)}


def _forward(model: Model, temperature: float, params: Params, micro: TrainBatch) -> tuple[Array, Array]:
    policy = model.bind(params)
    hidden = policy(micro.tokens, micro.positions, micro.segment_ids)
    return token_logprobs(hidden, policy.logits, micro.tokens, micro.positions, temperature)


def _micro_batch(batch: TrainBatch, i: Array) -> TrainBatch:
    """The i-th micro-batch: the same record without its leading axis."""
    values = {f.name: getattr(batch, f.name) for f in dataclasses.fields(TrainBatch)}
    return TrainBatch(**{k: v if k == "micro_batches" else v[i] for k, v in values.items()})


def _opt_shardings(model: Model, optimizer: optax.GradientTransformation) -> Any:
    """Shardings of the optimizer state: moments like their parameters, counters replicated."""
    abstract = jax.eval_shape(optimizer.init, model.abstract_params)
    return optax.tree_map_params(
        optimizer,
        lambda _, param: param.sharding,
        abstract,
        model.abstract_params,
        transform_non_params=lambda _: sharding.replicated(model.mesh),
    )


def _abstract(x: Any, s: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s)
