"""The ledger: every sample is in exactly one state, and the books balance at every instant."""

from __future__ import annotations

import collections
from collections.abc import Iterable


class LedgerError(RuntimeError):
    """A transition that would count a sample twice or lose it, or books that do not balance."""


class Ledger:
    """Follows each sample: leased -> finished -> queued -> trained, or dropped with a reason.

    leased: with a sampler, or waiting to be leased again. finished: returned, its group incomplete. queued: its group
    complete. trained and dropped are final and only counted. Ids are issued in increasing order, so an id below
    `issued` that is in no live state is final: that is how duplicates are known without remembering every id.
    Not thread-safe: its owner locks.
    """

    def __init__(self) -> None:
        self.issued = 0
        self.trained = 0
        self.dropped: collections.Counter[str] = collections.Counter()
        self._leased: set[int] = set()
        self._finished: set[int] = set()
        self._queued: set[int] = set()

    def issue(self, count: int) -> tuple[int, ...]:
        """New sample ids, leased."""
        ids = tuple(range(self.issued, self.issued + count))
        self.issued += count
        self._leased.update(ids)
        return ids

    def is_leased(self, sample_id: int) -> bool:
        """False for an id already returned (a duplicate) or never issued."""
        return sample_id in self._leased

    def was_issued(self, sample_id: int) -> bool:
        return 0 <= sample_id < self.issued

    def finish(self, sample_id: int) -> None:
        self._move([sample_id], self._leased, self._finished)

    def queue(self, sample_ids: Iterable[int]) -> None:
        self._move(sample_ids, self._finished, self._queued)

    def train(self, sample_ids: Iterable[int]) -> None:
        self.trained += self._move(sample_ids, self._queued, set())

    def drop(self, sample_ids: Iterable[int], reason: str) -> None:
        self.dropped[reason] += self._move(sample_ids, self._queued, set())

    def counts(self) -> dict[str, int]:
        """The six numbers of the balance."""
        return {
            "issued": self.issued,
            "leased": len(self._leased),
            "finished": len(self._finished),
            "queued": len(self._queued),
            "trained": self.trained,
            "dropped": self.dropped.total(),
        }

    def check(self) -> None:
        """Raises LedgerError unless issued = leased + finished + queued + trained + dropped."""
        c = self.counts()
        if c["issued"] != sum(v for k, v in c.items() if k != "issued"):
            raise LedgerError(f"the ledger does not balance: {c}")

    def open_ids(self) -> set[int]:
        """Samples neither trained nor dropped."""
        return self._leased | self._finished | self._queued

    def save(self) -> dict[str, object]:
        """JSON-able. Live samples are saved as leased: a resumed run draws them again."""
        return {
            "issued": self.issued,
            "trained": self.trained,
            "dropped": dict(self.dropped),
            "open": sorted(self.open_ids()),
        }

    @classmethod
    def restore(cls, saved: dict) -> Ledger:
        """From `save`. Raises LedgerError if the saved books do not balance."""
        ledger = cls()
        ledger.issued, ledger.trained = saved["issued"], saved["trained"]
        ledger.dropped.update(saved["dropped"])
        ledger._leased.update(saved["open"])
        ledger.check()
        return ledger

    @staticmethod
    def _move(sample_ids: Iterable[int], source: set[int], target: set[int]) -> int:
        ids = list(sample_ids)
        if len(set(ids)) != len(ids) or not source.issuperset(ids):
            raise LedgerError(f"samples {sorted(set(ids) - source)[:5]} are not in the state they should leave")
        source.difference_update(ids)
        target.update(ids)
        return len(ids)
