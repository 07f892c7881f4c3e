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

from areal_jax.rollout.programs import Program, Progress, empty_rows, empty_state, warm_up
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


class _Landed(NamedTuple):
    """What a chunk has left for the host to read beside the next one; arrays are still on the device."""

    finished: list[_Slot]
    rows: list[Any]
    """Tokens, log-probs and versions of `finished`, in pieces of the row ladder."""
    live: dict[int, _Slot]
    recent: Any
    """The last tokens of every slot, if there are stop strings."""
    slots: list[int]
    """Where the finished ones were."""


class Engine:
    """Draws samples for a stream of requests; not thread-safe."""

    def __init__(self, program: Program, snapshot: PolicySnapshot, seed: int):
        self.program, self.config = program, program.config
        self.snapshot = snapshot
        self.admitting = True
        """False: requests wait, until what is in slots has finished."""
        self.decoded_slot_steps = 0  # slots x steps computed, useful or not
        self.generated_tokens = 0
        self._waiting: collections.deque[Request] = collections.deque()
        self._slots: list[_Slot | None] = [None] * self.config.slots
        self._flight: tuple[Progress, int] | None = None  # of the chunk being decoded, with its number of rows
        self._landed: list[_Landed] = []
        self._state = empty_state(program.model, self.config, seed)

    @property
    def version(self) -> int:
        return self.snapshot.version

    @property
    def live(self) -> int:
        """Samples in slots."""
        return sum(s is not None for s in self._slots)

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
        self._state = warm_up(self.program, self.snapshot.params, self._state)

    def submit(self, requests: Sequence[Request]) -> None:
        """Queues requests. Raises ValueError for one that cannot fit a cache row."""
        for request in requests:
            longest = min(self.config.max_prompt_length, self.config.max_length - request.max_new_tokens)
            if not 0 < len(request.prompt) <= longest or request.max_new_tokens < 1:
                raise ValueError(
                    f"sample {request.sample_id}: a prompt of {len(request.prompt)} tokens and up to "
                    f"{request.max_new_tokens} new ones do not fit max_prompt_length {self.config.max_prompt_length} "
                    f"and max_length {self.config.max_length}"
                )
        self._waiting.extend(requests)

    def set_params(self, snapshot: PolicySnapshot) -> float:
        """Swaps the weights. Tokens already drawn keep their log-probs and versions; live slots go on.

        Returns the seconds for which decoding stood still. Raises RuntimeError if config.kv_on_update is 'finish' and
        samples are in slots.
        """
        self._land()
        began = time.monotonic()
        live = [i for i, s in enumerate(self._slots) if s is not None]
        if live and self.config.kv_on_update == "finish":
            raise RuntimeError(f"kv_on_update='finish': {len(live)} samples are being drawn; swap when none is")
        self.snapshot = snapshot
        if live and self.config.kv_on_update == "recompute":
            self._refill(live)
            for slot in live:
                self._at(slot).prompt_version = self.version
            jax.block_until_ready(self._state)
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
        finished = []
        for i, slot in enumerate(self._slots):
            if slot is None:
                continue
            slot.length = int(progress.lengths[i])
            if slot.cut is not None or not progress.active[i]:
                finished.append(i)
        pieces = [self.program.take(self._state, piece) for _, piece in self.config.pieces(finished)]
        gone = [self._at(i) for i in finished]
        for i in finished:
            self._slots[i] = None
        live = {i: s for i, s in enumerate(self._slots) if s is not None}
        recent = self.program.recent(self._state) if self.program.stop else None
        self._landed.append(_Landed(gone, pieces, live, recent, finished))

    def _admit(self) -> None:
        """Puts waiting requests into free slots. A prompt that is in another slot already is copied from there."""
        free = [i for i, s in enumerate(self._slots) if s is None] if self.admitting else []
        chosen = free[: len(self._waiting)]
        if not chosen:
            return
        computed = {
            s.request.prompt.tobytes(): i
            for i, s in enumerate(self._slots)
            if s is not None and s.prompt_version == self.version
        }
        requests = [self._waiting.popleft() for _ in chosen]
        fresh, copies = [], []
        for slot, request in zip(chosen, requests, strict=True):
            source = computed.setdefault(request.prompt.tobytes(), slot)
            if source == slot:
                fresh.append(slot)
            else:
                copies.append((source, slot))
            length = len(request.prompt)
            self._slots[slot] = _Slot(request, length, self.version, searched=length)
        for start, piece in self.config.pieces(chosen):
            self._place(requests[start : start + len(piece)], chosen[start : start + len(piece)], len(piece))
        self._refill(fresh)
        for start, piece in self.config.pieces([target for _, target in copies]):
            sources = self.config.padded([source for source, _ in copies[start : start + len(piece)]], len(piece))
            self._state = self.program.copy_prompts(self._state, sources, piece)

    def _place(self, requests: Sequence[Request], slots: Sequence[int], size: int) -> None:
        rows = empty_rows(self.config, size)
        for i, (r, slot) in enumerate(zip(requests, slots, strict=True)):
            rows.slots[i] = slot
            rows.prompts[i, : len(r.prompt)] = r.prompt
            rows.lengths[i], rows.limits[i] = len(r.prompt), len(r.prompt) + r.max_new_tokens
            rows.sample_ids[i], rows.temperatures[i] = r.sample_id, r.temperature
        self._state = self.program.place(self._state, rows)

    def _refill(self, slots: Sequence[int]) -> None:
        left = sorted(slots, key=lambda i: self._at(i).length)
        while left:
            # the largest piece, from the short end, that its longest member leaves within prefill_tokens
            for rows in reversed(self.config.row_ladder):
                _, piece = self.config.pieces(left[:rows])[0]
                longest = self._at(left[min(rows, len(left)) - 1]).length
                length = next(n for n in self.config.length_ladder if n >= longest)
                if self.config.fits(len(piece), length):
                    break
            self._state = self.program.refill(self.snapshot.params, self._state, piece, length)
            left = left[len(piece) :]

    def _launch(self) -> None:
        """Sends the next chunk off. It comes back early when that pays: when enough slots are free for requests that
        wait, or so few are left that fewer rows can be computed."""
        live = [i for i, s in enumerate(self._slots) if s is not None and s.cut is None]
        if not live:
            if self.live:  # all that is left was cut: nothing to compute, but to be taken out
                self._flight = Progress(0, [s.length if s else 0 for s in self._slots], [False] * len(self._slots)), 0
            return
        rows = next((n for n in self.config.fewer if n >= len(live)), self.config.slots)
        slots = None if rows == self.config.slots else self.config.padded(live, rows)
        if self._waiting and self.admitting:
            min_active = self.config.slots - max(1, self.config.slots // 8)
        else:
            min_active = max((n for n in self.config.fewer if n < len(live)), default=0)
        self._state, progress = self.program.decode(
            self.snapshot.params, self._state, slots, np.int32(self.version), np.int32(min_active)
        )
        self._flight = progress, rows

    # --- the host's side, beside the next chunk ---

    def _look_at(self, landed: _Landed) -> list[Completion]:
        if self.program.stop:
            for _, piece in self.config.pieces(_find_stops(self.program.stop, landed)):
                self._state = self.program.deactivate(self._state, piece)
        completions = []
        for (start, piece), arrays in zip(self.config.pieces(landed.slots), landed.rows, strict=True):
            tokens, logprobs, versions = jax.device_get(arrays)
            for i, slot in enumerate(landed.finished[start : start + len(piece)]):
                completions.append(_completion(slot, self.config.eos_ids, tokens[i], logprobs[i], versions[i]))
                self.generated_tokens += len(completions[-1].tokens) - len(slot.request.prompt)
        return completions

    def _at(self, slot: int) -> _Slot:
        found = self._slots[slot]
        assert found is not None
        return found


def _find_stops(stop: StopStrings, landed: _Landed) -> list[int]:
    """Looks for stop strings in the newest tokens and notes where to cut. Returns the live slots that have one: they
    are to be decoded no further, and are freed when the next chunk has landed."""
    recent, ended = np.asarray(landed.recent), []
    for i, slot in (*zip(landed.slots, landed.finished, strict=True), *landed.live.items()):
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
