"""The slot engine: continuous batching over a fixed number of slots, with weight swaps between decode chunks.

A slot holds one sequence. While the device decodes a chunk, the host deals with what the one before it finished: a
turn (`Engine.step`) waits for the chunk in flight, fills the slots that it freed, sends the next chunk off, and only
then reads finished sequences and looks for stop strings. The programs are in `programs.py`.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from areal_jax.rollout.programs import Program, Progress
from areal_jax.rollout.schedule import Request, Schedule, Slot
from areal_jax.rollout.slots import Slots
from areal_jax.rollout.stopping import StopStrings
from areal_jax.types import PROMPT_VERSION, FinishReason, PolicySnapshot


@dataclasses.dataclass(frozen=True)
class Completion:
    """One finished sample; arrays over prompt and response, as in Trajectory."""

    request: Request
    tokens: np.ndarray
    behaviour_logprobs: np.ndarray
    policy_versions: np.ndarray
    finish_reason: FinishReason


class _Landed(NamedTuple):
    """What a chunk has left for the host to read beside the next one; arrays are still on the device."""

    finished: dict[int, Slot]
    """By the slot in which they were."""
    taken: list[Any]
    """What `Slots.take` returned of them."""
    live: dict[int, Slot]
    recent: Any
    """The last tokens of every slot, if there are stop strings."""


class Engine:
    """Draws samples for a stream of requests; not thread-safe."""

    def __init__(self, program: Program, snapshot: PolicySnapshot, seed: int):
        self.program, self.config = program, program.config
        self.snapshot = snapshot
        self.decoded_slot_steps = 0  # rows x steps computed, useful or not
        self.generated_tokens = 0
        self._schedule = Schedule(program.config)
        self._device = Slots(program, seed)
        self._flight: tuple[Progress, int] | None = None  # of the chunk being decoded, with its number of rows
        self._landed: list[_Landed] = []

    @property
    def version(self) -> int:
        return self.snapshot.version

    @property
    def live(self) -> int:
        """Samples in slots."""
        return len(self._schedule.slots)

    @property
    def unfinished(self) -> int:
        """Samples that no step has returned yet."""
        return len(self._schedule.waiting) + self.live + sum(len(landed.finished) for landed in self._landed)

    @property
    def in_flight(self) -> bool:
        """Whether the device decodes a chunk."""
        return self._flight is not None

    @property
    def preemptions(self) -> int:
        """How often a sample's blocks of a paged cache were given to an older one."""
        return self._schedule.preemptions

    def hold(self, held: bool) -> None:
        """Held, the engine finishes the samples in its slots and starts no other."""
        self._schedule.admitting = not held

    def warm_up(self) -> None:
        """Compiles every shape that the engine can meet. Call it while nothing is in progress."""
        self._device.warm_up(self.snapshot.params)

    def submit(self, requests: Sequence[Request]) -> None:
        """Queues requests. Raises ValueError for one that cannot fit a cache row."""
        self._schedule.submit(requests)

    def set_params(self, snapshot: PolicySnapshot) -> float:
        """Swaps the weights. Tokens already drawn keep their log-probs and versions; live slots go on.

        Returns the seconds for which decoding stood still. Raises RuntimeError if config.kv_on_update is 'finish' and
        samples are in slots.
        """
        self._land()
        began = time.monotonic()
        if self.live and self.config.kv_on_update == "finish":
            raise RuntimeError(f"kv_on_update='finish': {self.live} samples are being drawn; swap when none is")
        self.snapshot = snapshot
        refilled, pieces = self._schedule.swap(snapshot.version)
        if refilled or pieces:
            self._refill(refilled)
            self._device.extend(snapshot.params, pieces)
            self._device.wait()
        return time.monotonic() - began

    def step(self) -> list[Completion]:
        """Waits for the chunk in flight, fills free slots, sends the next chunk off, returns what has finished."""
        self._land()
        self._admit()
        self._launch()
        landed, self._landed = self._landed, []
        return [completion for one in landed for completion in self._look_at(one)]

    def _land(self) -> None:
        """Waits for the chunk in flight; slots whose samples are finished become free."""
        if self._flight is None:
            return
        flight, rows = self._flight
        progress: Progress = jax.device_get(flight)
        self._flight = None
        self.decoded_slot_steps += int(progress.steps) * rows
        finished = self._schedule.land(progress.lengths, progress.active)
        recent = self._device.recent() if self.program.stop else None
        self._landed.append(_Landed(finished, self._device.take(list(finished)), dict(self._schedule.slots), recent))

    def _admit(self) -> None:
        admission = self._schedule.admit(self.version)
        if not admission:
            return
        if self._schedule.pool:
            self._device.assign(self._schedule.pool.tables)
        self._device.place(list(admission.placed), list(admission.placed.values()))
        self._refill(admission.refilled)
        self._device.copy_prompts(admission.copied)
        self._device.extend(self.snapshot.params, admission.pieces)
        self._device.set_active(admission.started, True)
        self._device.set_active(admission.held, False)

    def _refill(self, slots: Sequence[int]) -> None:
        self._device.refill(self.snapshot.params, {i: self._schedule.slots[i].length for i in slots})

    def _launch(self) -> None:
        """Sends the next chunk off."""
        chunk = self._schedule.chunk()
        if chunk is None:
            return
        if self._schedule.pool:
            self._device.set_active(chunk.parked, False)
            self._device.assign(self._schedule.pool.tables)
        if chunk.running:
            self._flight = self._device.decode(self.snapshot.params, chunk.running, self.version, chunk.min_active)

    def _look_at(self, landed: _Landed) -> list[Completion]:
        """Reads what has finished, beside the next chunk."""
        if self.program.stop:
            self._device.set_active(_find_stops(self.program.stop, landed), False)
        rows = self._device.rows_of(landed.taken, len(landed.finished))
        done = zip(landed.finished.values(), rows, strict=True)
        completions = [_completion(slot, self.config.eos_ids, *row) for slot, row in done]
        self.generated_tokens += sum(len(c.tokens) - len(c.request.prompt) for c in completions)
        return completions


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


def _completion(slot: Slot, eos_ids: Sequence[int], tokens: Any, logprobs: Any, versions: Any) -> Completion:
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
