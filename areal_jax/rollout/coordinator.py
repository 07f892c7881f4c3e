"""The trainer's side of the rollout: prompts out, trajectories in, batches to the trainer.

Owns all that must be single: the prompt stream, admission, the ledger, the queue and the published version. Samplers
talk to `exchange`; the training loop takes batches and publishes versions.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from typing import Any

from areal_jax.rollout.admission import AdmissionGate
from areal_jax.rollout.evaluation import Evaluation, EvaluationBoard
from areal_jax.rollout.groups import Group, GroupQueue, Intake
from areal_jax.rollout.leases import BusySpan, LeaseHolders
from areal_jax.rollout.ledger import Ledger
from areal_jax.transport.messages import Reply, Report, SamplerStats
from areal_jax.types import Lease, Prompt, Trajectory

PromptSource = Callable[[], tuple[Prompt, dict[str, Any]]]
"""-> the next prompt, and the state of the stream after it."""


@dataclasses.dataclass(frozen=True)
class CoordinatorConfig:
    """The keys of `config.rollout` that the coordinator needs."""

    group_size: int
    batch_samples: int
    max_staleness: float
    over_stale: str
    """'train', 'drop' or 'mask_tokens': what happens to tokens older than max_staleness when they are consumed."""
    max_refills: float
    """Dynamic sampling: groups without a signal are passed over for others, up to so many batches of them for one
    batch; 0 takes all groups."""
    injected_staleness: int
    """Draw samples with weights exactly so many versions old; with max_staleness 0."""
    queue_capacity: int
    """Samples in complete groups; when full, samplers wait."""
    lease_timeout_seconds: float
    temperature: float
    max_new_tokens: int


def _lease(config: CoordinatorConfig, prompt: Prompt, ids: tuple[int, ...], min_version: int) -> Lease:
    return Lease(prompt, ids, min_version, None, config.temperature, config.max_new_tokens)


class Coordinator:
    """See the module's docstring. Thread-safe."""

    def __init__(self, config: CoordinatorConfig, source: PromptSource, board: EvaluationBoard, version: int = 0):
        self.config = config
        self.run = uuid.uuid4().hex
        """New with every start of the trainer."""
        self._changed = threading.Condition()  # guards everything below except _source and _drawn
        self._source = source
        self._drawn: collections.deque[tuple[Prompt, dict[str, Any]]] = collections.deque()  # exchange's thread only
        self._gate = AdmissionGate(config.batch_samples, config.max_staleness, config.injected_staleness)
        self._ledger = Ledger()
        self._board = board
        self._version = version
        self._stopping = False
        self._stream_state: dict[str, Any] | None = None
        self._queue = GroupQueue(self._ledger)
        passable = config.max_refills * config.batch_samples
        self._new_intake = functools.partial(Intake, config.max_staleness, config.over_stale, passable)
        self._intake = self._new_intake()
        self.intake = self._intake
        """Of the last batch taken."""
        self._holders = LeaseHolders(config.lease_timeout_seconds)
        self.duplicates = 0
        self._heard = time.monotonic()

    # --- the samplers' side ---

    def exchange(self, report: Report) -> Reply:
        """Takes in what a sampler finished, grants what it may start. Called by one thread."""
        while len(self._drawn) * self.config.group_size < report.want:  # reading is I/O: not under the lock
            self._drawn.append(self._source())
        with self._changed:
            self._heard = time.monotonic()
            offered = self._gate.offered(self._version)
            self._holders.meet(report, offered)
            if report.run == self.run:  # what was drawn for another run of the trainer is not ours
                for trajectory in report.trajectories:
                    self._receive(trajectory)
            self._holders.expire()
            for lease in self._holders.lost_evaluations():
                self._board.give_back(lease)
            leases = self._grant(report.want, report.want_evaluation)
            self._holders.grant(report.sampler, leases, offered)
            self._ledger.check()
            self._changed.notify_all()
            credit = max(0, self.config.queue_capacity - self._queue.samples)
            return Reply(report.sequence, self.run, offered, tuple(leases), credit, self._stopping)

    def _receive(self, trajectory: Trajectory) -> None:
        if trajectory.evaluation:
            if self._board.receive(trajectory):
                self._holders.returned(trajectory.sample_id)
            return
        self._holders.returned(trajectory.sample_id)
        if not self._ledger.is_leased(trajectory.sample_id):
            self.duplicates += 1
            return
        self._queue.arrive(trajectory)

    def _grant(self, want: int, want_evaluation: int) -> list[Lease]:
        """Leases for about as many samples as are wanted; lost ones go first."""
        leases: list[Lease] = []
        if self._stopping:
            return leases
        for wanted, source in (
            (want_evaluation, self._board.grant),
            (want, lambda: self._holders.lost_lease(self._ledger.is_leased) or self._new_group()),
        ):
            granted = 0
            while granted < wanted and (lease := source()) is not None:
                leases.append(lease)
                granted += len(lease.sample_ids)
        return leases

    def _new_group(self) -> Lease | None:
        size = self.config.group_size
        if not self._drawn or not self._gate.may_start(size, self._version):
            return None
        min_version = self._gate.start(size, self._version)
        prompt, self._stream_state = self._drawn.popleft()
        ids = self._ledger.issue(size)
        self._queue.open(Group(prompt, ids))
        return _lease(self.config, prompt, ids, min_version)

    # --- the training loop's side ---

    def take_batch(self, version: int, timeout: float) -> list[Trajectory] | None:
        """The oldest complete groups, at least batch_samples samples, by sample id; None if they are not there in time.

        Samples over the staleness bound are dealt with here, at the moment of consumption. Call `trained` with the
        batch once its update is done.
        """
        deadline = time.monotonic() + timeout
        with self._changed:
            while len(self._intake.samples) < self.config.batch_samples:
                group = self._queue.take()
                if group is not None:
                    for reason, sample_ids in self._intake.add(group, version).items():
                        self._ledger.drop(sample_ids, reason)
                        self._gate.refund(len(sample_ids))
                elif not self._changed.wait(max(0.0, deadline - time.monotonic())):
                    return None
            self.intake, self._intake = self._intake, self._new_intake()
            batch = self.intake.samples
            # dropping can leave a batch with part of a group too many; Eq. 3 counts batch_samples to a version
            self._gate.refund(len(batch) - self.config.batch_samples)
            return sorted(batch, key=lambda t: t.sample_id)

    def trained(self, batch: Sequence[Trajectory]) -> None:
        """The batch has been trained on."""
        with self._changed:
            self._ledger.train([t.sample_id for t in batch])
            self._ledger.check()

    def publish(self, version: int) -> None:
        """Parameters of this version are committed in the weight channel: announce it."""
        with self._changed:
            self._version = version

    def stop(self) -> None:
        """Tells samplers, with their next reply, to end."""
        with self._changed:
            self._stopping = True

    def evaluate(self, version: int) -> None:
        """Asks for an evaluation of a published version; `evaluations` returns it when it is finished."""
        with self._changed:
            self._board.request(version)

    def evaluations(self) -> list[Evaluation]:
        with self._changed:
            return self._board.collect()

    def pending_evaluations(self) -> tuple[int, ...]:
        """The versions still to be measured, oldest request first."""
        with self._changed:
            return self._board.pinned_versions()

    def silence_seconds(self) -> float:
        """Since any sampler was heard of, or since the start."""
        with self._changed:
            self._holders.expire()
            return time.monotonic() - self._heard

    def needed_versions(self) -> set[int]:
        """Versions that a sampler may be loading, or that an evaluation is pinned to."""
        with self._changed:
            pinned = {self._gate.offered(self._version), *self._board.pinned_versions()}
            return self._holders.needed_versions() | pinned

    def occupancy(self) -> int:
        """Samples in complete groups that wait for the trainer."""
        with self._changed:
            return self._queue.samples

    def activity(self) -> tuple[list[BusySpan], int]:
        """Since the last call: what samplers worked, and how many batches ahead of the version samples started."""
        with self._changed:
            return self._holders.take_spans(), self._gate.take_ahead()

    def counts(self) -> dict[str, int]:
        """The ledger's balance."""
        with self._changed:
            return self._ledger.counts()

    def sampler_stats(self) -> dict[str, SamplerStats]:
        with self._changed:
            return self._holders.stats()

    @property
    def version(self) -> int:
        """The newest published version."""
        with self._changed:
            return self._version

    # --- checkpoints ---

    def save(self) -> dict[str, Any]:
        """JSON-able: the books, the stream's state and the groups still open. Call after `trained`."""
        with self._changed:
            if self._intake.samples:
                raise RuntimeError("a batch is half taken; save after `trained`")
            return {
                "ledger": self._ledger.save(),
                "started": self._gate.started,
                "stream": self._stream_state,
                "groups": [group.save() for group in self._queue.groups()],
            }

    def restore(self, saved: dict[str, Any]) -> None:
        """From `save`, before the first exchange: open groups are leased again, whole."""
        with self._changed:
            self._ledger = Ledger.restore(saved["ledger"])
            self._gate.started = saved["started"]
            self._stream_state = saved["stream"]
            self._queue = GroupQueue(self._ledger)
            for group in map(Group.restore, saved["groups"]):
                self._queue.open(group)
                self._holders.add_lost(_lease(self.config, group.prompt, group.sample_ids, self._version))
