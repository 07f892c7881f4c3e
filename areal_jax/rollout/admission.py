"""The staleness bound at the door: AReaL Eq. 3 (arXiv 2505.24298)."""

from __future__ import annotations

import math


class AdmissionGate:
    """Lets a new sample start only while floor((N - 1) / B) <= version + eta.

    N counts the samples started, the new one included, and not those refunded (rejected, or lost for good); B is the
    number of samples per training batch; eta is `max_staleness`, possibly infinite. Not thread-safe: its owner locks.
    """

    def __init__(self, batch_samples: int, max_staleness: float, injected: int = 0):
        """injected: samples are to be drawn by weights so many versions old (an experiment; with max_staleness 0)."""
        if batch_samples < 1 or max_staleness < 0:
            raise ValueError(f"batch_samples {batch_samples} must be positive and max_staleness {max_staleness} >= 0")
        self.batch_samples, self.max_staleness, self._injected = batch_samples, max_staleness, injected
        self.started = 0
        self._ahead = 0

    def offered(self, version: int) -> int:
        """The version that samplers are told is the newest."""
        return max(0, version - self._injected)

    def may_start(self, samples: int, version: int) -> bool:
        """Whether `samples` more may start at this version, all of them or none."""
        return self._batch_of(self.started + samples) <= version + self.max_staleness

    def start(self, samples: int, version: int) -> int:
        """Starts samples that may start; returns the oldest version they may be drawn with.

        The last of them belongs to batch k = floor((N - 1) / B), trained at version k when batches are consumed in
        order, so weights of at least version k - eta keep its tokens within the bound.
        Raises ValueError when they may not start.
        """
        if not self.may_start(samples, version):
            raise ValueError(f"{self.started} + {samples} samples at version {version} exceed the staleness bound")
        self.started += samples
        self._ahead = max(self._ahead, self._batch_of(self.started) - version)
        if math.isinf(self.max_staleness):
            return 0
        return max(0, self._batch_of(self.started) - math.floor(self.max_staleness) - self._injected)

    def take_ahead(self) -> int:
        """The most that floor((N - 1) / B) - version was when a sample started since the last call, at least 0."""
        ahead, self._ahead = self._ahead, 0
        return ahead

    def refund(self, samples: int) -> None:
        """Takes back samples that will never be trained on."""
        if not 0 <= samples <= self.started:
            raise ValueError(f"refund of {samples} samples; {self.started} are started")
        self.started -= samples

    def _batch_of(self, n: int) -> int:
        return (n - 1) // self.batch_samples
