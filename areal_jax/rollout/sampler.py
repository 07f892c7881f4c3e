"""A sampler's work, one turn at a time: report -> swap weights -> decode -> grade.

It holds no state worth saving: what it was leased is issued again if it dies.
"""

from __future__ import annotations

import dataclasses
import logging
import time
import uuid
from typing import Any

from areal_jax.rollout.engine import Completion, Engine, Program, Request
from areal_jax.rollout.grading import Grader, Grading
from areal_jax.transport.messages import Report, SamplerStats
from areal_jax.transport.trajectories import Link
from areal_jax.transport.weights import WeightChannel
from areal_jax.types import Lease, PolicySnapshot, Trajectory

NO_VERSION = -1
"""Of parameters that no trainer published: every published version is newer."""

GRADING_SECONDS = 0.005
"""How long a turn that has nothing to decode waits for a grade."""

log = logging.getLogger(__name__)


class Sampler:
    """Runs a training engine, and beside it an evaluation engine while an evaluation is under way."""

    def __init__(
        self,
        name: str,
        program: Program,
        channel: WeightChannel,
        grader: Grader,
        seed: int,
        wait_for_grades: bool = False,
    ):
        """wait_for_grades: hand samples in in the order in which they were drawn, however long their grades take."""
        self._wait_for_grades = wait_for_grades
        self._name, self._incarnation, self._seed = name, uuid.uuid4().hex, seed
        self._program, self._channel, self._grader = program, channel, grader
        self._link: Link | None = None
        self._engine: Engine | None = None
        self._evaluation: Engine | None = None
        self._leases: dict[int, Lease] = {}  # by sample id, of the samples being drawn
        self._backlog: list[Lease] = []  # need newer weights than are here
        self._run = ""
        self._grading: list[Grading] = []
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
            self._grading += [self._grade(c) for c in engine.step()]
        worked = bool(engines or self._grading)
        if self._grading and (self._wait_for_grades or not engines):
            self._grading[0].wait(None if self._wait_for_grades else GRADING_SECONDS)
        self._collect_grades()
        if self._evaluation is not None and not self._evaluation.unfinished:
            self._evaluation = None
        if engines:
            self._add(busy_seconds=time.monotonic() - began)
        return worked, stop

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
        slots, static = self._program.config.slots, self._program.config.static
        evaluating = self._evaluation.unfinished if self._evaluation else 0
        waiting = sum(len(lease.sample_ids) for lease in self._backlog) + len(self._grading)
        held = engine.unfinished + len(training) + waiting
        self._sequence += 1
        report = Report(
            self._name,
            self._incarnation,
            self._run,
            self._sequence,
            version=engine.version,
            want=0 if static and held else max(0, slots - held),
            want_evaluation=slots - evaluating,
            trajectories=tuple(sent),
            stats=self._stats,
        )
        reply = link.exchange(report)
        if reply.run != self._run:
            engine = self._forget(reply.run)
        acknowledged = {t.sample_id for t in sent}
        self._outbox = [t for t in self._outbox if t.sample_id not in acknowledged]
        self._credits = reply.credits
        self._backlog += reply.leases
        if reply.version > engine.version:
            self._swap(engine, reply.version)
        ready = [lease for lease in self._backlog if lease.min_version <= engine.version]
        self._backlog = [lease for lease in self._backlog if lease.min_version > engine.version]
        for lease in ready:
            self._accept(lease, engine)
        return reply.stop

    def _swap(self, engine: Engine, version: int) -> None:
        """Loads the weights; if they are gone already (this sampler was given up), the next reply names newer ones."""
        began = time.monotonic()
        try:
            snapshot = self._channel.load(version, self._program.model.abstract_params)
        except KeyError as error:
            log.warning("%s; waiting for a newer one", error)
            return
        engine.set_params(snapshot)
        took = time.monotonic() - began
        self._add(busy_seconds=took, swaps=1, swap_seconds=took)

    def _forget(self, run: str) -> Engine:
        """The trainer was started anew: what was drawn for its last run, and its weights, are worth nothing."""
        assert self._engine is not None
        self._run, self._evaluation = run, None
        self._leases, self._backlog, self._grading, self._outbox, self._credits = {}, [], [], [], 0
        self._engine = Engine(self._program, PolicySnapshot(NO_VERSION, self._engine.snapshot.params), self._seed)
        return self._engine

    def _accept(self, lease: Lease, engine: Engine) -> None:
        target, ids = engine, lease.sample_ids
        if lease.pinned_version is not None:
            target = self._evaluation_engine(lease.pinned_version, engine)
        else:  # a sampler that was given up and is back may be leased what it is still drawing
            ids = tuple(i for i in ids if i not in self._leases)
        self._leases |= dict.fromkeys(ids, lease)
        target.submit([Request(i, lease.prompt.tokens, lease.max_new_tokens, lease.temperature) for i in ids])

    def _evaluation_engine(self, version: int, engine: Engine) -> Engine:
        """An engine beside the training one, with the same compiled programs, fixed to one version."""
        if self._evaluation is None or self._evaluation.version != version:
            pinned = engine.snapshot
            if pinned.version != version:
                pinned = self._channel.load(version, self._program.model.abstract_params)
            self._evaluation = Engine(self._program, pinned, self._seed)
        return self._evaluation

    def _grade(self, completion: Completion) -> Grading:
        lease = self._leases.pop(completion.request.sample_id)
        return self._grader(lease.prompt, completion, lease.pinned_version is not None)

    def _collect_grades(self) -> None:
        """Moves what has its reward to the outbox."""
        unfinished = []
        for grading in self._grading:
            if not (grading.done() or self._wait_for_grades):
                unfinished.append(grading)
                continue
            trajectory, timed_out = grading.result()
            self._outbox.append(trajectory)
            self._add(graded=1, grading_timeouts=int(timed_out))
        self._grading = unfinished

    def _add(self, **increments: Any) -> None:
        values = {k: getattr(self._stats, k) + v for k, v in increments.items()}
        self._stats = dataclasses.replace(self._stats, **values)
