"""Evaluation through the samplers: held-out prompts answered with one pinned version while training goes on."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Sequence

from areal_jax.types import Lease, Prompt, Trajectory

FIRST_SAMPLE_ID = 1 << 31
"""Evaluation samples count from here, apart from training samples (ids are uint32 in the samplers)."""


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """One finished evaluation."""

    version: int
    """The policy version that every token was drawn with."""
    samples: dict[float, tuple[Trajectory, ...]]
    """temperature -> one trajectory per prompt, in the prompts' order."""


class EvaluationBoard:
    """Jobs in order; the prompts of the first unfinished one are leased out. Not thread-safe: its owner locks."""

    def __init__(self, prompts: Sequence[Prompt], temperatures: Sequence[float], max_new_tokens: int):
        self._prompts, self._temperatures = tuple(prompts), tuple(temperatures)
        self._max_new_tokens = max_new_tokens
        self._jobs: collections.deque[int] = collections.deque()
        self._unleased: collections.deque[Lease] = collections.deque()
        self._returned: dict[int, Trajectory] = {}
        self._finished: list[Evaluation] = []

    def request(self, version: int) -> None:
        """Asks for an evaluation of a version, which the weight channel must keep until it is finished."""
        self._jobs.append(version)
        if len(self._jobs) == 1:
            self._begin()

    def pinned_versions(self) -> tuple[int, ...]:
        return tuple(self._jobs)

    def grant(self) -> Lease | None:
        return self._unleased.popleft() if self._unleased else None

    def give_back(self, lease: Lease) -> None:
        """A lease whose sampler is lost; ignored if its sample has come in or its job is over."""
        if self._jobs and lease.pinned_version == self._jobs[0] and lease.sample_ids[0] not in self._returned:
            self._unleased.append(lease)

    def receive(self, trajectory: Trajectory) -> bool:
        """Takes a sample in; False for one of another version, which an earlier job left behind."""
        if not self._jobs or not bool((trajectory.policy_versions[trajectory.prompt_length :] == self._jobs[0]).all()):
            return False
        self._returned.setdefault(trajectory.sample_id, trajectory)
        count = len(self._prompts)
        if len(self._returned) < count * len(self._temperatures):
            return True
        ordered = [self._returned[i] for i in sorted(self._returned)]
        samples = {t: tuple(ordered[k * count : (k + 1) * count]) for k, t in enumerate(self._temperatures)}
        self._finished.append(Evaluation(self._jobs.popleft(), samples))
        if self._jobs:
            self._begin()
        return True

    def collect(self) -> list[Evaluation]:
        """Evaluations finished since the last call."""
        finished, self._finished = self._finished, []
        return finished

    def _begin(self) -> None:
        self._returned = {}
        self._unleased.clear()  # what was given back of the last job, and came in all the same
        version = self._jobs[0]
        for k, temperature in enumerate(self._temperatures):
            for i, prompt in enumerate(self._prompts):
                sample_id = FIRST_SAMPLE_ID + k * len(self._prompts) + i
                self._unleased.append(Lease(prompt, (sample_id,), 0, version, temperature, self._max_new_tokens))
