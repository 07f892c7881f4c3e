"""Variable-length trajectories into fixed-shape micro-batches (numpy, on the host).

Sequences are laid into rows longest first, each into the first row with room (first-fit decreasing); rows are grouped
into micro-batches. The shapes depend on the configuration alone, so one compiled step serves every batch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

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

    def max_micro_batches(self, sequences: int) -> int:
        """Enough micro-batches for any `sequences` sequences.

        A row is closed to a sequence only when it lacks the room, so every row but the last holds at least
        floor(row_length / max_sequence_length) of them.
        """
        rows = -(-sequences // (self.row_length // self.max_sequence_length))
        return -(-rows // self.rows)


def assign_rows(lengths: Sequence[int], row_length: int) -> list[list[int]]:
    """First-fit decreasing: rows as lists of indices into `lengths`. Ties keep their order, so it is deterministic."""
    rows: list[list[int]] = []
    room: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        length = lengths[index]
        if length > row_length:
            raise ValueError(f"sequence {index} has {length} tokens; a row holds {row_length}")
        row = next((r for r, left in enumerate(room) if left >= length), None)
        if row is None:
            rows.append([])
            room.append(row_length)
            row = len(rows) - 1
        rows[row].append(index)
        room[row] -= length
    return rows


@dataclasses.dataclass(frozen=True)
class Layout:
    """Where the trajectories of a packed minibatch lie."""

    spans: list[tuple[int, int, int]]
    """Per trajectory: its row (counted through all micro-batches), first position and length."""
    shape: tuple[int, int, int]
    """(M, R, L)."""

    def spread(self, values: Sequence[np.ndarray]) -> np.ndarray:
        """One array [T] per trajectory -> float32 [M, R, L], 0 elsewhere."""
        packed = np.zeros((self.shape[0] * self.shape[1], self.shape[2]), np.float32)
        for (row, start, length), value in zip(self.spans, values, strict=True):
            packed[row, start : start + length] = value
        return packed.reshape(self.shape)

    def gather(self, packed: np.ndarray) -> list[np.ndarray]:
        """The inverse of `spread`."""
        rows = np.asarray(packed).reshape(-1, self.shape[2])
        return [rows[row, start : start + length] for row, start, length in self.spans]


def pack(trajectories: Sequence[Trajectory], config: PackingConfig, micro_batches: int) -> tuple[TrainBatch, Layout]:
    """Packs one minibatch.

    micro_batches: the static M; raises ValueError when the sequences need more.
    """
    rows = assign_rows([len(t.tokens) for t in trajectories], config.row_length)
    used = -(-len(rows) // config.rows)
    if used > micro_batches:
        raise ValueError(f"{len(rows)} rows need {used} micro-batches of {config.rows} rows; there are {micro_batches}")
    shape = (micro_batches * config.rows, config.row_length)
    tokens, segment_ids, positions = (np.zeros(shape, np.int32) for _ in range(3))
    loss_mask, behaviour = (np.zeros(shape, np.float32) for _ in range(2))
    versions = np.full(shape, PROMPT_VERSION, np.int32)
    spans = [(0, 0, 0)] * len(trajectories)
    for r, members in enumerate(rows):
        start = 0
        for segment, index in enumerate(members, start=1):
            t = trajectories[index]
            span = slice(start, start + len(t.tokens))
            tokens[r, span] = t.tokens
            segment_ids[r, span] = segment
            positions[r, span] = np.arange(len(t.tokens))
            loss_mask[r, span] = t.loss_mask
            behaviour[r, span] = t.behaviour_logprobs
            versions[r, span] = t.policy_versions
            spans[index] = (r, start, len(t.tokens))
            start = span.stop
    stacked = (micro_batches, config.rows, config.row_length)
    batch = TrainBatch(
        tokens=tokens.reshape(stacked),
        segment_ids=segment_ids.reshape(stacked),
        positions=positions.reshape(stacked),
        loss_mask=loss_mask.reshape(stacked),
        behaviour_logprobs=behaviour.reshape(stacked),
        policy_versions=versions.reshape(stacked),
        micro_batches=np.int32(used),
    )
    return batch, Layout(spans, stacked)


def efficiency(batches: Sequence[TrainBatch]) -> float:
    """Real tokens over tokens computed, in [0, 1]."""
    real = sum(int(np.count_nonzero(b.segment_ids)) for b in batches)
    return real / max(1, sum(int(b.micro_batches) * b.tokens[0].size for b in batches))
