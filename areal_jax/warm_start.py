"""The supervised stages before RL, in the trainer's own packed step; the result is cached by content.

Stage one (skill) trains on worked solutions until a sampled accuracy on validation is reached. Stage two (habit) trains
briefly on mostly direct answers, which hides the skill behind a habit of blurting. RL then has something to bring out.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import pathlib
import shutil
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from areal_jax import evaluate, sharding
from areal_jax.data import packing
from areal_jax.data.prompts import RecordStream, fixed_prompts
from areal_jax.data.sources import Source
from areal_jax.data.templates import Template, TemplateConfig
from areal_jax.models.transformer import Model
from areal_jax.rl.losses import LossConfig, resolve
from areal_jax.rollout.grading import Grader
from areal_jax.rollout.programs import Program
from areal_jax.trainer import train_step
from areal_jax.trainer.optimizer import OptimizerConfig, learning_rate, make_optimizer
from areal_jax.transport.weights import restore
from areal_jax.types import PROMPT_VERSION, Params, PolicySnapshot, Targets, TrainBatch, Trajectory, UserError

FORMAT = 4  # raise it when a change of the code changes the result


@dataclasses.dataclass(frozen=True)
class WarmStartConfig:
    """The keys of `config.warm_start`, with the sizes that the stages need."""

    seed: int
    rows: int
    row_length: int
    max_prompt_length: int
    max_response_length: int
    skill_accuracy: float
    skill_updates: int
    skill_learning_rate: float
    check_every: int
    validation_problems: int
    habit_updates: int
    habit_direct_fraction: float
    habit_learning_rate: float
    habit_learning_rate_final: float


@dataclasses.dataclass(frozen=True)
class WarmStart:
    """The result."""

    params: Params
    skill_accuracy: float
    """Sampled accuracy on validation when the skill stage ended: RL's reference line."""
    skill_updates: int
    cached: bool


Progress = Callable[[str, int, int, dict[str, float]], None]
"""(stage, updates done, updates at most, metrics)."""


@dataclasses.dataclass(frozen=True)
class Data:
    """What the stages read."""

    train: Source
    validation: Source
    tokenizer: Any


def warm_start(
    config: WarmStartConfig,
    model: Model,
    program: Program,
    grader: Grader,
    data: Data,
    progress: Progress,
    agree: Callable[[Any], Any] = lambda value: value,
) -> WarmStart:
    """Runs both stages from fresh parameters. agree: as in `cached_warm_start`."""
    shards = sharding.row_shards(model.mesh)
    packer = packing.PackingConfig(
        config.row_length, -(-config.rows // shards) * shards, config.max_prompt_length + config.max_response_length
    )
    examples = _Examples(config, data, packer)
    optimizer = make_optimizer(OptimizerConfig())
    shape = examples.next_batch(0.0)[0]
    supervised = train_step.StepConfig(resolve(LossConfig("sft")), diagnostics=False)
    programs = train_step.compile_programs(model, optimizer, supervised, shape)
    params = model.init_params(config.seed)
    template = Template(TemplateConfig(), data.tokenizer)
    validation = fixed_prompts(data.validation, config.validation_problems, template, config.max_prompt_length, False)

    def run(state: train_step.TrainState, rate: float, direct: float) -> tuple[train_step.TrainState, dict[str, float]]:
        packed, _ = examples.next_batch(direct)
        batch = train_step.place(packed, model)
        targets = train_step.place_targets(Targets(advantages=np.zeros_like(packed.loss_mask)), model)
        rate_array = train_step.scalar(rate, np.float32, model)
        version = train_step.scalar(0, np.int32, model)
        state, sums = programs.update(state, batch, targets, version, train_step.Rates(rate_array, rate_array))
        host = jax.device_get(sums)
        loss = float(host["objective"] / host["denominator"])
        if host["skipped"] or not np.isfinite(loss):
            raise UserError(
                f"the warm start's loss is {loss} and its gradient norm {host['max_grad_norm']}: lower "
                "warm_start.skill_learning_rate"
            )
        return state, {"loss": loss}

    def measure(state: train_step.TrainState) -> float:
        snapshot = PolicySnapshot(0, state.params)
        samples = evaluate.answer(program, snapshot, validation, grader, 1.0, config.max_response_length, config.seed)
        return evaluate.accuracy(samples)[0]

    state = train_step.init_state(params, model, optimizer)
    reached, updates = 0.0, 0
    while updates < config.skill_updates and reached < config.skill_accuracy:
        state, metrics = run(state, config.skill_learning_rate, 0.0)
        updates += 1
        if updates % config.check_every == 0 or updates == config.skill_updates:
            reached = agree(measure(state))
            progress("skill", updates, config.skill_updates, metrics | {"validation_accuracy": reached})
    state = train_step.init_state(state.params, model, optimizer)
    for update in range(config.habit_updates):
        rate = learning_rate(
            update, config.habit_updates, config.habit_learning_rate, config.habit_learning_rate_final, 0
        )
        state, metrics = run(state, rate, config.habit_direct_fraction)
        if (update + 1) % config.check_every == 0:
            progress("habit", update + 1, config.habit_updates, metrics)
    return WarmStart(state.params, reached, updates, cached=False)


def cached_warm_start(
    key: Any,
    directory: pathlib.Path,
    model: Model,
    make: Callable[[], WarmStart],
    agree: Callable[[Any], Any] = lambda value: value,
) -> WarmStart:
    """The result under the hash of `key` (all that determines it, JSON-able), made and kept if it is not there.

    agree: gives every process of the trainer process 0's value. The result is written beside and renamed into place, so
    that two runs at once, or one killed, leave no half result.
    """
    text = json.dumps([FORMAT, key], sort_keys=True)
    final = directory.absolute() / hashlib.blake2b(text.encode(), digest_size=12).hexdigest()
    checkpointer = ocp.Checkpointer(ocp.PyTreeCheckpointHandler())
    kept = final / "result.json"
    result = agree(json.loads(kept.read_text()) if kept.exists() else None)
    if result is not None:
        params = restore(checkpointer, final / "params", model.abstract_params)
        return WarmStart(params, result["skill_accuracy"], result["skill_updates"], cached=True)
    made = make()
    temporary = final.with_name(f"{final.name}.{agree(uuid.uuid4().hex)}")
    checkpointer.save(temporary / "params", args=ocp.args.PyTreeSave(made.params))
    if jax.process_index() != 0:
        return made
    result = {"skill_accuracy": made.skill_accuracy, "skill_updates": made.skill_updates, "key": key}
    (temporary / "result.json").write_text(json.dumps(result, indent=1))
    try:
        temporary.rename(final)
    except OSError:  # another run was quicker; its result is the same
        shutil.rmtree(temporary)
    return made


class _Examples:
    """An endless stream of packed supervised batches; each fills its rows and keeps what did not fit for the next."""

    def __init__(self, config: WarmStartConfig, data: Data, packer: packing.PackingConfig):
        self._stream = RecordStream(data.train, config.seed)
        self._rng = np.random.default_rng([config.seed, 1])
        self._tokenizer, self._packer, self._rows = data.tokenizer, packer, config.rows
        self._left: list[Trajectory] = []

    def next_batch(self, direct_fraction: float) -> tuple[TrainBatch, packing.Layout]:
        kept: list[Trajectory] = []
        for example in self._examples(direct_fraction):
            lengths = [len(t.tokens) for t in [*kept, example]]
            if len(packing.assign_rows(lengths, self._packer.row_length)) > self._rows:
                self._left = [example]
                break
            kept.append(example)
        return packing.pack(kept, self._packer, 1)

    def _examples(self, direct_fraction: float) -> Iterator[Trajectory]:
        yield from self._left
        while True:
            record = next(self._stream)
            form = "direct" if self._rng.random() < direct_fraction else "worked"
            yield supervised_example(record["prompt"], record[form], self._tokenizer)


def supervised_example(prompt: str, response: str, tokenizer: Any) -> Trajectory:
    """A prompt and the response to imitate, its end of sequence included, in the form that the trainer packs."""
    head = tokenizer.encode(prompt, add_special_tokens=False)
    tail = [*tokenizer.encode(response, add_special_tokens=False), tokenizer.eos_token_id]
    is_response = np.arange(len(head) + len(tail)) >= len(head)
    return Trajectory(
        sample_id=0,
        prompt_id=0,
        tokens=np.array(head + tail, np.int32),
        behaviour_logprobs=np.zeros(len(is_response), np.float32),
        policy_versions=np.where(is_response, 0, PROMPT_VERSION).astype(np.int32),
        loss_mask=is_response.astype(np.float32),
        finish_reason="stop",
        reward=0.0,
    )
