"""One training step, from a batch of trajectories to the next policy: rewards, advantages, packing, updates.

The order is that of `Learner.step`. What runs on the device is in `trainer/`, the formulas are in `rl/`.
"""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Sequence
from typing import Any

import jax
import ml_collections
import numpy as np

from areal_jax import sharding
from areal_jax.data import packing
from areal_jax.data.packing import Layout
from areal_jax.models.critic import build_critic
from areal_jax.models.transformer import Model
from areal_jax.objective import loss_config
from areal_jax.rl import advantages as advantages_lib
from areal_jax.rl import diagnostics, rewards
from areal_jax.rl.advantages import AdvantageConfig, Outcomes, Ragged
from areal_jax.rl.losses import anchor
from areal_jax.trainer import train_step
from areal_jax.trainer.optimizer import OptimizerConfig, learning_rate, make_optimizer
from areal_jax.trainer.skips import Skips
from areal_jax.types import Params, Targets, TrainBatch, Trajectory


@dataclasses.dataclass(frozen=True)
class _Part:
    """One minibatch on its way through a step."""

    packed: TrainBatch
    """On the host,"""
    batch: TrainBatch
    """and on the mesh."""
    layout: Layout
    members: np.ndarray
    """Which trajectories of the batch, in the order of the layout."""


class Learner:
    """The compiled programs of a run and the values that a training step needs, read once from the config."""

    def __init__(self, config: ml_collections.ConfigDict, model: Model, dumps: pathlib.Path | None = None):
        """dumps: where a batch goes whose gradient is not finite, when that ends the run."""
        r, t, o = config.rollout, config.trainer, config.optimizer
        self.model = model
        self.critic = build_critic(model, config.critic.kind)
        shared = {f.name: o[f.name] for f in dataclasses.fields(OptimizerConfig)}
        self.optimizer = make_optimizer(OptimizerConfig(**shared))
        self.loss = loss_config(config)
        self._packer = packing.PackingConfig(
            t.row_length,
            t.micro_batch_rows * sharding.row_shards(model.mesh),
            r.max_prompt_length + r.max_response_length,
            t.row_halvings,
        )
        samples = t.batch_prompts * r.group_size
        most = -(-(samples + r.group_size - 1) // t.minibatches)  # dropping can make a batch a ragged group longer
        self._micro_batches = self._packer.max_micro_batches(most)
        self._minibatches, self._seed = t.minibatches, config.seed
        self._advantage = AdvantageConfig(**config.advantage.to_dict())
        w = config.reward
        self._shaping = rewards.ShapingConfig(
            w.bias, w.scale, w.clip, w.overlong_buffer, w.overlong_factor, w.truncated, r.max_response_length
        )
        self._shuffle, self._reward_kl = w.shuffle, w.kl_coefficient
        self._drop_zero_variance = r.zero_variance_groups == "drop"
        self.uses_reference = bool(self.loss.kl_coefficient or w.kl_coefficient)
        self.config = train_step.StepConfig(
            loss=self.loss,
            temperature=r.temperature,
            critic=train_step.CriticConfig(config.critic.coefficient, config.critic.clip),
            scale_by_ess=o.scale_by_ess,
            with_reference=self.uses_reference,
            diagnostics=t.diagnostics,
            logprob_chunk=t.logprob_chunk,
            offload=o.offload,
            halvings=t.row_halvings,
        )
        self._rate = (t.steps, o.learning_rate, o.final_learning_rate, o.warmup_steps, o.schedule)
        self._skips = Skips(o.max_skipped, dumps)
        self._critic_rate = config.critic.learning_rate
        self.programs = train_step.compile_programs(model, self.optimizer, self.config, self.empty_batch(), self.critic)

    def init_state(self, params: Params) -> train_step.TrainState:
        return train_step.init_state(params, self.model, self.optimizer, self.critic, self.config.offload)

    def empty_batch(self) -> TrainBatch:
        """A batch with the shapes of every batch of the run."""
        return packing.pack([], self._packer, self._micro_batches)[0]

    def learning_rate(self, version: int) -> float:
        return learning_rate(version, *self._rate)

    def step(
        self, state: train_step.TrainState, batch: Sequence[Trajectory], version: int, reference: Params | None = None
    ) -> tuple[train_step.TrainState, dict[str, float]]:
        """All minibatches of one batch; returns the new state and the metrics.

        reference: the parameters that a KL is to, where `uses_reference`.
        An update whose loss or gradient is not finite is left out; raises UserError when that is so of more than
        optimizer.max_skipped in a row.
        """
        counted = rewards.mask_truncated(batch, self._shaping)
        if self._drop_zero_variance:
            counted = rewards.mask_zero_variance(counted)
        parts = self._pack(counted, version)
        forwards = self._forwards(state, parts, batch, version)
        references = self._references(parts, reference)
        outcomes = self._outcomes(counted, version, parts, forwards, references)
        advantages = advantages_lib.estimate(outcomes, self._advantage)
        returns = _returns(outcomes, advantages)
        if self._advantage.whiten:
            advantages = advantages_lib.whiten(advantages, outcomes.masks)

        rates = train_step.Rates(
            train_step.scalar(self.learning_rate(version), np.float32, self.model),
            train_step.scalar(self._critic_rate, np.float32, self.model),
        )
        version_scalar = train_step.scalar(version, np.int32, self.model)
        sums: list[dict[str, Any]] = []
        skipped = self._skips.total
        for part, before, reference_logprobs in zip(parts, forwards, references, strict=True):
            if not any(counted[i].loss_mask.any() for i in part.members):
                continue  # nothing to learn from: the moments of Adam stay as they are too
            targets = Targets(
                advantages=self._spread(advantages, part),
                proximal_logprobs=before.logprobs,
                reference_logprobs=reference_logprobs if self.loss.kl_coefficient else None,
                values=before.values,
                returns=None if returns is None else self._spread(returns, part),
            )
            targets = train_step.place_targets(targets, self.model)
            state, found = self.programs.update(state, part.batch, targets, version_scalar, rates)
            found = jax.device_get(found)
            if self._skips.take(found, part.packed, targets, version):
                sums.append(found)
        metrics = self._metrics(sums, version) | diagnostics.advantage_metrics(advantages, outcomes.masks)
        metrics["optimizer/skipped_updates"] = float(self._skips.total - skipped)
        metrics["reward/shaped_mean"] = float(outcomes.rewards.mean())
        metrics["packing/efficiency"] = packing.efficiency([p.packed for p in parts])
        if returns is not None and outcomes.values is not None:
            metrics |= diagnostics.value_metrics(outcomes.values, returns, outcomes.masks)
        return state, metrics

    def _pack(self, batch: Sequence[Trajectory], version: int) -> list[_Part]:
        """The minibatches: a seeded random split of the batch."""
        order = np.random.default_rng([self._seed, version]).permutation(len(batch))
        parts = []
        for members in np.array_split(order, self._minibatches):
            packed, layout = packing.pack([batch[i] for i in members], self._packer, self._micro_batches)
            parts.append(_Part(packed, train_step.place(packed, self.model), layout, members))
        return parts

    def _forwards(
        self, state: train_step.TrainState, parts: Sequence[_Part], batch: Sequence[Trajectory], version: int
    ) -> list[train_step.Before]:
        """What the step holds fixed. Of a batch drawn wholly by the newest policy p is b but for rounding, and with one
        minibatch a decoupled objective need not know more, since r = w rho. What weighs or rejects by w alone must."""
        needs_logprobs, needs_values = train_step.needs(self.config, self.critic)
        around_proximal = anchor(self.loss) == "proximal" and self.loss.importance_weight != "mask"
        on_policy = len(parts) == 1 and around_proximal and all(t.oldest_version() == version for t in batch)
        recorded = parts[0].batch.behaviour_logprobs if needs_logprobs and on_policy else None
        if not needs_values and (recorded is not None or not needs_logprobs):
            return [train_step.Before(recorded, None) for _ in parts]
        found = [self.programs.before(state, p.batch) for p in parts]
        return [f if recorded is None else f._replace(logprobs=recorded) for f in found]

    def _references(self, parts: Sequence[_Part], reference: Params | None) -> list[Any]:
        if not self.uses_reference:
            return [None] * len(parts)
        if reference is None:
            raise ValueError("a KL penalty needs the parameters of a reference")
        return [self.programs.logprobs(reference, p.batch) for p in parts]

    def _outcomes(
        self,
        batch: Sequence[Trajectory],
        version: int,
        parts: Sequence[_Part],
        forwards: Sequence[train_step.Before],
        references: Sequence[Any],
    ) -> Outcomes:
        """Shaped rewards; with reward.shuffle they are permuted over the batch first (the control experiment)."""
        shaped = rewards.shape(batch, self._shaping)
        if self._shuffle:
            shaped = np.random.default_rng([self._seed, version, 1]).permutation(shaped)
        penalties = values = None
        if self._reward_kl:
            penalties = [
                rewards.kl_reward(t, r, self._reward_kl)
                for t, r in zip(batch, self._gather(references, parts), strict=True)
            ]
        if self.critic is not None:
            values = self._gather([f.values for f in forwards], parts)
        groups = np.array([t.prompt_id for t in batch])
        return Outcomes(shaped, groups, [t.loss_mask for t in batch], penalties, values)

    def _metrics(self, sums: Sequence[dict[str, Any]], version: int) -> dict[str, float]:
        metrics = {"optimizer/learning_rate": self.learning_rate(version), "tokens/trained": 0.0}
        metrics["optimizer/grad_norm"] = 0.0
        if not sums:
            return metrics
        total = sums[0]
        for other in sums[1:]:
            total = diagnostics.combine(total, other, np)
        metrics["tokens/trained"] = float(total["counted"])
        metrics["loss/total"] = float(np.mean([s["objective"] / s["denominator"] for s in sums]))
        metrics["optimizer/grad_norm"] = float(total["max_grad_norm"])
        if self.config.scale_by_ess:
            metrics["optimizer/step_scale_min"] = float(total["min_step_scale"])
        if self.critic is not None:
            n = max(float(total["counted"]), 1.0)
            metrics["loss/value"] = float(total["value_loss"]) / n
            metrics["clip/value_fraction"] = float(total["value_clipped"]) / n
            metrics["optimizer/critic_grad_norm"] = float(total["max_critic_grad_norm"])
        return metrics | (diagnostics.finalize(total, self.loss) if self.config.diagnostics else {})

    @staticmethod
    def _spread(values: Ragged, part: _Part) -> np.ndarray:
        return part.layout.spread([values[i] for i in part.members])

    @staticmethod
    def _gather(arrays: Sequence[Any], parts: Sequence[_Part]) -> Ragged:
        """From the minibatches' [M, R, L] back to one array per trajectory of the batch."""
        found: dict[int, np.ndarray] = {}
        for array, part in zip(arrays, parts, strict=True):
            found |= dict(zip(part.members.tolist(), part.layout.gather(sharding.fetch(array)), strict=True))
        return [found[i] for i in range(len(found))]


def _returns(outcomes: Outcomes, advantages: Ragged) -> Ragged | None:
    """What the critic is fitted to: advantage (not whitened) and value."""
    if outcomes.values is None:
        return None
    return [a + v * (m > 0) for a, v, m in zip(advantages, outcomes.values, outcomes.masks, strict=True)]
