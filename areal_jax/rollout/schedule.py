"""Which sample is in which slot, and who waits: the engine's decisions, apart from the device that carries them out."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

from areal_jax.rollout.blocks import BlockPool
from areal_jax.rollout.programs import EngineConfig


@dataclasses.dataclass(frozen=True)
class Request:
    """One sample to draw."""

    sample_id: int
    prompt: np.ndarray
    """int32 [P], P >= 1."""
    max_new_tokens: int
    temperature: float


@dataclasses.dataclass
class Slot:
    """An occupied slot."""

    request: Request
    length: int
    """Tokens present when the last chunk landed."""
    prompt_version: int
    """Of the weights that its prompt's keys and values are of."""
    searched: int
    """Length up to which its text holds no stop string."""
    cut: int | None = None
    """Its length up to the end of a stop string, once one has turned up."""
    state: Literal["running", "filling", "parked"] = "running"
    """Filling: its tokens are computed in pieces, between chunks. Parked: its blocks were given to older samples, and
    its keys and values will be computed again when there are blocks."""
    filled: int = 0
    """Of a sequence computed in pieces: the tokens that are."""

    @property
    def runs(self) -> bool:
        return self.cut is None and self.state == "running"

    def length_after(self, steps: int) -> int:
        return min(self.length + steps, len(self.request.prompt) + self.request.max_new_tokens)


class Admission(NamedTuple):
    """What is to be done before the next chunk, in this order."""

    placed: dict[int, Request]
    """Prompts to put into slots."""
    refilled: list[int]
    """Slots whose keys and values are to be computed."""
    copied: list[tuple[int, int]]
    """(source, target): slots that have the same prompt."""
    pieces: list[tuple[int, int]]
    """(slot, first position) of pieces of a long sequence."""
    started: list[int]
    """Slots that are to be decoded again."""
    held: list[int]
    """Placed, and not to be decoded yet."""

    def __bool__(self) -> bool:
        return any(self)


class Chunk(NamedTuple):
    """What the next chunk decodes."""

    running: list[int]
    min_active: int
    """It comes back early once no more samples than this are active."""
    parked: list[int]
    """Slots that have lost their blocks since the last one."""


class Schedule:
    """First come, first served. A sample keeps its slot until it is finished."""

    def __init__(self, config: EngineConfig):
        self.config = config
        self.admitting = True
        """False: requests wait, until what is in slots has finished."""
        self.slots: dict[int, Slot] = {}
        """The occupied ones, the oldest sample first."""
        self.waiting: collections.deque[Request] = collections.deque()
        self.preemptions = 0
        paging = config.paging
        self.pool = BlockPool(paging, config.slots, config.max_length) if paging else None

    def submit(self, requests: Sequence[Request]) -> None:
        """Queues requests. Raises ValueError for one that cannot fit a cache row."""
        c = self.config
        for r in requests:
            longest = min(c.max_prompt_length, c.max_length - r.max_new_tokens)
            if not 0 < len(r.prompt) <= longest or r.max_new_tokens < 1:
                raise ValueError(
                    f"sample {r.sample_id}: a prompt of {len(r.prompt)} tokens and up to {r.max_new_tokens} new ones "
                    f"do not fit max_prompt_length {c.max_prompt_length} and max_length {c.max_length}"
                )
        self.waiting.extend(requests)

    def running(self) -> list[int]:
        """The slots to be decoded, the oldest sample first."""
        return [i for i, slot in self.slots.items() if slot.runs]

    def land(self, lengths: Any, active: Any) -> dict[int, Slot]:
        """A chunk is done, and left the slots with these lengths [S], active or not [S]. Returns what is finished."""
        for i, slot in self.slots.items():
            slot.length = int(lengths[i])
        finished = {i: s for i, s in self.slots.items() if s.cut is not None or (s.runs and not active[i])}
        self.slots = {i: s for i, s in self.slots.items() if i not in finished}
        if self.pool:
            for i in finished:
                self.pool.release(i)
        return finished

    def swap(self, version: int) -> tuple[list[int], list[tuple[int, int]]]:
        """The weights are another version's. Returns what is to be computed again: slots, and pieces (slot, position)
        of the one that is filling."""
        if self.config.kv_on_update != "recompute":
            return [], []
        pieces = []
        for i, slot in self.slots.items():
            slot.prompt_version = version
            if slot.state == "filling":
                pieces += [(i, start) for start in range(0, slot.filled, self.config.prefill_tokens)]
        return self.running(), pieces

    def admit(self, version: int) -> Admission:
        """Goes on with parked samples, then with the one that is filling, then puts waiting requests into free slots,
        as far as there are blocks. A prompt that is in another slot already is copied from there.

        While samples are decoded, about prefill_tokens are computed between two chunks: of what was parked, or a piece
        of a long sequence, or new prompts; always one of them, and no more that would be over it.
        """
        done, busy = Admission({}, [], [], [], [], []), bool(self.running())
        self._resume(done, version, busy)
        if self._filling() is None and not (busy and done.refilled):
            self._take_in(done, version, busy)
        if not (busy and done.refilled):
            self._compute_pieces(done, busy)
        done.held.extend(i for i in done.placed if self.slots[i].state == "filling")
        return done

    def chunk(self) -> Chunk | None:
        """The next chunk, or None if there is nothing to decode. It is to come back early when that pays: when enough
        slots are free for samples that wait, or so few are left that fewer rows can be computed."""
        parked: list[int] = []
        if self.pool:
            steps = self.config.chunk
            needs = {i: s.length_after(steps) for i, s in self.slots.items() if s.runs or s.state == "filling"}
            parked = self.pool.share(needs)
            for i in parked:
                self.slots[i].state = "parked"
            self.preemptions += len(parked)
        running = self.running()
        if not (running or parked):
            return None
        waits = any(slot.state != "running" for slot in self.slots.values())
        if waits or (self.waiting and self.admitting):
            return Chunk(running, max(0, len(running) - max(1, self.config.slots // 8)), parked)
        return Chunk(running, max((n for n in self.config.fewer if n < len(running)), default=0), parked)

    def _filling(self) -> int | None:
        """The slot whose sequence is computed in pieces; there is one at most."""
        return next((i for i, slot in self.slots.items() if slot.state == "filling"), None)

    def _resume(self, done: Admission, version: int, busy: bool) -> None:
        """Parked samples go on, the oldest first, where there are blocks again."""
        tokens = 0
        for i, slot in self.slots.items():
            if slot.state != "parked" or slot.cut is not None:
                continue
            long = slot.length > self.config.longest_refill
            if long and self._filling() is not None:
                break
            if busy and tokens and tokens + slot.length > self.config.prefill_tokens:
                break
            if not self._has_room(i, slot):
                break
            slot.prompt_version = version
            if long:
                slot.state, slot.filled = "filling", 0
                break
            slot.state = "running"
            tokens += slot.length
            done.refilled.append(i)
            done.started.append(i)

    def _take_in(self, done: Admission, version: int, busy: bool) -> None:
        """Requests get slots, first come, first served."""
        computed = {
            slot.request.prompt.tobytes(): i
            for i, slot in self.slots.items()
            if slot.prompt_version == version and slot.runs and i not in done.refilled
        }
        tokens = 0
        for i in (i for i in range(self.config.slots) if i not in self.slots):
            if not (self.waiting and self.admitting):
                break
            request = self.waiting[0]
            length = len(request.prompt)
            source = computed.get(request.prompt.tobytes())
            if source is None and busy and tokens and tokens + length > self.config.prefill_tokens:
                break
            slot = Slot(request, length, version, searched=length)
            if not self._has_room(i, slot):
                break
            self.slots[i] = slot
            done.placed[i] = self.waiting.popleft()
            if source is not None:
                done.copied.append((source, i))
            elif length > self.config.longest_refill:
                slot.state = "filling"
                break
            else:
                computed[request.prompt.tobytes()] = i
                done.refilled.append(i)
                tokens += length

    def _compute_pieces(self, done: Admission, busy: bool) -> None:
        """Of the sequence that is computed in pieces: the next one, or all if nothing else is decoded."""
        i = self._filling()
        if i is None:
            return
        slot = self.slots[i]
        while slot.filled < slot.length and not (busy and done.pieces):
            done.pieces.append((i, slot.filled))
            slot.filled += self.config.prefill_tokens
        if slot.filled >= slot.length:
            slot.state = "running"
            done.started.append(i)

    def _has_room(self, i: int, slot: Slot) -> bool:
        """Gives slot i blocks for the sample and its next chunk, if every running one could still get those for its
        next two then; nobody is let in while others are parked."""
        if self.pool is None:
            return True
        if i not in self.slots and any(s.state == "parked" for s in self.slots.values()):
            return False
        steps, tokens = self.config.chunk, slot.length_after(self.config.chunk)
        reserve = sum(self.pool.lacking(j, self.slots[j].length_after(2 * steps)) for j in self.running())
        return self.pool.free - self.pool.lacking(i, tokens) >= reserve and self.pool.grow(i, tokens)
