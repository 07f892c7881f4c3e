"""The slots' device buffers, and the programs on any number of slots at once: cut to the compiled sizes, and padded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from areal_jax.rollout.programs import Program, Progress, empty_rows, empty_state, warm_up
from areal_jax.rollout.schedule import Request
from areal_jax.types import Params


class Slots:
    """Every method sends work to the device and returns at once, with what is still being computed."""

    def __init__(self, program: Program, seed: int):
        self._program, self._config = program, program.config
        self._state = empty_state(program.model, self._config, seed)

    def warm_up(self, params: Params) -> None:
        """Compiles every shape there is, while all slots are idle."""
        self._state = warm_up(self._program, params, self._state)

    def place(self, slots: Sequence[int], requests: Sequence[Request]) -> None:
        """Puts the prompts of requests into slots and makes those active."""
        for start, piece in self._config.pieces(slots):
            rows = empty_rows(self._config, len(piece))
            rows.slots[:] = piece
            for i, r in enumerate(requests[start : start + len(piece)]):
                rows.prompts[i, : len(r.prompt)] = r.prompt
                rows.lengths[i], rows.limits[i] = len(r.prompt), len(r.prompt) + r.max_new_tokens
                rows.sample_ids[i], rows.temperatures[i] = r.sample_id, r.temperature
            self._state = self._program.place(self._state, rows)

    def refill(self, params: Params, lengths: Mapping[int, int]) -> None:
        """Computes keys and values of slots with so many tokens, {slot: length}; long ones in pieces."""
        config = self._config
        left = sorted(lengths, key=lambda slot: lengths[slot])
        while left and lengths[left[-1]] > config.longest_refill:
            slot = left.pop()
            self.extend(params, [(slot, start) for start in range(0, lengths[slot], config.prefill_tokens)])
        while left:
            # the largest piece, from the short end, that its longest member leaves within prefill_tokens
            for rows in reversed(config.row_ladder):
                _, piece = config.pieces(left[:rows])[0]
                longest = lengths[left[min(rows, len(left)) - 1]]
                length = next(n for n in config.length_ladder if n >= longest)
                if config.fits(len(piece), length):
                    break
            self._state = self._program.refill(params, self._state, piece, length)
            left = left[len(piece) :]

    def extend(self, params: Params, pieces: Sequence[tuple[int, int]]) -> None:
        """Computes pieces of prefill_tokens keys and values, (slot, first position), in this order."""
        for slot, start in pieces:
            slots = np.array([slot], np.int32)
            self._state = self._program.extend(params, self._state, slots, np.int32(start))

    def copy_prompts(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copies the keys and values of a prompt, from the first slot of each pair to the second."""
        for start, targets in self._config.pieces([target for _, target in pairs]):
            sources = [source for source, _ in pairs[start : start + len(targets)]]
            self._state = self._program.copy_prompts(self._state, self._config.padded(sources, len(targets)), targets)

    def assign(self, tables: np.ndarray) -> None:
        """Gives the slots these blocks of a paged cache; int32 [slots, blocks of the longest sequence]."""
        self._state = self._program.assign(self._state, tables.copy())

    def set_active(self, slots: Sequence[int], active: bool) -> None:
        """Goes on, or does not, with the sequences in slots."""
        for _, piece in self._config.pieces(slots):
            self._state = self._program.set_active(self._state, piece, np.bool_(active))

    def decode(self, params: Params, live: Sequence[int], version: int, min_active: int) -> tuple[Progress, int]:
        """A chunk for the active slots `live`; leaves early once at most min_active of them are active. Also returns
        how many rows are computed: the fewest of the compiled numbers that hold them."""
        rows = next((n for n in self._config.fewer if n >= len(live)), self._config.slots)
        slots = None if rows == self._config.slots else self._config.padded(live, rows)
        self._state, progress = self._program.decode(
            params, self._state, slots, np.int32(version), np.int32(min_active)
        )
        return progress, rows

    def take(self, slots: Sequence[int]) -> list[Any]:
        """(tokens, logprobs, versions), each [R, T], of pieces of the slots in order: for `rows_of`."""
        return [self._program.take(self._state, piece) for _, piece in self._config.pieces(slots)]

    def rows_of(self, taken: Sequence[Any], count: int) -> list[tuple[np.ndarray, ...]]:
        """Waits for what `take` returned for so many slots: (tokens, logprobs, versions), each [T], of each."""
        rows: list[tuple[np.ndarray, ...]] = []
        for piece in jax.device_get(list(taken)):
            rows += zip(*piece, strict=True)
        return rows[:count]  # only the last piece is padded

    def recent(self) -> jax.Array:
        """The last tokens of every slot, [S, chunk + stop.window]."""
        return self._program.recent(self._state)

    def wait(self) -> None:
        """Until the device is done."""
        jax.block_until_ready(self._state)
