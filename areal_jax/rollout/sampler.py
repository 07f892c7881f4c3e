"""A sampler's work, one turn at a time: report -> swap weights -> decode -> grade.

It holds no state worth saving: what it was leased is issued again if it dies.
"""

from __future__ import annotations

import dataclasses
import time
import uuid
from typing import Any

import numpy as np

from areal_jax.environments.single_turn import Environment
from areal_jax.rollout.engine import Completion, Engine, Program, Request
from areal_jax.transport.messages import Report, SamplerStats
from areal_jax.transport.trajectories import Link
from areal_jax.transport.weights import WeightChannel
from areal_jax.types import Lease, PolicySnapshot, Prompt, Trajectory


class Sampler:
    """Runs a training engine, and beside it an evaluation engine while an evaluation is under way."""

    def __init__(self, name: str, program: Program, channel: WeightChannel, grader: Grader, seed: int):
        self._name, self._incarnation, self._seed = name, uuid.uuid4().hex, seed
        self._program, self._channel, self._grader = program, channel, grader
        self._link: Link | None = None
        self._engine: Engine | None = None
        self._evaluation: Engine | None = None
        self._leases: dict[int, Lease] = {}
        self._outbox: list[Trajectory] = []
        self._credits = 0
        self._sequence = 0
        self._stats = SamplerStats()
        self._started = time.monotonic()

    def start(self, snapshot: PolicySnapshot) -> None:
        """Builds the engine and compiles every shape it can meet."""
        self._engine = Engine(self._program, snapshot, self._seed)
        self._engine.warm_up()

    def connect(self, link: Link) -> None:
        """From now on `turn` talks to the trainer through this link."""
        self._link = link
        self._started = time.monotonic()

    def turn(self, compiles_after_warmup: int = 0) -> tuple[bool, bool]:
        """One exchange with the trainer and one chunk of decoding. Returns (worked, told to stop)."""
        if self._engine is None or self._link is None:
            raise RuntimeError("start() and connect() come before turn()")
        stop = self._exchange(self._engine, self._link, compiles_after_warmup)
        began = time.monotonic()
        engines = [e for e in (self._engine, self._evaluation) if e is not None and e.unfinished]
        for engine in engines:
            self._outbox += [self._graded(c) for c in engine.step()]
        if self._evaluation is not None and not self._evaluation.unfinished:
            self._evaluation = None
        if engines:
            self._add(busy_seconds=time.monotonic() - began)
        return bool(engines), stop

    def _exchange(self, engine: Engine, link: Link, compiles_after_warmup: int) -> bool:
        self._stats = dataclasses.replace(
            self._stats,
            wall_seconds=time.monotonic() - self._started,
            generated_tokens=engine.generated_tokens,
            decoded_slot_steps=engine.decoded_slot_steps,
            compiles_after_warmup=compiles_after_warmup,
        )
        training = [t for t in self._outbox if not t.evaluation]
        sent = training[: self._credits] + [t for t in self._outbox if t.evaluation]
        slots = self._program.config.slots
        evaluating = self._evaluation.unfinished if self._evaluation else 0
        self._sequence += 1
        report = Report(
            self._name,
            self._incarnation,
            self._sequence,
            version=engine.version,
            want=max(0, slots - engine.unfinished - len(training)),
            want_evaluation=slots - evaluating,
            trajectories=tuple(sent),
            stats=self._stats,
        )
        reply = link.exchange(report)
        acknowledged = {t.sample_id for t in sent}
        self._outbox = [t for t in self._outbox if t.sample_id not in acknowledged]
        self._credits = reply.credits
        if reply.version > engine.version:
            began = time.monotonic()
            engine.set_params(self._channel.load(reply.version, self._program.model.abstract_params))
            took = time.monotonic() - began
            self._add(busy_seconds=took, swaps=1, swap_seconds=took)
        for lease in reply.leases:
            self._accept(lease, engine)
        return reply.stop

    def _accept(self, lease: Lease, engine: Engine) -> None:
        if lease.min_version > engine.version:
            raise RuntimeError(f"a lease needs version {lease.min_version}; the newest published is {engine.version}")
        requests = [Request(i, lease.prompt.tokens, lease.max_new_tokens, lease.temperature) for i in lease.sample_ids]
        self._leases |= dict.fromkeys(lease.sample_ids, lease)
        if lease.pinned_version is None:
            engine.submit(requests)
        else:
            self._evaluation_engine(lease.pinned_version, engine).submit(requests)

    def _evaluation_engine(self, version: int, engine: Engine) -> Engine:
        """An engine beside the training one, with the same compiled programs, fixed to one version."""
        if self._evaluation is None or self._evaluation.version != version:
            pinned = engine.snapshot
            if pinned.version != version:
                pinned = self._channel.load(version, self._program.model.abstract_params)
            self._evaluation = Engine(self._program, pinned, self._seed)
        return self._evaluation

    def _graded(self, completion: Completion) -> Trajectory:
        lease = self._leases.pop(completion.request.sample_id)
        return self._grader(lease.prompt, completion, lease.pinned_version is not None)

    def _add(self, **increments: Any) -> None:
        values = {k: getattr(self._stats, k) + v for k, v in increments.items()}
        self._stats = dataclasses.replace(self._stats, **values)


class Grader:
    """Completion -> Trajectory: decodes the response and asks the environment for its reward."""

    def __init__(self, environment: Environment, tokenizer: Any):
        self._environment, self._tokenizer = environment, tokenizer

    def __call__(self, prompt: Prompt, completion: Completion, evaluation: bool) -> Trajectory:
        response = completion.tokens[len(completion.request.prompt) :]
        text = self._tokenizer.decode(response, skip_special_tokens=True)
        return Trajectory(
            sample_id=completion.request.sample_id,
            prompt_id=prompt.prompt_id,
            tokens=completion.tokens,
            behaviour_logprobs=completion.behaviour_logprobs,
            policy_versions=completion.policy_versions,
            loss_mask=(completion.policy_versions >= 0).astype(np.float32),
            finish_reason=completion.finish_reason,
            reward=self._environment.step(prompt, text, completion.finish_reason),
            evaluation=evaluation,
        )
