"""Variable-length trajectories into fixed-shape micro-batches (numpy, on the host).

Every micro-batch has the same budget of tokens (AReaL's dynamic batching, arXiv 2505.24298, Algorithm 1), and all but
the last are nearly full: sequences are laid into rows longest first, each into the first row with room (first-fit
decreasing). Where they are short, the rows of a micro-batch may be cut into 2, 4, ... parts, which costs attention
less. The shapes depend on the configuration alone, so one compiled step serves every batch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from areal_jax.types import PROMPT_VERSION, TrainBatch, Trajectory


@dataclasses.dataclass(frozen=True)
class PackingConfig:
    """The fixed shape of a packed minibatch."""

    row_length: int
    """Tokens per row, L."""
    rows: int
    """Rows per micro-batch, R; rows x row_length is the micro-batch's token budget."""
    max_sequence_length: int
    """No sequence may be longer; at most row_length."""
    halvings: int = 0
    """How often rows may be cut in half: a micro-batch has rows x 2^h rows of row_length / 2^h, for an h from 0 to
    this. 2^halvings divides row_length."""

    def max_micro_batches(self, sequences: int) -> int:
        """Enough micro-batches for any `sequences` sequences.

        A row is closed to a sequence only when it lacks the room, so every row but the last of its length holds at
        least floor(its length / that of the longest sequence that it may hold).
        """
        fewest = min(self._sequences_at_least(h) << h for h in range(self.halvings + 1))
        return -(-sequences // (fewest * self.rows)) + self.halvings

    def _sequences_at_least(self, halvings: int) -> int:
        length = self.row_length >> halvings
        return length // min(length, self.max_sequence_length)


def assign_rows(lengths: Sequence[int], row_length: int) -> list[list[int]]:
    """First-fit decreasing: rows as lists of indices into `lengths`. Ties keep their order, so it is deterministic."""
    rows = _Rows(row_length)
    for index in longest_first(lengths):
        rows.put(index, lengths[index])
    return rows.members


def longest_first(lengths: Sequence[int]) -> list[int]:
    return sorted(range(len(lengths)), key=lambda i: -lengths[i])


class _Rows:
    """Rows of one length that are being filled."""

    def __init__(self, length: int):
        self.length = length
        self.members: list[list[int]] = []
        self._room: list[int] = []

    def put(self, index: int, length: int, open_another: bool = True) -> bool:
        """Lays a sequence into the first row with room, or into another row. Returns whether it did."""
        row = next((r for r, room in enumerate(self._room) if room >= length), None)
        if row is None and open_another:
            if length > self.length:
                raise ValueError(f"sequence {index} has {length} tokens; a row holds {self.length}")
            row = self.add()
        if row is None:
            return False
        self.members[row].append(index)
        self._room[row] -= length
        return True

    def add(self) -> int:
        self.members.append([])
        self._room.append(self.length)
        return len(self.members) - 1


class MicroBatch(NamedTuple):
    """Which sequences lie in the rows of a micro-batch, rows cut into 2^halvings parts counting as so many."""

    halvings: int
    rows: list[list[int]]


def assign_micro_batches(lengths: Sequence[int], config: PackingConfig) -> list[MicroBatch]:
    """Fills micro-batches with all sequences.

    Rows of every length take first the sequences that are too long for the next shorter ones, and then, as far as they
    have room in the micro-batches that those need, the longest of the others.
    """
    micro_batches, left = [], longest_first(lengths)
    for halvings in range(config.halvings + 1):
        rows, count = _Rows(config.row_length >> halvings), config.rows << halvings
        shortest = 0 if halvings == config.halvings else rows.length // 2 + 1
        needed = [i for i in left if lengths[i] >= shortest]
        for i in needed:
            rows.put(i, lengths[i])
        while len(rows.members) % count:
            rows.add()
        others = [i for i in left if lengths[i] < shortest]
        left = [i for i in others if not rows.put(i, lengths[i], open_another=False)]
        micro_batches += [MicroBatch(halvings, rows.members[m : m + count]) for m in range(0, len(rows.members), count)]
    return micro_batches


@dataclasses.dataclass(frozen=True)
class Layout:
    """Where the trajectories of a packed minibatch lie."""

    spans: list[slice]
    """Per trajectory, in the flattened minibatch."""
    shape: tuple[int, int, int]
    """(M, R, L)."""

    def spread(self, values: Sequence[np.ndarray], dtype: Any = np.float32, elsewhere: float = 0) -> np.ndarray:
        """One array [T] per trajectory -> [M, R, L]."""
        packed = np.full(self.shape, elsewhere, dtype)
        flat = packed.reshape(-1)
        for span, value in zip(self.spans, values, strict=True):
            flat[span] = value
        return packed

    def gather(self, packed: np.ndarray) -> list[np.ndarray]:
        """The inverse of `spread`."""
        flat = np.asarray(packed).reshape(-1)
        return [flat[span] for span in self.spans]


def pack(trajectories: Sequence[Trajectory], config: PackingConfig, micro_batches: int) -> tuple[TrainBatch, Layout]:
    """Packs one minibatch.

    micro_batches: the static M; raises ValueError when the sequences need more.
    """
    assigned = assign_micro_batches([len(t.tokens) for t in trajectories], config)
    return lay_out(trajectories, assigned, config, micro_batches)


def lay_out(
    trajectories: Sequence[Trajectory], assigned: Sequence[MicroBatch], config: PackingConfig, micro_batches: int
) -> tuple[TrainBatch, Layout]:
    """A minibatch of micro-batches that are assigned already; micro_batches as in `pack`."""
    used = len(assigned)
    if used > micro_batches:
        raise ValueError(f"the sequences need {used} micro-batches of {config.rows} rows; there are {micro_batches}")
    spans, segments = _spans(trajectories, assigned, config)
    layout = Layout(spans, (micro_batches, config.rows, config.row_length))

    numbers = [np.full(len(t.tokens), s) for t, s in zip(trajectories, segments, strict=True)]
    batch = TrainBatch(
        tokens=layout.spread([t.tokens for t in trajectories], np.int32),
        segment_ids=layout.spread(numbers, np.int32),
        positions=layout.spread([np.arange(len(t.tokens)) for t in trajectories], np.int32),
        loss_mask=layout.spread([t.loss_mask for t in trajectories]),
        behaviour_logprobs=layout.spread([t.behaviour_logprobs for t in trajectories]),
        policy_versions=layout.spread([t.policy_versions for t in trajectories], np.int32, PROMPT_VERSION),
        micro_batches=np.int32(used),
        halvings=np.array([h for h, _ in assigned] + [0] * (micro_batches - used), np.int32),
    )
    return batch, layout


def _spans(
    trajectories: Sequence[Trajectory], assigned: Sequence[MicroBatch], config: PackingConfig
) -> tuple[list[slice], list[int]]:
    """Per trajectory its place in the flattened minibatch, and its segment id, unique within an uncut row."""
    spans, segments = [slice(0, 0)] * len(trajectories), [0] * len(trajectories)
    for m, (halvings, rows) in enumerate(assigned):
        length, segment = config.row_length >> halvings, 0
        for r, members in enumerate(rows):
            if r % (1 << halvings) == 0:
                segment = 0
            start = m * config.rows * config.row_length + r * length
            for index in members:
                segment += 1
                spans[index], segments[index] = slice(start, start + len(trajectories[index].tokens)), segment
                start = spans[index].stop
    return spans, segments


def efficiency(batches: Sequence[TrainBatch]) -> float:
    """Real tokens over tokens computed, in [0, 1]."""
    real = sum(int(np.count_nonzero(b.segment_ids)) for b in batches)
    return real / max(1, sum(int(b.micro_batches) * b.tokens[0].size for b in batches))
