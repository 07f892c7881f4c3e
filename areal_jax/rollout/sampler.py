"""A sampler's work, one turn at a time: report -> swap weights -> accept work -> decode -> grade.

It holds no state worth saving: what it was leased is issued again if it dies. While a turn talks to the trainer and
grades, the device decodes and the next weights are read.
"""

from __future__ import annotations

import dataclasses
import logging
import time
import uuid
from collections.abc import Sequence
from typing import Any

from areal_jax.rollout.engine import Completion, Engine
from areal_jax.rollout.grading import Grader, Grading
from areal_jax.rollout.programs import Program
from areal_jax.rollout.schedule import Request
from areal_jax.rollout.weight_loader import WeightLoader
from areal_jax.transport.broadcast import Broadcast
from areal_jax.transport.messages import Report, SamplerStats
from areal_jax.transport.trajectories import Link
from areal_jax.transport.weights import WeightChannel
from areal_jax.types import NO_VERSION, Lease, PolicySnapshot, Trajectory

WAITING_SECONDS = 0.005
"""How long a turn that has nothing to decode waits for weights, and for a grade."""

log = logging.getLogger(__name__)


def capacity(slots: int) -> int:
    """Samples that a sampler holds: a quarter more than it has slots, so that those that become free while it decodes
    are filled at once."""
    return slots + slots // 4


class _Drawn:
    """What has been drawn and not been acknowledged yet: samples whose grades are awaited, and trajectories to send."""

    def __init__(self) -> None:
        self.grading: list[Grading] = []
        self.outbox: list[Trajectory] = []

    def collect(self, wait: bool) -> tuple[int, int]:
        """Moves what has its reward to the outbox, or everything (wait). Returns how many, and how many ran out of
        time."""
        unfinished, graded, timeouts = [], 0, 0
        for grading in self.grading:
            if not (wait or grading.done()):
                unfinished.append(grading)
                continue
            trajectory, timed_out = grading.result()
            self.outbox.append(trajectory)
            graded, timeouts = graded + 1, timeouts + timed_out
        self.grading = unfinished
        return graded, timeouts

    def sendable(self, credits: int) -> list[Trajectory]:
        """So many training trajectories, and every one of an evaluation."""
        training = [t for t in self.outbox if not t.evaluation]
        return training[:credits] + [t for t in self.outbox if t.evaluation]

    def sent(self, trajectories: Sequence[Trajectory]) -> None:
        acknowledged = {t.sample_id for t in trajectories}
        self.outbox = [t for t in self.outbox if t.sample_id not in acknowledged]


class Sampler:
    """Runs a training engine, and beside it an evaluation engine while an evaluation is under way."""

    def __init__(
        self,
        name: str,
        program: Program,
        channel: WeightChannel,
        grader: Grader | None,
        seed: int,
        deterministic: bool = False,
        broadcast: Broadcast | None = None,
    ):
        """grader: None in the processes of a group that do not report.
        deterministic: what it does depends on nothing's speed; it waits for grades and for weights.
        broadcast: between the processes of a group, if there are several; `connect` takes its links then."""
        self._name, self._incarnation, self._seed = name, uuid.uuid4().hex, seed
        self._program, self._grader, self._deterministic = program, grader, deterministic
        self._loader = WeightLoader(channel, program.model.abstract_params, deterministic, broadcast)
        self._link: Link | None = None
        self._engine: Engine | None = None
        self._evaluation: Engine | None = None
        self._sequence, self._stats = 0, SamplerStats()
        self._started = time.monotonic()
        self._begin_run("")

    def _begin_run(self, run: str) -> None:
        """Holds nothing of any run."""
        self._run = run
        self._newest = NO_VERSION  # that the trainer has announced
        self._next: PolicySnapshot | None = None  # read, and to be swapped in
        self._leases: dict[int, Lease] = {}  # by sample id, of the samples being drawn
        self._backlog: list[Lease] = []  # need newer weights than are here
        self._evaluation_backlog: list[Lease] = []  # need the weights of their version
        self._drawn = _Drawn()
        self._credits = 0  # training trajectories that the next report may carry

    def start(self, snapshot: PolicySnapshot) -> None:
        """Builds the engine and compiles every shape it can meet."""
        log.info("%s", self._program.config.description())
        self._engine = Engine(self._program, snapshot, self._seed)
        self._engine.warm_up()

    def connect(self, link: Link) -> None:
        """From now on `turn` talks to the trainer through this link."""
        self._link = link
        self._started = time.monotonic()

    def close(self) -> None:
        self._loader.close()

    def turn(self, compiles_after_warmup: int = 0) -> tuple[bool, bool]:
        """One exchange with the trainer and one chunk of decoding. Returns (worked, told to stop)."""
        if self._engine is None or self._link is None:
            raise RuntimeError("start() and connect() come before turn()")
        began = time.monotonic()
        decoding = any(e.in_flight for e in self._engines())
        stop = self._exchange(self._engine, self._link, compiles_after_warmup)
        if not decoding:  # then the exchange was no work
            began = time.monotonic()
        self._update_weights(self._engine)
        self._accept(self._engine)
        engines = self._engines()
        for engine in engines:
            for completion in engine.step():
                self._drawn.grading += self._grade(completion)
        worked = bool(engines or self._drawn.grading)
        if self._drawn.grading and not engines:
            self._drawn.grading[0].wait(WAITING_SECONDS)
        graded, timeouts = self._drawn.collect(wait=self._deterministic)
        if self._evaluation is not None and not self._evaluation.unfinished:
            self._evaluation = None
        busy = time.monotonic() - began if engines else 0.0
        self._add(busy_seconds=busy, graded=graded, grading_timeouts=timeouts)
        return worked, stop

    def _engines(self) -> list[Engine]:
        """Those with something to draw."""
        return [e for e in (self._engine, self._evaluation) if e is not None and e.unfinished]

    def _exchange(self, engine: Engine, link: Link, compiles_after_warmup: int) -> bool:
        self._stats = dataclasses.replace(
            self._stats,
            wall_seconds=time.monotonic() - self._started,
            generated_tokens=engine.generated_tokens,
            decoded_slot_steps=engine.decoded_slot_steps,
            compiles_after_warmup=compiles_after_warmup,
        )
        sent = self._drawn.sendable(self._credits)
        self._sequence += 1
        report = Report(
            self._name,
            self._incarnation,
            self._run,
            self._sequence,
            version=engine.version,
            loading=NO_VERSION if self._loader.loading is None else self._loader.loading,
            want=self._want(engine, len(self._drawn.outbox) - len(sent)),
            want_evaluation=self._want_evaluation(),
            trajectories=tuple(sent),
            stats=self._stats,
        )
        reply = link.exchange(report)
        if reply.run != self._run:
            self._forget(engine, reply.run)
        self._drawn.sent(sent)
        self._credits = reply.credits
        self._newest = reply.version
        for lease in reply.leases:
            (self._backlog if lease.pinned_version is None else self._evaluation_backlog).append(lease)
        return reply.stop

    def _want(self, engine: Engine, unsent: int) -> int:
        """Training samples to ask for. What the trainer has no room for keeps others from being drawn."""
        waiting = sum(len(lease.sample_ids) for lease in self._backlog) + len(self._drawn.grading)
        held = engine.unfinished + unsent + waiting
        if self._program.config.static:
            return 0 if held else self._program.config.slots
        return max(0, capacity(self._program.config.slots) - held)

    def _want_evaluation(self) -> int:
        evaluating = self._evaluation.unfinished if self._evaluation else 0
        held = evaluating + len(self._evaluation_backlog) + len(self._drawn.grading)
        return max(0, capacity(self._program.config.slots) - held)

    def _update_weights(self, engine: Engine) -> None:
        """Has newer weights read beside decoding, and swaps them in between two chunks."""
        if self._loader.loading is None and (version := self._version_to_read(engine)) is not None:
            self._loader.begin(version)
        read = self._loader.collect(0.0 if self._engines() else WAITING_SECONDS)
        if read is not None:
            version, snapshot = read
            if snapshot is None:  # gone: whoever measures it has done so
                self._evaluation_backlog = [x for x in self._evaluation_backlog if x.pinned_version != version]
            else:
                self._begin_evaluation(snapshot)
                here = max(engine.version, self._next.version if self._next else NO_VERSION)
                if here < version <= self._newest:  # an evaluation's may be newer than training's
                    self._next = snapshot
        if self._next is None:
            return
        finish = self._program.config.kv_on_update == "finish"
        engine.hold(finish)
        if not (finish and engine.live):
            pause = engine.set_params(self._next)
            self._next = None
            engine.hold(False)
            self._add(swaps=1, swap_seconds=pause)

    def _version_to_read(self, engine: Engine) -> int | None:
        """What an evaluation waits for, or else the newest, unless it is here."""
        here = {e.version for e in (engine, self._evaluation) if e is not None}
        pinned = [lease.pinned_version for lease in self._evaluation_backlog if lease.pinned_version not in here]
        if pinned:
            return pinned[0]
        return self._newest if self._next is None and self._newest > engine.version else None

    def _begin_evaluation(self, snapshot: PolicySnapshot) -> None:
        """Sets an engine up beside the training one, with the same compiled programs, if an evaluation waits for this
        version. Evaluations come one after another: what is left of an older one is over, whoever finished it."""
        present = self._evaluation.version if self._evaluation else NO_VERSION
        waiting = {lease.pinned_version for lease in self._evaluation_backlog}
        if snapshot.version in waiting and snapshot.version > present:
            self._evaluation = Engine(self._program, snapshot, self._seed)
            self._leases = {i: lease for i, lease in self._leases.items() if lease.pinned_version is None}

    def _forget(self, engine: Engine, run: str) -> None:
        """The trainer was started anew: what was drawn for its last run, and its weights, are worth nothing."""
        self._loader.forget()
        self._evaluation = None
        self._engine = Engine(self._program, PolicySnapshot(NO_VERSION, engine.snapshot.params), self._seed)
        self._begin_run(run)

    def _accept(self, engine: Engine) -> None:
        """Starts what the weights that are here allow."""
        self._begin_evaluation(engine.snapshot)
        if self._evaluation is not None:
            version = self._evaluation.version
            self._submit(self._evaluation, [x for x in self._evaluation_backlog if x.pinned_version == version])
            self._evaluation_backlog = [x for x in self._evaluation_backlog if (x.pinned_version or 0) > version]
        ready = [lease for lease in self._backlog if lease.min_version <= engine.version]
        self._backlog = [lease for lease in self._backlog if lease.min_version > engine.version]
        self._submit(engine, ready)

    def _submit(self, engine: Engine, leases: Sequence[Lease]) -> None:
        for lease in leases:
            # a sampler that was given up and is back may be leased what it is still drawing
            ids = [i for i in lease.sample_ids if i not in self._leases]
            self._leases |= dict.fromkeys(ids, lease)
            engine.submit([Request(i, lease.prompt.tokens, lease.max_new_tokens, lease.temperature) for i in ids])

    def _grade(self, completion: Completion) -> list[Grading]:
        lease = self._leases.pop(completion.request.sample_id)
        if self._grader is None:
            return []
        return [self._grader(lease.prompt, completion, lease.pinned_version is not None)]

    def _add(self, **increments: Any) -> None:
        values = {k: getattr(self._stats, k) + v for k, v in increments.items()}
        self._stats = dataclasses.replace(self._stats, **values)
