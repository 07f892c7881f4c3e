"""Which blocks of a paged cache belong to which slot (the host's books)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import numpy as np


@dataclasses.dataclass(frozen=True)
class Paging:
    """Sizes of a paged cache."""

    blocks: int
    block_size: int
    """Positions of a block."""

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_size)


class BlockPool:
    """Gives blocks to slots and takes them back. A block belongs to one slot at most; not thread-safe."""

    def __init__(self, paging: Paging, slots: int, max_length: int):
        """Raises ValueError if the pool could not hold one sequence of max_length."""
        width = paging.blocks_for(max_length)
        if paging.blocks < width:
            raise ValueError(
                f"{paging.blocks} blocks of {paging.block_size} tokens do not hold one sequence of {max_length}"
            )
        self.paging = paging
        self.tables = np.full((slots, width), paging.blocks, np.int32)
        """int32 [slots, blocks of the longest sequence]: a slot's blocks in order; `paging.blocks` is none."""
        self._free = list(range(paging.blocks))
        self._held = [0] * slots

    @property
    def free(self) -> int:
        return len(self._free)

    def lacking(self, slot: int, tokens: int) -> int:
        """How many more blocks the slot needs for so many tokens."""
        return max(0, self.paging.blocks_for(tokens) - self._held[slot])

    def grow(self, slot: int, tokens: int) -> bool:
        """Gives the slot blocks for so many tokens. False, and nothing changes, if there are not enough."""
        lacking = self.lacking(slot, tokens)
        if lacking > len(self._free):
            return False
        for _ in range(lacking):
            self.tables[slot, self._held[slot]] = self._free.pop()
            self._held[slot] += 1
        return True

    def share(self, needs: Mapping[int, int]) -> list[int]:
        """Gives slots blocks for so many tokens, {slot: tokens}, the first ones first. Where there are not enough, the
        last ones lose all of theirs; returns those."""
        slots, lost = list(needs), []
        for slot in needs:
            while slot not in lost and not self.grow(slot, needs[slot]):
                lost.append(slots.pop())
                self.release(lost[-1])
        return lost

    def release(self, slot: int) -> None:
        """Takes all of the slot's blocks back."""
        held = self._held[slot]
        self._free += self.tables[slot, :held].tolist()
        self.tables[slot] = self.paging.blocks
        self._held[slot] = 0
