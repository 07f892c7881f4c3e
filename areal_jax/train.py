"""The trainer role: builds its parts and owns the training loop.

A trainer may have several processes, which share one mesh: process 0 runs the loop, and the others `_follow` it.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import pathlib
import time
from typing import Any

import jax
import ml_collections

from areal_jax import build, objective, sharding, warm_start
from areal_jax.compiles import CompileCounter
from areal_jax.data import arithmetic
from areal_jax.data.prompts import PromptStream, RecordStream, fixed_prompts
from areal_jax.data.sources import Source
from areal_jax.data.templates import Template
from areal_jax.learner import Learner
from areal_jax.metrics import Emit, MetricsFile, clear_metrics, fan_out, replace_text, truncate_metrics
from areal_jax.models.linear import split_adapters
from areal_jax.models.transformer import Model, build_model
from areal_jax.recorder import Recorder
from areal_jax.rl import diagnostics
from areal_jax.rollout.coordinator import Coordinator, CoordinatorConfig
from areal_jax.rollout.evaluation import EvaluationBoard
from areal_jax.rollout.grading import Grader
from areal_jax.rollout.programs import Program
from areal_jax.rollout.sampler import Sampler
from areal_jax.trainer.checkpoint import Checkpoints
from areal_jax.trainer.train_step import TrainState
from areal_jax.transport.broadcast import Broadcast, agree, receive_batch, share_batch
from areal_jax.transport.trajectories import MemoryLink, ZmqServer
from areal_jax.transport.weights import MemoryChannel, OrbaxChannel, WeightChannel
from areal_jax.types import Params, PolicySnapshot, Trajectory, UserError


def run(
    config: ml_collections.ConfigDict, workdir: pathlib.Path, emit: Emit, colocated: bool, host: str = ""
) -> dict[str, Any]:
    """Trains; returns the summary. In `colocated` the sampler works in this process, between training steps.

    host: of process 0, for a trainer with several processes (jax.distributed is set up already); the others return {}.
    Raises UserError for what the user can put right.
    """
    # ---------------------------------------------------------------- parts
    compiles = CompileCounter()
    broadcast = Broadcast(host) if jax.process_count() > 1 else None
    build.require_same(broadcast, config)
    if broadcast is not None and not broadcast.leads:
        _follow(config, workdir, broadcast)
        return {}
    emit({"kind": "stage", "text": "preparing data and model"})
    parts = _build(config, workdir)
    learner, checkpoints, program, grader = parts.learner, parts.checkpoints, parts.program, parts.grader
    longest, skip = config.rollout.max_prompt_length, config.data.overlong == "skip"
    test = parts.sources[config.evaluation.split]
    held_out = fixed_prompts(test, config.data.heldout_problems, parts.template, longest, skip)
    prompts = PromptStream(RecordStream(parts.sources["train"], config.seed), parts.template, longest, skip)

    # ---------------------------------------------------------------- first weights, or where the run stopped
    saved = checkpoints.versions()
    if saved and config.rollout.injected_staleness:
        raise UserError(
            f"a run with rollout.injected_staleness cannot go on from a checkpoint ({workdir}): the older weights that "
            "its samplers need are gone. Choose another config.workdir"
        )
    if saved:
        truncate_metrics(workdir, saved[-1])
    else:
        clear_metrics(workdir)
    metrics = MetricsFile(workdir)
    show, emit = emit, fan_out([metrics.write, emit])
    for text in objective.warnings(config):
        (show if saved else emit)({"kind": "warning", "text": text})  # a resumed run has them in its metrics
    # the last run's weights go before what adapters are of is written anew: samplers that read it then wait
    transport: WeightChannel = MemoryChannel() if colocated else OrbaxChannel(workdir / "weights", fresh=True)
    warm_start_began = time.monotonic()
    start = _first_weights(config, parts, saved[-1] if saved else None, emit, broadcast)
    state, reference, version, books = start.state, start.reference, start.version, start.books
    seconds_warm_start = time.monotonic() - warm_start_began
    # ---------------------------------------------------------------- the ring
    if books is not None and books["coordinator"]["stream"] is not None:
        prompts.set_state(books["coordinator"]["stream"])
    temperatures = (config.evaluation.temperature, 0.0)
    board = EvaluationBoard(held_out, temperatures, config.rollout.max_response_length)
    coordinator = Coordinator(_coordinator_config(config), prompts, board, version)
    if books is not None:
        coordinator.restore(books["coordinator"])
    channel = build.weight_channel(parts.model, transport, lambda _: start.state.frozen)
    agree(broadcast, "publish")
    channel.publish(PolicySnapshot(version, state.params))
    ring: _InProcess | _Served
    if colocated:
        sampler = Sampler("colocated", program, channel, grader, config.seed, deterministic=True)
        ring = _InProcess(coordinator, channel, program, sampler)
    else:
        ring = _Served(config, workdir, coordinator, emit)
    recorder = Recorder(config, workdir, parts.policy.tokenizer, held_out, coordinator, emit)
    due = range(0, config.trainer.steps, config.evaluation.every_steps or config.trainer.steps)
    if version in due and not recorder.has_evaluated(version):
        coordinator.evaluate(version)

    # ---------------------------------------------------------------- THE loop
    try:
        samples = coordinator.config.batch_samples
        emit({"kind": "stage", "text": f"RL: {config.trainer.steps} steps of {samples} samples"})
        ring.start()
        compiles.warm()
        recorder.begin()
        while version < config.trainer.steps:
            recorder.waiting()
            batch = ring.wait_for_batch(version)
            recorder.batch_arrived()
            measured = diagnostics.staleness_metrics(batch, version) | coordinator.intake.metrics()
            agree(broadcast, "train")
            share_batch(broadcast, batch)
            state, trained = learner.step(state, batch, version, reference)
            coordinator.trained(batch)
            version += 1
            channel.publish(PolicySnapshot(version, state.params))
            coordinator.publish(version)
            channel.retire(coordinator.needed_versions())
            if version in due:
                coordinator.evaluate(version)
            recorder.step(version, batch, measured | trained | {"data/skipped": prompts.skipped})
            if config.checkpoint.every_steps and version % config.checkpoint.every_steps == 0:
                ring.wait_for_evaluations(before=version)  # a resumed run could not make up for older ones
                recorder.collect_evaluations()
                agree(broadcast, "save")
                checkpoints.save(version, state, _books(coordinator, start.skill_accuracy))
        recorder.end()
        coordinator.evaluate(version)
        emit({"kind": "stage", "text": "measuring the final policy"})
        ring.wait_for_evaluations(before=version + 1)
        recorder.collect_evaluations()
        agree(broadcast, "save")
        checkpoints.save(version, state, _books(coordinator, start.skill_accuracy))
        agree(broadcast, "end")
    finally:
        coordinator.stop()
        ring.close()
        grader.close()
        metrics.close()
        if broadcast is not None:
            broadcast.close()

    # ---------------------------------------------------------------- what is left for the person
    return recorder.finish(start.skill_accuracy, seconds_warm_start, compiles.after_warmup)


def _follow(config: ml_collections.ConfigDict, workdir: pathlib.Path, broadcast: Broadcast) -> None:
    """What the other processes of a trainer do: their part of everything that runs on the mesh or writes what lies
    there, when process 0 says so and with the batches that it sends."""
    parts = _build(config, workdir)
    start = _first_weights(config, parts, None, lambda record: None, broadcast)
    state, version, limits = start.state, start.version, build.limits(config)
    channel: OrbaxChannel | None = None
    try:
        while (order := agree(broadcast, None)) != "end":
            if order == "publish":  # process 0 has made the directory anew
                channel = OrbaxChannel(workdir / "weights")
            elif order == "train":
                state, _ = parts.learner.step(state, receive_batch(broadcast, limits), version, start.reference)
                version += 1
            else:
                parts.checkpoints.save(version, state, {})
                continue
            assert channel is not None
            channel.publish(PolicySnapshot(version, state.params))
    finally:
        parts.grader.close()
        broadcast.close()


@dataclasses.dataclass(frozen=True)
class _Parts:
    """What every process of the trainer has."""

    policy: build.Policy
    model: Model
    grader: Grader
    sources: dict[str, Source]
    template: Template
    program: Program
    learner: Learner
    checkpoints: Checkpoints


def _build(config: ml_collections.ConfigDict, workdir: pathlib.Path) -> _Parts:
    policy = build.find_policy(config)
    model = build.make_model(config, "trainer", policy)
    grader = build.make_grader(config, policy)
    splits = {"train", config.evaluation.split} | ({"validation"} if config.warm_start.enabled else set())
    sources, template = build.open_data(config, splits, policy)
    program = build.make_sampling_program(config, model, policy)
    learner = Learner(config, model, dumps=workdir)
    return _Parts(policy, model, grader, sources, template, program, learner, Checkpoints(workdir / "checkpoints"))


@dataclasses.dataclass(frozen=True)
class _Start:
    """Where a run begins, or goes on."""

    state: TrainState
    reference: Params | None
    """The parameters that a KL is to, where one is."""
    version: int
    books: dict[str, Any] | None
    """Of the checkpoint that the run goes on from."""
    skill_accuracy: float
    """Of the warm start."""


def _first_weights(
    config: ml_collections.ConfigDict, parts: _Parts, saved: int | None, emit: Emit, broadcast: Broadcast | None
) -> _Start:
    """The state of the checkpoint of version `saved`, or a new one; process 0's `saved` counts."""
    model, learner, checkpoints = parts.model, parts.learner, parts.checkpoints
    version = agree(broadcast, saved)
    adapts = model.config.lora is not None
    if version is not None:
        emit({"kind": "stage", "text": f"resuming after step {version}"})
        base = checkpoints.restore_reference(model.abstract_base) if adapts or learner.uses_reference else None
        params = model.init_params(0) if base is None else model.adapt(base, config.seed)
        state, books = checkpoints.restore(version, learner.init_state(params))
        return _Start(state, params if learner.uses_reference else None, version, books, books["skill_accuracy"])
    skill_accuracy = 0.0
    if config.warm_start.enabled:
        started_from = _warm_start(config, parts, emit, broadcast)
        base, skill_accuracy = started_from.params, started_from.skill_accuracy
    elif parts.policy.pretrained is not None:
        count = sum(x.size for x in jax.tree.leaves(model.abstract_base))
        emit({"kind": "stage", "text": f"reading {count:,} parameters of {config.model.path}"})
        base = parts.policy.pretrained.load_params(model)
    else:
        base = split_adapters(model.init_params(config.seed))[0]
    params = model.adapt(base, config.seed)
    if adapts or learner.uses_reference:
        checkpoints.save_reference(split_adapters(params)[0])
    state = learner.init_state(params)
    if adapts:
        trained = sum(x.size for x in jax.tree.leaves(state.params))
        emit({"kind": "stage", "text": f"LoRA: {trained:,} of {model.parameter_count():,} parameters are trained"})
    return _Start(state, _copy_of_trained(model, params) if learner.uses_reference else None, 0, None, skill_accuracy)


def _copy_of_trained(model: Model, params: Params) -> Params:
    """The parameters, with copies of those that a training step takes."""
    frozen, trained = model.split(params)
    return model.join(frozen, sharding.copied(trained))


def _coordinator_config(config: ml_collections.ConfigDict) -> CoordinatorConfig:
    r = config.rollout
    return CoordinatorConfig(
        group_size=r.group_size,
        batch_samples=config.trainer.batch_prompts * r.group_size,
        max_staleness=r.max_staleness,
        over_stale=r.over_stale,
        injected_staleness=r.injected_staleness,
        max_refills=r.max_refills if r.zero_variance_groups == "refill" else 0,
        queue_capacity=r.queue_capacity,
        lease_timeout_seconds=r.lease_timeout_seconds,
        temperature=r.temperature,
        max_new_tokens=r.max_response_length,
    )


NOT_OF_WARM_STARTS = ("lora", "attention", "decode_attention")
"""Keys of `config.model` that do not determine what a warm start gives."""


def _warm_start(
    config: ml_collections.ConfigDict, parts: _Parts, emit: Emit, broadcast: Broadcast | None
) -> warm_start.WarmStart:
    model, program = parts.model, parts.program
    if model.config.lora is not None:  # the supervised stages make what the adapters are of
        model = build_model(dataclasses.replace(model.config, lora=None), model.mesh)
        program = build.make_sampling_program(config, model, parts.policy)
    data = warm_start.Data(parts.sources["train"], parts.sources["validation"], parts.policy.tokenizer)
    options = config.warm_start.to_dict()
    options.pop("enabled")
    if options["seed"] == -1:
        options["seed"] = config.seed
    use_cache = options.pop("use_cache")
    stages = warm_start.WarmStartConfig(
        row_length=config.trainer.row_length,
        max_prompt_length=config.rollout.max_prompt_length,
        max_response_length=config.rollout.max_response_length,
        **options,
    )

    def progress(stage: str, done: int, total: int, metrics: dict[str, float]) -> None:
        emit({"kind": "progress", "stage": stage, "done": done, "total": total, **metrics})

    def make() -> warm_start.WarmStart:
        return warm_start.warm_start(
            stages, model, program, parts.grader, data, progress, functools.partial(agree, broadcast)
        )

    emit({"kind": "stage", "text": "warm start: supervised stages"})
    if not use_cache:
        return make()
    key = {
        "stages": options,
        "model": {k: v for k, v in config.model.to_dict().items() if k not in NOT_OF_WARM_STARTS},
        "data": config.data.name,
        "lengths": [stages.row_length, stages.max_prompt_length, stages.max_response_length],
        "slots": config.rollout.slots,
        "sampling": [config.rollout.top_k, config.rollout.top_p, config.rollout.min_p],
        "grading": [config.reward.name, config.rollout.environment],
        "dtype": model.config.compute_dtype,
        "data_version": arithmetic.VERSION,
    }
    if broadcast is not None and not config.data.cache_dir:
        raise UserError(
            "warm_start.use_cache is True, the trainer has several processes and data.cache_dir is '': name a "
            "directory that all of them see, or set warm_start.use_cache=False"
        )
    directory = build.cache_dir(config) / "warm_start"
    result = warm_start.cached_warm_start(key, directory, model, make, functools.partial(agree, broadcast))
    if result.cached:
        emit({"kind": "stage", "text": "warm start: taken from the cache"})
    return result


def _books(coordinator: Coordinator, skill_accuracy: float) -> dict[str, Any]:
    return {"coordinator": coordinator.save(), "skill_accuracy": skill_accuracy}


class _InProcess:
    """The sampler in this process: it works while the trainer waits."""

    def __init__(self, coordinator: Coordinator, channel: WeightChannel, program: Program, sampler: Sampler):
        self._coordinator, self._channel, self._program, self._sampler = coordinator, channel, program, sampler

    def start(self) -> None:
        self._sampler.start(self._channel.load(self._coordinator.version, self._program.model.abstract_params))
        self._sampler.connect(MemoryLink(self._coordinator.exchange))

    def wait_for_batch(self, version: int) -> list[Trajectory]:
        idle = 0  # turns in a row; one may be, with what the trainer had no room for when it last asked
        while (batch := self._coordinator.take_batch(version, timeout=0.0)) is None:
            worked, _ = self._sampler.turn()
            idle = 0 if worked else idle + 1
            if idle > 1 and self._coordinator.occupancy() == 0:
                raise RuntimeError(
                    f"no samples to draw and no batch at version {version}: {self._coordinator.counts()}"
                )
        return batch

    def wait_for_evaluations(self, before: int) -> None:
        """Until all versions older than `before` that are to be measured are."""
        while any(v < before for v in self._coordinator.pending_evaluations()):
            self._sampler.turn()

    def close(self) -> None:
        self._sampler.close()


class _Served:
    """Samplers in other processes, behind a ZeroMQ server whose address lies in the workdir."""

    def __init__(self, config: ml_collections.ConfigDict, workdir: pathlib.Path, coordinator: Coordinator, emit: Emit):
        self._coordinator = coordinator
        self._address = f"tcp://{config.transport.host}:{config.transport.port}"
        self._limits = build.limits(config)
        self._endpoint = workdir / "endpoint.json"
        self._endpoint.unlink(missing_ok=True)  # of a run that was killed
        self._emit = emit
        self._warn_after = self._patience = config.rollout.lease_timeout_seconds
        self._server: ZmqServer | None = None

    def start(self) -> None:
        self._server = ZmqServer(self._coordinator.exchange, self._address, self._limits)
        replace_text(self._endpoint, json.dumps({"address": self._server.address}))
        while not self._coordinator.sampler_stats():  # samplers compile meanwhile: the clock of RL starts after it
            self._check()
            time.sleep(0.02)

    def wait_for_batch(self, version: int) -> list[Trajectory]:
        while (batch := self._coordinator.take_batch(version, timeout=0.5)) is None:
            self._check()
        return batch

    def wait_for_evaluations(self, before: int) -> None:
        """Until all versions older than `before` that are to be measured are."""
        while any(v < before for v in self._coordinator.pending_evaluations()):
            self._check()
            time.sleep(0.02)

    def close(self) -> None:
        self._endpoint.unlink(missing_ok=True)
        if self._server is not None:
            time.sleep(0.3)  # for samplers to hear that the run is over
            self._server.close()

    def _check(self) -> None:
        assert self._server is not None
        self._server.check()
        silence = self._coordinator.silence_seconds()
        if silence > self._patience:
            self._patience += self._warn_after
            text = f"no sampler has been heard of for {silence:.0f} s; see their logs, or start one with --role=sampler"
            self._emit({"kind": "warning", "text": text})
