"""Who holds which lease: so that what a lost sampler held is issued again."""

from __future__ import annotations

import collections
import dataclasses
import logging
import time
from collections.abc import Callable, Sequence

from areal_jax.transport.messages import Report, SamplerStats
from areal_jax.types import NO_VERSION, Lease

log = logging.getLogger(__name__)


@dataclasses.dataclass
class _Holder:
    incarnation: str
    last_seen: float
    announced: int
    """The newest policy version it was told of: it may begin to read that one at any time."""
    loading: int
    """The version that it reads, by its last report; -1 for none."""
    stats: SamplerStats
    held: dict[int, Lease] = dataclasses.field(default_factory=dict)
    """sample id -> its lease, until the sample is returned."""

    def leases(self) -> list[Lease]:
        return list({lease.sample_ids: lease for lease in self.held.values()}.values())


@dataclasses.dataclass(frozen=True)
class BusySpan:
    """When a role worked, in time.monotonic() of the trainer; of a sampler, as exact as its reports are frequent."""

    role: str
    start: float
    end: float


class LeaseHolders:
    """The samplers that have reported, and their leases. Not thread-safe: its owner locks.

    What a lost sampler held waits here to be leased again: `lost_lease` and `lost_evaluations`.
    """

    def __init__(self, timeout_seconds: float):
        self._timeout_seconds = timeout_seconds
        self._holders: dict[str, _Holder] = {}
        self._past: dict[str, SamplerStats] = {}
        self._lost: collections.deque[Lease] = collections.deque()
        self._spans: list[BusySpan] = []

    def meet(self, report: Report, version: int) -> None:
        """A sampler reports; one that was started again has lost what its last incarnation held."""
        holder = self._holders.get(report.sampler)
        if holder is not None and holder.incarnation != report.incarnation:
            self._past[f"{report.sampler} until {holder.incarnation}"] = holder.stats
            self._lose(report.sampler)
            holder = None
        if holder is None:
            holder = _Holder(report.incarnation, 0.0, version, report.loading, report.stats)
            self._holders[report.sampler] = holder
        now, worked = time.monotonic(), report.stats.busy_seconds - holder.stats.busy_seconds
        if worked > 0:
            self._spans.append(BusySpan(report.sampler, now - worked, now))
        holder.last_seen, holder.stats, holder.loading = now, report.stats, report.loading

    def take_spans(self) -> list[BusySpan]:
        """What samplers have worked since the last call."""
        spans, self._spans = self._spans, []
        return spans

    def expire(self) -> None:
        """Gives up samplers that have been silent for longer than the timeout."""
        late = time.monotonic() - self._timeout_seconds
        for name in [n for n, holder in self._holders.items() if holder.last_seen < late]:
            log.warning("sampler %s is silent for over %.0f s: leasing again", name, self._timeout_seconds)
            self._lose(name)

    def lost_lease(self, is_out: Callable[[int], bool]) -> Lease | None:
        """A training lease that was lost, with those of its samples that are still out."""
        while self._lost:
            lease = self._lost.popleft()
            left = tuple(i for i in lease.sample_ids if is_out(i))
            if left:
                return dataclasses.replace(lease, sample_ids=left)
        return None

    def lost_evaluations(self) -> list[Lease]:
        """The evaluation leases that were lost since the last call."""
        found = [lease for lease in self._lost if lease.pinned_version is not None]
        self._lost = collections.deque(lease for lease in self._lost if lease.pinned_version is None)
        return found

    def add_lost(self, lease: Lease) -> None:
        """A lease that nobody holds (of a resumed run)."""
        self._lost.append(lease)

    def _lose(self, sampler: str) -> None:
        self._lost += self._holders.pop(sampler).leases()

    def grant(self, sampler: str, leases: Sequence[Lease], version: int) -> None:
        """The sampler's reply carries these leases and announces this version."""
        holder = self._holders[sampler]
        holder.announced = version
        holder.held |= {i: lease for lease in leases for i in lease.sample_ids}

    def returned(self, sample_id: int) -> None:
        """The sample is in, whoever drew it."""
        for holder in self._holders.values():
            holder.held.pop(sample_id, None)

    def needed_versions(self) -> set[int]:
        """What samplers read, or may begin to."""
        versions = {v for holder in self._holders.values() for v in (holder.announced, holder.loading)}
        return versions - {NO_VERSION}

    def stats(self) -> dict[str, SamplerStats]:
        """Of every incarnation of every sampler, those that are gone included."""
        return self._past | {name: holder.stats for name, holder in self._holders.items()}
