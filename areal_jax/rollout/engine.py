"""The slot engine: continuous batching over a fixed number of slots, with weight swaps between decode chunks.

A slot holds one sequence. While the device decodes a chunk, the host deals with what the one before it finished: a
turn (`Engine.step`) waits for the chunk in flight, fills the slots that it freed, sends the next chunk off, and only
then reads finished sequences and looks for stop strings. The programs are in `programs.py`.
"""

from __future__ import annotations

import collections
import dataclasses
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from areal_jax.rollout.blocks import BlockPool
from areal_jax.rollout.programs import EngineConfig, Program, Progress
from areal_jax.rollout.slots import Slots
from areal_jax.rollout.stopping import StopStrings
from areal_jax.types import PROMPT_VERSION, FinishReason, PolicySnapshot


@dataclasses.dataclass(frozen=True)
class Request:
    """One sample to draw."""

    sample_id: int
    prompt: np.ndarray
    """int32 [P], P >= 1."""
    max_new_tokens: int
    temperature: float


@dataclasses.dataclass(frozen=True)
class Completion:
    """One finished sample; arrays over prompt and response, as in Trajectory."""

    request: Request
    tokens: np.ndarray
    behaviour_logprobs: np.ndarray
    policy_versions: np.ndarray
    finish_reason: FinishReason


@dataclasses.dataclass
class _Slot:
    """What the host knows of an occupied slot."""

    request: Request
    length: int
    """Tokens present when the last chunk landed."""
    prompt_version: int
    """Of the weights that its prompt's keys and values are of."""
    searched: int
    """Length up to which its text holds no stop string."""
    cut: int | None = None
    """Its length up to the end of a stop string, once one has turned up."""
    parked: bool = False
    """Its blocks were given to older samples: its keys and values will be computed again when there are blocks."""

    @property
    def running(self) -> bool:
        return self.cut is None and not self.parked

    def length_after(self, steps: int) -> int:
        return min(self.length + steps, len(self.request.prompt) + self.request.max_new_tokens)


class _Landed(NamedTuple):
    """What a chunk has left for the host to read beside the next one; arrays are still on the device."""

    finished: dict[int, _Slot]
    """By the slot in which they were."""
    taken: list[Any]
    """What `Slots.take` returned of them."""
    live: dict[int, _Slot]
    recent: Any
    """The last tokens of every slot, if there are stop strings."""


class Engine:
    """Draws samples for a stream of requests; not thread-safe."""

    def __init__(self, program: Program, snapshot: PolicySnapshot, seed: int):
        self.program, self.config = program, program.config
        self.snapshot = snapshot
        self.admitting = True
        """False: requests wait, until what is in slots has finished."""
        self.decoded_slot_steps = 0  # rows x steps computed, useful or not
        self.generated_tokens = 0
        self.preemptions = 0  # of samples whose blocks were given to older ones
        self._waiting: collections.deque[Request] = collections.deque()
        self._slots: dict[int, _Slot] = {}  # the occupied ones, the oldest sample first
        self._flight: tuple[Progress, int] | None = None  # of the chunk being decoded, with its number of rows
        self._landed: list[_Landed] = []
        self._device = Slots(program, seed)
        paging = self.config.paging
        self._pool = BlockPool(paging, self.config.slots, self.config.max_length) if paging else None

    @property
    def version(self) -> int:
        return self.snapshot.version

    @property
    def live(self) -> int:
        """Samples in slots."""
        return len(self._slots)

    @property
    def unfinished(self) -> int:
        """Samples that no step has returned yet."""
        return len(self._waiting) + self.live + sum(len(landed.finished) for landed in self._landed)

    @property
    def in_flight(self) -> bool:
        """Whether the device decodes a chunk."""
        return self._flight is not None

    def warm_up(self) -> None:
        """Compiles every shape that the engine can meet. Call it while nothing is in progress."""
        self._device.warm_up(self.snapshot.params)

    def submit(self, requests: Sequence[Request]) -> None:
        """Queues requests. Raises ValueError for one that cannot fit a cache row."""
        for request in requests:
            _require_fits(request, self.config)
        self._waiting.extend(requests)

    def set_params(self, snapshot: PolicySnapshot) -> float:
        """Swaps the weights. Tokens already drawn keep their log-probs and versions; live slots go on.

        Returns the seconds for which decoding stood still. Raises RuntimeError if config.kv_on_update is 'finish' and
        samples are in slots.
        """
        self._land()
        began = time.monotonic()
        if self._slots and self.config.kv_on_update == "finish":
            raise RuntimeError(f"kv_on_update='finish': {self.live} samples are being drawn; swap when none is")
        self.snapshot = snapshot
        running = {i: slot for i, slot in self._slots.items() if slot.running}
        if running and self.config.kv_on_update == "recompute":
            self._refill(running)
            self._device.wait()
        return time.monotonic() - began

    def step(self) -> list[Completion]:
        """Waits for the chunk in flight, fills free slots, sends the next chunk off, returns what has finished."""
        self._land()
        self._admit()
        self._launch()
        landed, self._landed = self._landed, []
        return [completion for one in landed for completion in self._look_at(one)]

    # --- the device's side ---

    def _land(self) -> None:
        """Waits for the chunk in flight and frees the slots whose samples are finished."""
        if self._flight is None:
            return
        flight, rows = self._flight
        progress: Progress = jax.device_get(flight)
        self._flight = None
        self.decoded_slot_steps += int(progress.steps) * rows
        for i, slot in self._slots.items():
            slot.length = int(progress.lengths[i])
        finished = {
            i: slot
            for i, slot in self._slots.items()
            if slot.cut is not None or not (slot.parked or progress.active[i])
        }
        self._slots = {i: slot for i, slot in self._slots.items() if i not in finished}
        recent = self._device.recent() if self.program.stop else None
        self._landed.append(_Landed(finished, self._device.take(list(finished)), dict(self._slots), recent))
        if self._pool:
            for i in finished:
                self._pool.release(i)

    def _admit(self) -> None:
        """Goes on with parked samples, and puts waiting requests into free slots, as far as there are blocks. A prompt
        that is in another slot already is copied from there."""
        resumed = self._resume()
        computed = {
            slot.request.prompt.tobytes(): i
            for i, slot in self._slots.items()
            if slot.prompt_version == self.version and not slot.parked and i not in resumed
        }
        fresh, copies, requests = [], [], {}
        for i in (i for i in range(self.config.slots) if i not in self._slots):
            if not (self._waiting and self.admitting and self._has_room(i, len(self._waiting[0].prompt))):
                break
            request = requests[i] = self._waiting.popleft()
            source = computed.setdefault(request.prompt.tobytes(), i)
            if source == i:
                fresh.append(i)
            else:
                copies.append((source, i))
            length = len(request.prompt)
            self._slots[i] = _Slot(request, length, self.version, searched=length)
        if not (resumed or requests):
            return
        if self._pool:
            self._device.assign(self._pool.tables)
        self._device.place(list(requests), list(requests.values()))
        self._refill({i: self._slots[i] for i in (*resumed, *fresh)})
        self._device.copy_prompts(copies)

    def _refill(self, slots: dict[int, _Slot]) -> None:
        """Computes the keys and values of slots under the present weights."""
        self._device.refill(self.snapshot.params, {i: slot.length for i, slot in slots.items()})
        for slot in slots.values():
            slot.prompt_version = self.version

    def _launch(self) -> None:
        """Sends the next chunk off. It comes back early when that pays: when enough slots are free for samples that
        wait, or so few are left that fewer rows can be computed."""
        running = self._running()
        if not running:
            return
        if self._pool:
            running = self._give_blocks(self._pool, running)
        if (self._waiting and self.admitting) or any(slot.parked for slot in self._slots.values()):
            min_active = max(0, len(running) - max(1, self.config.slots // 8))
        else:
            min_active = max((n for n in self.config.fewer if n < len(running)), default=0)
        self._flight = self._device.decode(self.snapshot.params, running, self.version, min_active)

    def _running(self) -> list[int]:
        """The slots to be decoded, the oldest sample first."""
        return [i for i, slot in self._slots.items() if slot.running]

    # --- the blocks of a paged cache ---

    def _has_room(self, i: int, length: int) -> bool:
        """Gives slot i blocks for so many tokens and a chunk, if every running sample could still get one more then;
        nobody is let in while others are parked."""
        if self._pool is None:
            return True
        if i not in self._slots and any(slot.parked for slot in self._slots.values()):
            return False
        tokens = min(length + self.config.chunk, self.config.max_length)
        spare = self._pool.free - self._pool.lacking(i, tokens)
        return spare >= len(self._running()) and self._pool.grow(i, tokens)

    def _resume(self) -> list[int]:
        """The parked samples that have blocks again, the oldest first."""
        resumed = []
        for i, slot in ((i, slot) for i, slot in self._slots.items() if slot.parked):
            if not self._has_room(i, slot.length):
                break
            slot.parked = False
            resumed.append(i)
        self._device.set_active(resumed, True)
        return resumed

    def _give_blocks(self, pool: BlockPool, running: list[int]) -> list[int]:
        """Blocks for the next chunk, from the youngest samples if there are not enough. Returns who goes on."""
        parked = pool.share({i: self._slots[i].length_after(self.config.chunk) for i in running})
        for i in parked:
            self._slots[i].parked = True
        self.preemptions += len(parked)
        self._device.set_active(parked, False)
        self._device.assign(pool.tables)
        return [i for i in running if i not in parked]

    # --- the host's side, beside the next chunk ---

    def _look_at(self, landed: _Landed) -> list[Completion]:
        if self.program.stop:
            self._device.set_active(_find_stops(self.program.stop, landed), False)
        rows = self._device.rows_of(landed.taken, len(landed.finished))
        completions = [
            _completion(slot, self.config.eos_ids, *row)
            for slot, row in zip(landed.finished.values(), rows, strict=True)
        ]
        self.generated_tokens += sum(len(c.tokens) - len(c.request.prompt) for c in completions)
        return completions


def _require_fits(request: Request, config: EngineConfig) -> None:
    longest = min(config.max_prompt_length, config.max_length - request.max_new_tokens)
    if not 0 < len(request.prompt) <= longest or request.max_new_tokens < 1:
        raise ValueError(
            f"sample {request.sample_id}: a prompt of {len(request.prompt)} tokens and up to {request.max_new_tokens} "
            f"new ones do not fit max_prompt_length {config.max_prompt_length} and max_length {config.max_length}"
        )


def _find_stops(stop: StopStrings, landed: _Landed) -> list[int]:
    """Looks for stop strings in the newest tokens and notes where to cut. Returns the live slots that have one: they
    are to be decoded no further, and are freed when the next chunk has landed."""
    recent, ended = np.asarray(landed.recent), []
    for i, slot in (*landed.finished.items(), *landed.live.items()):
        new = slot.length - slot.searched
        if not new or slot.cut is not None:
            continue
        tokens = recent[i, -min(recent.shape[1], slot.length - len(slot.request.prompt)) :]
        kept = stop.first_match(tokens, new)
        slot.searched = slot.length
        if kept is not None:
            slot.cut = slot.length - len(tokens) + kept
            ended += [i] if i in landed.live else []
    return ended


def _completion(slot: _Slot, eos_ids: Sequence[int], tokens: Any, logprobs: Any, versions: Any) -> Completion:
    prompt_length = len(slot.request.prompt)
    length = slot.length if slot.cut is None else slot.cut
    response = slice(prompt_length, length)
    stopped = slot.cut is not None or int(tokens[length - 1]) in eos_ids
    head = np.zeros(prompt_length)
    return Completion(
        slot.request,
        tokens=tokens[:length].copy(),
        behaviour_logprobs=np.concatenate([head, logprobs[response]]).astype(np.float32),
        policy_versions=np.concatenate([head + PROMPT_VERSION, versions[response]]).astype(np.int32),
        finish_reason="stop" if stopped else "length",
    )
