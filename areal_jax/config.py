"""Validation of a config: every range and every condition between keys, with the values and the remedy named."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import ml_collections

from areal_jax import objective
from areal_jax.data.sources import FORMS, SOURCES
from areal_jax.environments.single_turn import ENVIRONMENTS
from areal_jax.models.decode_kernels import DECODE_KERNELS
from areal_jax.models.kernels import KERNELS
from areal_jax.models.linear import PROJECTIONS
from areal_jax.models.transformer import REMAT
from areal_jax.rewards.math import REWARDS
from areal_jax.rl.advantages import ADVANTAGES
from areal_jax.rl.corrections import AGGREGATIONS
from areal_jax.rl.losses import LOSSES
from areal_jax.rollout.sampler import capacity
from areal_jax.trainer.optimizer import SCHEDULES
from areal_jax.types import UserError

Check = tuple[Callable[[Any], bool], str]


def _at_least(low: float) -> Check:
    return (lambda v: v >= low, f"expected at least {low}")


def _between(low: float, high: float) -> Check:
    return (lambda v: low <= v <= high, f"expected {low} to {high}")


def _one_of(*names: str) -> Check:
    return (lambda v: v in names, "expected one of " + ", ".join(names))


def _known(names: Mapping[str, Any]) -> Check:
    """A name in one of the dicts that users add to (a config file may do so when it is read)."""
    return (lambda v: v in names, "expected one of " + ", ".join(names))


POSITIVE: Check = (lambda v: v > 0, "expected more than 0")
FRACTION: Check = (lambda v: 0 < v < 1, "expected more than 0 and less than 1")
UP_TO_ONE: Check = (lambda v: 0 < v <= 1, "expected more than 0 and at most 1")
FINITE: Check = (math.isfinite, "expected a finite number")
BELOW_ONE: Check = (lambda v: 0 <= v < 1, "expected at least 0 and less than 1")

CHECKS: dict[str, Check] = {
    "seed": _at_least(0),
    "model.layers": _at_least(1),
    "model.d_model": _at_least(1),
    "model.kv_heads": _at_least(1),
    "model.head_dim": (lambda v: v > 0 and v % 2 == 0, "expected an even number (rotary pairs)"),
    "model.d_ff": _at_least(1),
    "model.rope_base": (lambda v: v > 1, "expected more than 1"),
    "model.norm_eps": POSITIVE,
    "model.logit_soft_cap": _at_least(0),
    "model.compute_dtype": _one_of("auto", "float32", "bfloat16"),
    "model.attention": _one_of("auto", "xla", *KERNELS),
    "model.decode_attention": _one_of("auto", "xla", *DECODE_KERNELS),
    "model.lora.rank": _at_least(0),
    "model.lora.alpha": POSITIVE,
    "model.lora.target_modules": (
        lambda v: isinstance(v, tuple) and 0 < len(v) == len(set(v)) and set(v) <= set(PROJECTIONS),
        f"expected one or several of {tuple(PROJECTIONS)}, each once",
    ),
    "data.name": (lambda v: v.partition("/")[0] in SOURCES, "expected one of " + ", ".join(FORMS)),
    "data.test_fraction": BELOW_ONE,
    "data.validation_fraction": BELOW_ONE,
    "data.template": _one_of("plain", "few_shot", "chat"),
    "data.question_format": (lambda v: "{question}" in v, "expected text with {question} in it"),
    "data.shots": _at_least(0),
    "data.overlong": _one_of("refuse", "skip"),
    "data.heldout_problems": _at_least(1),
    "warm_start.seed": _at_least(-1),
    "warm_start.rows": _at_least(1),
    "warm_start.skill_accuracy": UP_TO_ONE,
    "warm_start.skill_updates": _at_least(0),
    "warm_start.skill_learning_rate": POSITIVE,
    "warm_start.check_every": _at_least(1),
    "warm_start.validation_problems": _at_least(1),
    "warm_start.habit_updates": _at_least(0),
    "warm_start.habit_direct_fraction": _between(0, 1),
    "warm_start.habit_learning_rate": POSITIVE,
    "warm_start.habit_learning_rate_final": POSITIVE,
    "rollout.max_staleness": (lambda v: v >= 0 and (math.isinf(v) or v == int(v)), "expected 0, 1, 2, ... or inf"),
    "rollout.injected_staleness": _at_least(0),
    "rollout.batching": _one_of("continuous", "static"),
    "rollout.over_stale": _one_of("train", "drop", "mask_tokens"),
    "rollout.zero_variance_groups": _one_of("keep", "drop", "refill"),
    "rollout.max_refills": _at_least(1),
    "rollout.group_size": _at_least(1),
    "rollout.temperature": POSITIVE,
    "rollout.top_k": _at_least(0),
    "rollout.top_p": UP_TO_ONE,
    "rollout.min_p": BELOW_ONE,
    "rollout.max_prompt_length": _at_least(1),
    "rollout.max_response_length": _at_least(1),
    "rollout.slots": _at_least(1),
    "rollout.cache": _one_of("dense", "paged"),
    "rollout.cache_tokens": _at_least(0),
    "rollout.block_size": _at_least(1),
    "rollout.prefill_tokens": _at_least(1),
    "rollout.chunk": _at_least(1),
    "rollout.kv_on_update": _one_of("recompute", "keep", "finish"),
    "rollout.environment": _known(ENVIRONMENTS),
    "rollout.lease_timeout_seconds": POSITIVE,
    "rollout.stop_strings": (
        lambda v: isinstance(v, tuple) and all(isinstance(s, str) and s for s in v),
        "expected texts, none empty, such as ('\\n',)",
    ),
    "reward.name": _known(REWARDS),
    "reward.correct": POSITIVE,
    "reward.incorrect": (lambda v: v <= 0, "expected at most 0"),
    "reward.workers": _at_least(1),
    "reward.timeout_seconds": POSITIVE,
    "reward.memory_mb": _at_least(64),
    "reward.bias": FINITE,
    "reward.scale": (lambda v: v != 0 and math.isfinite(v), "expected a finite number, not 0"),
    "reward.clip": POSITIVE,
    "reward.overlong_buffer": _at_least(0),
    "reward.overlong_factor": POSITIVE,
    "reward.truncated": _one_of("keep", "zero_reward", "mask"),
    "reward.kl_coefficient": _at_least(0),
    "advantage.name": _known(ADVANTAGES),
    "advantage.gamma": UP_TO_ONE,
    "advantage.lam": _between(0, 1),
    "critic.kind": _one_of("none", "head", "network"),
    "critic.learning_rate": POSITIVE,
    "critic.coefficient": _at_least(0),
    "critic.clip": _at_least(0),
    "loss.name": (
        lambda v: v in LOSSES and v != "sft",
        "expected one of " + ", ".join(n for n in LOSSES if n != "sft"),
    ),
    "loss.aggregation": _one_of(*AGGREGATIONS),
    "loss.clip_low": FRACTION,
    "loss.clip_high": POSITIVE,
    "loss.dual_clip": (lambda v: v == 0 or v > 1, "expected more than 1, or 0 for off"),
    "loss.proximal": _one_of("auto", "recompute", "loglinear", "behaviour"),
    "loss.importance_weight": _one_of("auto", "clamp", "mask", "none"),
    "loss.importance_level": _one_of("token", "sequence"),
    "loss.importance_cap": POSITIVE,
    "loss.importance_low": BELOW_ONE,
    "loss.opsm_threshold": _at_least(0),
    "loss.staleness_base": _one_of("ppo", "decoupled_ppo"),
    "loss.staleness_scope": _one_of("token", "sequence", "batch"),
    "loss.staleness_decay": UP_TO_ONE,
    "loss.staleness_floor": UP_TO_ONE,
    "loss.gspo_clip_low": FRACTION,
    "loss.gspo_clip_high": POSITIVE,
    "loss.cispo_low": BELOW_ONE,
    "loss.cispo_high": (lambda v: v > 1, "expected more than 1"),
    "loss.sapo_positive": POSITIVE,
    "loss.sapo_negative": POSITIVE,
    "loss.m2po_threshold": POSITIVE,
    "loss.dppo_threshold": FRACTION,
    "loss.dppo_penalty": _at_least(0),
    "loss.kl_coefficient": _at_least(0),
    "loss.kl_estimator": _one_of("k2", "k3"),
    "loss.entropy_coefficient": _at_least(0),
    "trainer.steps": _at_least(1),
    "trainer.batch_prompts": _at_least(1),
    "trainer.minibatches": _at_least(1),
    "trainer.micro_batch_rows": _at_least(1),
    "trainer.row_halvings": _at_least(0),
    "trainer.logprob_chunk": _at_least(0),
    "trainer.remat": _known(REMAT),
    "optimizer.learning_rate": POSITIVE,
    "optimizer.final_learning_rate": _at_least(0),
    "optimizer.warmup_steps": _at_least(0),
    "optimizer.b1": BELOW_ONE,
    "optimizer.b2": BELOW_ONE,
    "optimizer.eps": POSITIVE,
    "optimizer.weight_decay": _at_least(0),
    "optimizer.vocabulary_weight_decay": _at_least(0),
    "optimizer.schedule": _known(SCHEDULES),
    "optimizer.first_moment_dtype": _one_of("float32", "bfloat16"),
    "optimizer.max_skipped": _at_least(0),
    "optimizer.max_grad_norm": POSITIVE,
    "evaluation.every_steps": _at_least(0),
    "evaluation.split": _one_of("test", "validation"),
    "evaluation.temperature": POSITIVE,
    "checkpoint.every_steps": _at_least(0),
    "transport.port": _between(0, 65535),
    "transport.max_message_bytes": _at_least(1024),
    "launch.kind": _one_of("auto", "colocated", "local"),
    "launch.samplers": _at_least(1),
    "launch.max_restarts": _at_least(0),
}
"""key -> (condition, what was expected)."""


def validate(config: ml_collections.ConfigDict) -> None:
    """Raises UserError naming the key, its value, what was expected and, between keys, both values."""
    flat = flatten(config)
    for key, (holds, expected) in CHECKS.items():
        value = flat[key]
        if (isinstance(value, float) and math.isnan(value)) or not holds(value):
            raise UserError(f"config.{key} is {value!r}: {expected}")
    model, rollout, trainer, data = config.model, config.rollout, config.trainer, config.data
    samples = trainer.batch_prompts * rollout.group_size
    longest = rollout.max_prompt_length + rollout.max_response_length
    for role in ("trainer", "sampler"):
        for axis, size in config.mesh[role].items():
            _require(size == -1 or size >= 1, f"mesh.{role}.{axis} is {size}: expected at least 1, or -1 for the rest")
    _require(
        (data.shots > 0) == (data.template == "few_shot") or data.template == "chat",
        f"data.template is {data.template!r} and data.shots is {data.shots}: few_shot needs at least one "
        "example, plain shows none",
    )
    _require(
        data.test_fraction + data.validation_fraction < 1,
        f"data.test_fraction {data.test_fraction} + validation_fraction {data.validation_fraction} leave no "
        "problems to train on: their sum must be less than 1",
    )
    _require(
        not config.warm_start.enabled or (data.name == "arithmetic" and data.template == "plain" and not model.path),
        f"warm_start.enabled is True with model.path {model.path!r}, data.name {data.name!r} and data.template "
        f"{data.template!r}: the supervised stages are of a new model on 'arithmetic' with plain prompts; set "
        "warm_start.enabled=False",
    )
    _require(
        config.reward.name != "exact_answer" or data.name == "arithmetic",
        f"reward.name is 'exact_answer', which reads the answers of 'arithmetic', and data.name is {data.name!r}: use "
        "'math' or 'text'",
    )
    _require(
        bool(model.path) or data.name == "arithmetic",
        f"model.path is empty and data.name is {data.name!r}: a new model knows the characters of 'arithmetic' only; "
        "set model.path",
    )
    _require(
        model.heads % model.kv_heads == 0,
        f"model.heads is {model.heads} and model.kv_heads {model.kv_heads}: heads must be a multiple of kv_heads",
    )
    _require(
        longest <= trainer.row_length,
        f"rollout.max_prompt_length {rollout.max_prompt_length} + max_response_length {rollout.max_response_length} "
        f"= {longest} tokens, and trainer.row_length is {trainer.row_length}: raise it to {longest} or shorten them",
    )
    _require(
        trainer.row_length % (1 << trainer.row_halvings) == 0,
        f"trainer.row_length is {trainer.row_length} and trainer.row_halvings {trainer.row_halvings}: rows cannot be "
        f"cut into {1 << trainer.row_halvings} equal parts; make row_length a multiple of that",
    )
    _require(
        rollout.cache == "dense" or not rollout.cache_tokens or rollout.cache_tokens >= longest + rollout.block_size,
        f"rollout.cache_tokens is {rollout.cache_tokens}, and one sequence may have {longest} tokens: raise it to at "
        f"least {longest + rollout.block_size} (a sequence and a block of rollout.block_size), or set it to 0",
    )
    _require(
        samples % trainer.minibatches == 0,
        f"trainer.batch_prompts {trainer.batch_prompts} x rollout.group_size {rollout.group_size} = {samples} samples, "
        f"which trainer.minibatches = {trainer.minibatches} does not divide",
    )
    _require(
        rollout.queue_capacity >= samples,
        f"rollout.queue_capacity is {rollout.queue_capacity} and a batch has {samples} samples: a queue that cannot "
        f"hold one batch would stop the run; set at least {samples}",
    )
    _require(
        not rollout.injected_staleness or (rollout.max_staleness == 0 and rollout.over_stale == "train"),
        f"rollout.injected_staleness is {rollout.injected_staleness} with max_staleness {rollout.max_staleness} and "
        f"over_stale {rollout.over_stale!r}: only with max_staleness=0 and over_stale='train' is it exact",
    )
    objective.validate(config)
    most = capacity(rollout.slots) + rollout.group_size  # of training, and as many of an evaluation
    report_bytes = 2 * most * (16 * longest + 512)
    _require(
        config.transport.max_message_bytes >= report_bytes,
        f"transport.max_message_bytes is {config.transport.max_message_bytes}, and a report of rollout.slots = "
        f"{rollout.slots} samples of {longest} tokens may need {report_bytes}: raise it",
    )
    if not model.path:  # a pretrained model's sizes are checked once they are known
        for role in ("trainer", "sampler"):
            tensor = config.mesh[role].tensor
            for key in ("heads", "kv_heads", "d_ff"):
                _require(
                    tensor == -1 or (tensor > 0 and model[key] % tensor == 0),
                    f"mesh.{role}.tensor is {tensor} and does not divide model.{key} = {model[key]}",
                )


SHAPE_KEYS = (
    "layers", "d_model", "heads", "kv_heads", "head_dim", "d_ff", "norm_eps", "qkv_bias", "qk_norm", "tied_embeddings",
    "logit_soft_cap",
)  # fmt: skip
"""Keys of `config.model` that a new model's TransformerConfig has too; its rotary base is `rope_base`."""


def refuse_idle_overrides(config: ml_collections.ConfigDict, overrides: Mapping[str, Any]) -> None:
    """Raises UserError for what was asked for on the command line and would be ignored."""
    for key, (is_read, reason) in objective.READ_WHEN.items():
        _require(
            key not in overrides or is_read(config),
            f"config.{key} is set to {overrides.get(key)!r} and would be ignored: it is read only {reason}. Leave it "
            "out",
        )
    for key in (f"model.{name}" for name in (*SHAPE_KEYS, "rope_base")):
        _require(
            not config.model.path or key not in overrides,
            f"config.{key} is set to {overrides.get(key)!r} and model.path is {config.model.path!r}: a pretrained "
            "model's shape is its own; leave one of them out",
        )


def flatten(config: ml_collections.ConfigDict, prefix: str = "") -> dict[str, Any]:
    """{'rollout.slots': 64, ...}."""
    flat: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, ml_collections.ConfigDict):
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat


def unflatten(flat: Mapping[str, Any]) -> ml_collections.ConfigDict:
    """The inverse of `flatten`, also of one that went through JSON (which makes lists of tuples)."""
    config = ml_collections.ConfigDict()
    for name, value in flat.items():
        *areas, key = name.split(".")
        inner = config
        for area in areas:
            if area not in inner:
                inner[area] = ml_collections.ConfigDict()
            inner = inner[area]
        inner[key] = tuple(value) if isinstance(value, list) else value
    return config


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise UserError(message)
