"""The jitted functions of the trainer: the forwards before a training step and one optimiser update.

All loop over the micro-batches in use of a packed minibatch with a dynamic trip count, so that one compiled program
serves batches of every size. Sums of the gradient, of the loss and of its denominator are kept in float32; what is
differentiated is each micro-batch's sum over the whole minibatch's denominator, which depends on masks alone.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float

from areal_jax import sharding
from areal_jax.models.critic import Critic
from areal_jax.models.transformer import Model, Transformer
from areal_jax.rl import corrections, diagnostics
from areal_jax.rl.logprobs import token_logprobs, token_values
from areal_jax.rl.losses import LOSSES, LossConfig, TokenInputs, log_ratio
from areal_jax.rl.values import value_loss
from areal_jax.types import Params, Targets, TrainBatch


@dataclasses.dataclass(frozen=True)
class CriticConfig:
    """The keys of `config.critic` that shape its update."""

    coefficient: float = 0.5
    """Of the value loss beside the policy's, for a head on the policy."""
    clip: float = 0.5
    """Of the change of a value in one training step; 0 is off."""


@dataclasses.dataclass(frozen=True)
class StepConfig:
    """What a training step minimises and reports."""

    loss: LossConfig
    """Resolved."""
    temperature: float = 1.0
    """Of sampling, at which all log-probs are taken."""
    critic: CriticConfig = CriticConfig()
    scale_by_ess: bool = False
    """Multiply the learning rate by `corrections.step_scale`."""
    with_reference: bool = False
    """Whether a reference policy's log-probs are needed, in the loss or elsewhere."""
    diagnostics: bool = True
    """False: only what the loss itself is made of is reported."""
    logprob_chunk: int = 0
    """Tokens whose logits a device has at once; 0: an eighth of a micro-batch's, from 128 to 4096."""
    offload: bool = False
    """Keep the optimizer's state in the host's memory between steps."""
    halvings: int = 0
    """The most that a batch's `halvings` may be; a step is compiled for every number of parts up to 2^halvings."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class CriticState:
    """The critic's parameters (`models.critic.Critic`) and their optimizer state."""

    params: Params
    opt_state: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """What an update changes, and what it stands on. Donated to the step, but for `frozen`: use only the state that it
    returns."""

    params: Params
    """What is trained: all of the policy, or its adapters (`Model.split`)."""
    opt_state: Any
    critic: CriticState | None = None
    frozen: Params = dataclasses.field(default_factory=dict)
    """The rest of the policy."""


WHOLE = ("micro_batches", "halvings")
"""The fields of TrainBatch that have no rows."""


def logprob_columns(chunk: int, rows: int, row_length: int) -> int:
    """Tokens of each row whose logits exist at once, where a device has [rows, row_length] of a micro-batch; chunk is
    StepConfig's."""
    return min(row_length, max(1, (chunk or min(4096, max(128, rows * row_length // 8))) // rows))


class Rates(NamedTuple):
    """Learning rates of one step, replicated float32 scalars."""

    policy: Any
    critic: Any


class Programs(NamedTuple):
    """The trainer's compiled functions."""

    before: Any
    """(state, batch) -> Before: what the step holds fixed, under the parameters before it."""
    logprobs: Any
    """(params, batch) -> float32 [M, R, L]: of the tokens that count, under a reference's parameters; None without."""
    update: Any
    """(state, batch, targets, version, rates) -> (state, sums)."""
    executable: Any
    """What `update` runs, for its memory analysis."""


class Before(NamedTuple):
    """Each float32 [M, R, L]; None where the configuration needs none."""

    logprobs: Any
    values: Any


def init_state(
    params: Params,
    model: Model,
    optimizer: optax.GradientTransformation,
    critic: Critic | None = None,
    offload: bool = False,
) -> TrainState:
    """A policy's parameters with optimizer state beside those that are trained, sharded like them; offload as in
    StepConfig."""

    def begin(params: Params, like: Params) -> Any:
        return jax.jit(optimizer.init, out_shardings=_opt_shardings(optimizer, like, model, offload))(params)

    frozen, trained = model.split(params)
    opt_state = begin(trained, model.split(model.abstract_params)[1])
    if critic is None:
        return TrainState(trained, opt_state, frozen=frozen)
    critic_params = critic.init_params(params)
    critic_opt = begin(critic_params, critic.abstract_params)
    return TrainState(trained, opt_state, CriticState(critic_params, critic_opt), frozen)


def compile_programs(
    model: Model,
    optimizer: optax.GradientTransformation,
    config: StepConfig,
    batch: TrainBatch,
    critic: Critic | None = None,
) -> Programs:
    """Compiles the functions ahead of time for batches shaped like `batch`; they compile nothing later."""

    def step(state: TrainState, frozen: Params, *rest: Any) -> tuple[TrainState, Any]:
        whole = dataclasses.replace(state, frozen=frozen)
        after, sums = update(model, critic, optimizer, config, whole, *rest)
        return dataclasses.replace(after, frozen={}), sums

    def moments(like: Params) -> Any:
        shardings = _opt_shardings(optimizer, like, model, config.offload)
        return jax.tree.map(_abstract, jax.eval_shape(optimizer.init, like), shardings)

    frozen, trained = model.split(model.abstract_params)
    changing = TrainState(trained, moments(trained))
    if critic is not None:
        values = critic.abstract_params
        changing = dataclasses.replace(changing, critic=CriticState(values, moments(values)))
    placed = jax.tree.map(_abstract, batch, batch_shardings(model))
    targets = _abstract_targets(config, batch, model, critic)
    everywhere = sharding.replicated(model.mesh)
    version, rate = (jax.ShapeDtypeStruct((), t, sharding=everywhere) for t in (jnp.int32, jnp.float32))
    rows = rows_sharding(model)  # as the targets that they become: no other layout is to be converted
    before = jax.jit(lambda s, b: forward_before(model, critic, config, s, b), out_shardings=rows)
    logprobs = jax.jit(lambda p, b: batch_logprobs(model, config, p, b), out_shardings=rows)
    after = (jax.tree.map(lambda x: x.sharding, changing), everywhere)
    lowered = jax.jit(step, donate_argnums=0, out_shardings=after).lower(
        changing, frozen, placed, targets, version, Rates(rate, rate)
    )
    executable = lowered.compile()

    def run(state: TrainState, *rest: Any) -> tuple[TrainState, diagnostics.Sums]:
        after, sums = executable(dataclasses.replace(state, frozen={}), state.frozen, *rest)
        return dataclasses.replace(after, frozen=state.frozen), sums

    return Programs(
        before=before.lower(dataclasses.replace(changing, frozen=frozen), placed).compile(),
        logprobs=logprobs.lower(model.abstract_params, placed).compile() if config.with_reference else None,
        update=run,
        executable=executable,
    )


def batch_shardings(model: Model) -> TrainBatch:
    """Rows over the data and fsdp axes, their tokens over context; everything else whole."""
    rows = rows_sharding(model)
    fields = [f.name for f in dataclasses.fields(TrainBatch)]
    return TrainBatch(*[rows if f not in WHOLE else sharding.replicated(model.mesh) for f in fields])


def rows_sharding(model: Model) -> jax.sharding.NamedSharding:
    """Of an array [M, R, L]."""
    return sharding.named(model.mesh, (None, "batch", "length"))


def place(batch: TrainBatch, model: Model) -> TrainBatch:
    """Moves a packed batch to the mesh."""
    return sharding.place(batch, batch_shardings(model))


def place_targets(targets: Targets, model: Model) -> Targets:
    """Moves targets to the mesh; those that are there already stay."""
    return jax.tree.map(lambda x: sharding.place(x, rows_sharding(model)), targets)


def scalar(value: float, dtype: Any, model: Model) -> Array:
    """A replicated scalar argument of a compiled step."""
    return sharding.place(np.asarray(value, dtype), sharding.replicated(model.mesh))


def needs(config: StepConfig, critic: Critic | None) -> tuple[bool, bool]:
    """Whether the forward before the step must give (log-probs, values)."""
    return corrections.needs_proximal_forward(config.loss), critic is not None


def forward_before(model: Model, critic: Critic | None, config: StepConfig, state: TrainState, b: TrainBatch) -> Before:
    """Log-probs and values of the batch's tokens under the parameters before the step, where they are needed."""
    with_logprobs, with_values = needs(config, critic)

    def look(i: Array, parts: int) -> Before:
        micro = _micro_batch(b, i, parts)
        policy = model.bind(model.join(state.frozen, state.params))
        hidden = policy(*_inputs(micro))  # traced, and not computed where nothing reads it
        logprobs = values = None
        if with_logprobs:
            logprobs = _logprobs(model, config, policy, hidden, micro)[0].reshape(b.tokens.shape[1:])
        if critic is not None and state.critic is not None:
            values = _values(critic, state.critic.params, hidden, micro).reshape(b.tokens.shape[1:])
        return Before(logprobs, values)

    def one(i: Array, out: Before) -> Before:
        return jax.tree.map(lambda all_, found: all_.at[i].set(found), out, _by_parts(look, config, b, i))

    zeros = jnp.zeros(b.tokens.shape, jnp.float32)
    start = Before(zeros if with_logprobs else None, zeros if with_values else None)
    return jax.lax.fori_loop(0, b.micro_batches, one, start)


def batch_logprobs(model: Model, config: StepConfig, params: Params, b: TrainBatch) -> Float[Array, "M R L"]:
    """Log-probs of the batch's tokens that count, under any parameters."""

    def look(i: Array, parts: int) -> Array:
        micro = _micro_batch(b, i, parts)
        policy = model.bind(params)
        hidden = policy(*_inputs(micro))
        return _logprobs(model, config, policy, hidden, micro)[0].reshape(b.tokens.shape[1:])

    def one(i: Array, out: Array) -> Array:
        return out.at[i].set(_by_parts(look, config, b, i))

    return jax.lax.fori_loop(0, b.micro_batches, one, jnp.zeros(b.tokens.shape, jnp.float32))


def update(
    model: Model,
    critic: Critic | None,
    optimizer: optax.GradientTransformation,
    config: StepConfig,
    state: TrainState,
    batch: TrainBatch,
    targets: Targets,
    version: Array,
    rates: Rates,
) -> tuple[TrainState, diagnostics.Sums]:
    """One optimiser update over a packed minibatch; returns the new state and the sums for the metrics.

    Where the loss or a gradient is not finite the state stays as it was, and sums["skipped"] is 1.
    """
    critic_params = None if state.critic is None else state.critic.params
    statistic = _statistic(model, config, model.join(state.frozen, state.params), batch, targets, version)

    def loss(trained: tuple[Params, Params | None], i: Array, parts: int = 1) -> tuple[Array, diagnostics.Sums]:
        params, values_params = trained
        micro, target = _micro_batch(batch, i, parts), jax.tree.map(lambda x: _cut(x[i], parts), targets)
        policy = model.bind(model.join(state.frozen, params))
        hidden = policy(*_inputs(micro))
        logprobs, entropy = _logprobs(model, config, policy, hidden, micro)
        x = token_inputs(micro, target, logprobs, version, statistic)
        found = corrections.policy_loss(x, entropy, target.reference_logprobs, config.loss)
        sums: diagnostics.Sums = {
            "objective": found.total,
            "denominator": found.denominator,
            "counted": jnp.sum(x.mask),
        }
        if config.scale_by_ess:
            ratios = log_ratio(found.inputs.logprobs, found.inputs.behaviour_logprobs)
            sums["step_sample"] = corrections.effective_sample(ratios, found.inputs)
        if config.diagnostics:
            sums |= diagnostics.token_sums(found, entropy, config.loss)
        total = found.total
        if critic is not None:
            values = _values(critic, values_params, hidden, micro)
            each, clipped = value_loss(values, target.values, target.returns, x.mask, config.critic.clip)
            sums |= {"value_loss": jnp.sum(each), "value_clipped": jnp.sum(clipped)}
            # the sums are divided by the policy's denominator: this makes it a mean over tokens all the same
            share = denominator / jnp.maximum(jnp.sum(batch.loss_mask), 1.0)
            total = total + jnp.sum(each) * share * (config.critic.coefficient if critic.backbone is None else 1.0)
        return total / denominator, sums  # divided here, so that no pass over the gradient is needed for it

    denominator = jnp.maximum(_denominator(config.loss, batch), 1.0)
    trained = (state.params, critic_params)

    def gradient(i: Array) -> tuple[Any, diagnostics.Sums]:
        return _by_parts(lambda i, parts: jax.grad(loss, has_aux=True)(trained, i, parts=parts), config, batch, i)

    def accumulate(i: Array, carry: tuple[Any, diagnostics.Sums]) -> tuple[Any, diagnostics.Sums]:
        grads, sums = gradient(i)
        return jax.tree.map(jnp.add, carry[0], grads), diagnostics.combine(carry[1], sums)

    if batch.tokens.shape[0] == 1:  # no sum to begin with zeros, which for a large model takes as long as its optimizer
        grads, sums = gradient(jnp.int32(0))
    else:
        no_sums = diagnostics.empty(jax.eval_shape(loss, trained, jnp.int32(0))[1])
        zeros = (jax.tree.map(jnp.zeros_like, trained), no_sums)
        grads, sums = jax.lax.fori_loop(0, batch.micro_batches, accumulate, zeros)
    policy_grads, critic_grads = grads
    rate = rates.policy
    if config.scale_by_ess:
        scale = corrections.step_scale(sums.pop("step_sample"))
        rate, sums = rate * scale, sums | {"min_step_scale": scale}
    state = _on_device(state, model, critic, optimizer) if config.offload else state
    norms = {"max_grad_norm": optax.tree.norm(policy_grads)}
    if state.critic is not None:
        norms["max_critic_grad_norm"] = optax.tree.norm(critic_grads)

    def descend(state: TrainState) -> TrainState:
        params, opt_state = _descend(optimizer, policy_grads, state.opt_state, state.params, rate)
        critic = state.critic
        if critic is not None:
            critic = CriticState(*_descend(optimizer, critic_grads, critic.opt_state, critic.params, rates.critic))
        return dataclasses.replace(state, params=params, opt_state=opt_state, critic=critic)

    finite = jnp.all(jnp.isfinite(jnp.stack([sums["objective"], *norms.values()])))
    after = jax.lax.cond(finite, descend, lambda state: state, dataclasses.replace(state, frozen={}))
    return dataclasses.replace(after, frozen=state.frozen), sums | norms | {"skipped": 1 - finite.astype(jnp.int32)}


def _on_device(
    state: TrainState, model: Model, critic: Critic | None, optimizer: optax.GradientTransformation
) -> TrainState:
    """With the optimizers' states brought back from the host's memory."""
    trained = model.split(model.abstract_params)[1]
    moved = jax.device_put(state.opt_state, _opt_shardings(optimizer, trained, model))
    state = dataclasses.replace(state, opt_state=moved)
    if state.critic is None or critic is None:
        return state
    moved = jax.device_put(state.critic.opt_state, _opt_shardings(optimizer, critic.abstract_params, model))
    return dataclasses.replace(state, critic=CriticState(state.critic.params, moved))


def token_inputs(micro: TrainBatch, target: Targets, logprobs: Array, version: Array, statistic: Array) -> TokenInputs:
    """What the objective sees of a micro-batch (or of a whole batch)."""
    proximal = micro.behaviour_logprobs if target.proximal_logprobs is None else target.proximal_logprobs
    return TokenInputs(
        logprobs=logprobs,
        proximal_logprobs=proximal,
        behaviour_logprobs=micro.behaviour_logprobs,
        advantages=target.advantages,
        mask=micro.loss_mask,
        staleness=jnp.where(micro.loss_mask > 0, version - micro.policy_versions, 0),
        segment_ids=micro.segment_ids,
        statistic=statistic,
    )


def _statistic(
    model: Model, config: StepConfig, params: Params, batch: TrainBatch, targets: Targets, version: Array
) -> Array:
    """The objective's statistic of the whole minibatch under the current parameters."""
    logprobs = batch.behaviour_logprobs
    if LOSSES[config.loss.name].statistic_of_policy:
        logprobs = batch_logprobs(model, config, params, batch)
    x = token_inputs(batch, targets, logprobs, version, jnp.zeros(()))
    return corrections.batch_statistic(x, config.loss)


def _denominator(config: LossConfig, batch: TrainBatch) -> Array:
    """Of the whole minibatch: it depends on masks alone."""
    flat = (-1, batch.tokens.shape[-1])
    mask, segment_ids = batch.loss_mask.reshape(flat), batch.segment_ids.reshape(flat)
    return corrections.aggregate(mask, mask, segment_ids, config.aggregation, config.constant_length)[1]


def _descend(
    optimizer: optax.GradientTransformation, grads: Any, opt_state: Any, params: Params, rate: Array
) -> tuple[Params, Any]:
    direction, opt_state = optimizer.update(grads, opt_state, params)
    return jax.tree.map(lambda p, u: p + rate * u, params, direction), opt_state


def _values(critic: Critic, params: Params, policy_hidden: Array, micro: TrainBatch) -> Float[Array, "R L"]:
    return token_values(critic.hidden(params, policy_hidden, _inputs(micro)), params["head"], micro.positions)


def _logprobs(
    model: Model, config: StepConfig, policy: Transformer, hidden: Array, micro: TrainBatch
) -> tuple[Float[Array, "R L"], Float[Array, "R L"]]:
    """Log-probs and entropies of the tokens that count."""
    rows, row_length = micro.tokens.shape
    columns = logprob_columns(config.logprob_chunk, -(-rows // sharding.row_shards(model.mesh)), row_length)
    wanted = (micro.loss_mask > 0) & (micro.positions > 0)
    return token_logprobs(hidden, policy.output(), micro.tokens, wanted, config.temperature, columns)


def _inputs(micro: TrainBatch) -> tuple[Array, Array, Array]:
    return micro.tokens, micro.positions, micro.segment_ids


def _micro_batch(batch: TrainBatch, i: Array, parts: int) -> TrainBatch:
    """The i-th micro-batch: the same record without its leading axis, each row cut into equal parts."""
    values = {f.name: getattr(batch, f.name) for f in dataclasses.fields(TrainBatch)}
    micro = {k: v if k in WHOLE else _cut(v[i], parts) for k, v in values.items()}
    if parts > 1:  # segments count from 1 in every row: those of a part follow one another
        ids, rest = micro["segment_ids"], jnp.iinfo(jnp.int32).max
        before = jnp.min(jnp.where(ids > 0, ids, rest), axis=1, keepdims=True) - 1
        micro["segment_ids"] = jnp.where(ids > 0, ids - before, 0)
    return TrainBatch(**micro)


def _cut(x: Array, parts: int) -> Array:
    """[R, L] -> [R x parts, L / parts]."""
    return x.reshape(x.shape[0] * parts, x.shape[1] // parts)


def _by_parts(run: Callable[..., Any], config: StepConfig, batch: TrainBatch, i: Array) -> Any:
    """run(i, parts) with the number of parts that the i-th micro-batch's rows may be cut into."""
    if not config.halvings:
        return run(i, 1)
    branches = [functools.partial(run, parts=1 << h) for h in range(config.halvings + 1)]
    return jax.lax.switch(batch.halvings[i], branches, i)


def _abstract_targets(config: StepConfig, batch: TrainBatch, model: Model, critic: Critic | None) -> Targets:
    array = jax.ShapeDtypeStruct(batch.tokens.shape, jnp.float32, sharding=rows_sharding(model))
    return Targets(
        advantages=array,
        proximal_logprobs=array if corrections.needs_proximal_forward(config.loss) else None,
        reference_logprobs=array if config.loss.kl_coefficient else None,
        values=array if critic else None,
        returns=array if critic else None,
    )


def _opt_shardings(optimizer: optax.GradientTransformation, params: Params, model: Model, offload: bool = False) -> Any:
    """Shardings of the optimizer state: moments like their parameters (in the host's memory: offload), counters
    replicated."""
    return optax.tree_map_params(
        optimizer,
        lambda _, param: param.sharding.with_memory_kind("pinned_host" if offload else "device"),
        jax.eval_shape(optimizer.init, params),
        params,
        transform_non_params=lambda _: sharding.replicated(model.mesh),
    )


def _abstract(x: Any, s: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s)
