"""The slot engine: continuous batching over a fixed number of slots, with weight swaps between decode chunks.

A slot holds one sequence. `refill` computes the keys and values of a slot's tokens so far: it is both the prefill of a
new prompt and the recomputation of a live sequence under new weights. `decode` feeds every slot its last token, draws
the next one and stamps it with the version of the weights that produced it. Weights are arguments of the compiled
programs, so a swap compiles nothing and drains nothing.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from areal_jax import sharding
from areal_jax.models.kv_cache import KVCache, empty_cache
from areal_jax.models.transformer import Model
from areal_jax.rollout.sampling import sample_tokens, token_keys
from areal_jax.rollout.stopping import StopStrings
from areal_jax.types import PROMPT_VERSION, FinishReason, PolicySnapshot


@dataclasses.dataclass(frozen=True)
class EngineConfig:
    """Sizes of the engine; every compiled shape follows from them."""

    slots: int
    max_prompt_length: int
    max_length: int
    """Prompt and response together: the length of a cache row."""
    chunk: int
    """Most decode steps between two visits of the host."""
    row_ladder: tuple[int, ...]
    """Numbers of slots that one refill is compiled for, ascending."""
    length_ladder: tuple[int, ...]
    """Sequence lengths that one refill is compiled for, ascending; the last is max_length."""
    prefill_tokens: int
    """Most slots x length of one refill, which bounds its memory; a single row may be longer."""
    eos_ids: tuple[int, ...]
    kv_on_update: str
    """On a weight swap, 'recompute' live keys and values (AReaL) or 'keep' them (PipelineRL, arXiv 2509.19128)."""
    static: bool = False
    """The baseline of static batches: a sampler asks for no sample until all of its slots are done."""


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


class SlotState(NamedTuple):
    """Device buffers, one row per slot. `lengths` counts the tokens present; the last is not yet in the cache."""

    cache: KVCache
    tokens: Any  # int32 [S, T]
    logprobs: Any  # float32 [S, T]
    versions: Any  # int32 [S, T]
    lengths: Any  # int32 [S]
    limits: Any  # int32 [S]: length at which the sample is cut
    sample_ids: Any  # uint32 [S]
    temperatures: Any  # float32 [S]
    active: Any  # bool [S]
    key: Any  # the key data that every token's key derives from


class Program(NamedTuple):
    """The engine's jitted functions, shared by all engines of one model and config."""

    model: Model
    config: EngineConfig
    place: Callable[..., SlotState]
    refill: Callable[..., SlotState]
    decode: Callable[..., tuple[SlotState, jax.Array]]
    take: Callable[..., Any]
    recent: Callable[..., jax.Array]
    deactivate: Callable[..., SlotState]
    stop: StopStrings | None


def make_program(model: Model, config: EngineConfig, stop: StopStrings | None = None) -> Program:
    """Defines (does not yet compile) the functions of an engine for `model`.

    stop: ends a response by its text, besides config.eos_ids; looked for on the host after each chunk.
    """
    eos = np.asarray(config.eos_ids, np.int32)

    def place(
        state: SlotState, slots: Any, prompts: Any, lengths: Any, limits: Any, ids: Any, temperatures: Any
    ) -> SlotState:
        """Puts prompts [R, P] into slots [R]; a slot index out of range is padding and changes nothing."""

        def put(buffer: Any, value: Any) -> Any:
            return buffer.at[slots].set(value, mode="drop")

        return state._replace(
            tokens=state.tokens.at[slots, : prompts.shape[1]].set(prompts, mode="drop"),
            lengths=put(state.lengths, lengths),
            limits=put(state.limits, limits),
            sample_ids=put(state.sample_ids, ids),
            temperatures=put(state.temperatures, temperatures),
            active=put(state.active, True),
        )

    def refill(params: Any, state: SlotState, slots: Any, length: int) -> SlotState:
        """Recomputes the cache of slots [R] from their first `length` tokens.

        What lies beyond a sequence's end is computed too and never read: decode writes a position before reading it.
        """
        tokens = state.tokens.at[slots, :length].get(mode="fill", fill_value=0)  # [R, length]
        positions = jnp.broadcast_to(jnp.arange(length), tokens.shape)
        _, keys_values = model.bind(params).prefill(tokens, positions, jnp.ones_like(tokens))
        return state._replace(cache=state.cache.write_rows(slots, keys_values))

    def decode(params: Any, state: SlotState, version: Any, min_active: Any) -> tuple[SlotState, jax.Array]:
        """Up to `chunk` tokens for every active slot; leaves early once at most `min_active` slots are active."""
        policy = model.bind(params)
        rows = jnp.arange(config.slots)

        def unfinished(carry: tuple[jax.Array, SlotState]) -> jax.Array:
            step, s = carry
            return (step < config.chunk) & (jnp.sum(s.active) > min_active)

        def one(carry: tuple[jax.Array, SlotState]) -> tuple[jax.Array, SlotState]:
            step, s = carry
            last = s.lengths - 1
            hidden, cache = policy.decode(s.tokens[rows, last], last, s.cache)
            keys = token_keys(jax.random.wrap_key_data(s.key), s.sample_ids, s.lengths)
            drawn, logprobs = sample_tokens(policy.logits(hidden), keys, s.temperatures)
            write = jnp.where(s.active, s.lengths, config.max_length)  # out of range for idle slots: dropped
            lengths = s.lengths + s.active
            stopped = jnp.any(drawn[:, None] == eos[None, :], axis=1)
            return step + 1, s._replace(
                cache=cache,
                tokens=s.tokens.at[rows, write].set(drawn, mode="drop"),
                logprobs=s.logprobs.at[rows, write].set(logprobs, mode="drop"),
                versions=s.versions.at[rows, write].set(version, mode="drop"),
                lengths=lengths,
                active=s.active & ~stopped & (lengths < s.limits),
            )

        steps, state = jax.lax.while_loop(unfinished, one, (jnp.int32(0), state))
        return state, steps

    def take(state: SlotState, slots: Any) -> tuple[Any, ...]:
        buffers = (state.tokens, state.logprobs, state.versions, state.lengths)
        return tuple(b.at[slots].get(mode="fill", fill_value=0) for b in buffers)

    def recent(state: SlotState) -> jax.Array:
        """The last tokens of every slot, [S, chunk + stop.window]: enough to find a stop string in the newest chunk."""
        back = jnp.arange(config.chunk + (stop.window if stop else 0))[::-1]  # ..., 1, 0
        return jnp.take_along_axis(state.tokens, jnp.maximum(0, state.lengths[:, None] - 1 - back), axis=1)

    def deactivate(state: SlotState, slots: Any) -> SlotState:
        return state._replace(active=state.active.at[slots].set(False, mode="drop"))

    return Program(
        model,
        config,
        stop=stop,
        recent=jax.jit(recent),
        deactivate=jax.jit(deactivate, donate_argnums=0),
        place=jax.jit(place, donate_argnums=0),
        refill=jax.jit(refill, donate_argnums=1, static_argnums=3),
        decode=jax.jit(decode, donate_argnums=1),
        take=jax.jit(take),
    )


class Engine:
    """Draws samples for a stream of requests; not thread-safe."""

    def __init__(self, program: Program, snapshot: PolicySnapshot, seed: int):
        self.program, self.config = program, program.config
        self.snapshot = snapshot
        self.decoded_slot_steps = 0  # slots x steps computed, useful or not
        self.generated_tokens = 0
        self._waiting: collections.deque[Request] = collections.deque()
        self._slots: list[Request | None] = [None] * self.config.slots
        self._searched = [0] * self.config.slots  # length up to which a slot's text holds no stop string
        self._state = self._empty_state(seed)

    @property
    def version(self) -> int:
        return self.snapshot.version

    @property
    def unfinished(self) -> int:
        """Samples in slots or waiting for one."""
        return len(self._waiting) + sum(r is not None for r in self._slots)

    def warm_up(self) -> None:
        """Compiles every shape that the engine can meet. Call it while nothing is in progress."""
        out_of_range = self.config.slots
        for rows in self.config.row_ladder:
            slots = np.full(rows, out_of_range, np.int32)
            self._place([], slots)
            for length in self.config.length_ladder:
                if self._fits(rows, length):
                    self._state = self.program.refill(self.snapshot.params, self._state, slots, length)
            jax.block_until_ready(self.program.take(self._state, slots))
            if self.program.stop:
                self._state = self.program.deactivate(self._state, slots)
        if self.program.stop:
            jax.block_until_ready(self.program.recent(self._state))
        self._decode(min_active=0)

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

    def set_params(self, snapshot: PolicySnapshot) -> None:
        """Swaps the weights. Tokens already drawn keep their log-probs and versions; live slots go on."""
        self.snapshot = snapshot
        if self.config.kv_on_update == "recompute":
            self._refill([i for i, r in enumerate(self._slots) if r is not None])

    def step(self) -> list[Completion]:
        """Fills free slots, decodes one chunk, returns what finished."""
        self._admit()
        if not any(self._slots):
            return []
        free_before_return = max(1, self.config.slots // 8)
        self._decode(min_active=self.config.slots - free_before_return if self._waiting else 0)
        cut = self._stopped_by_text() if self.program.stop else {}
        active = np.asarray(self._state.active)
        finished = [i for i, r in enumerate(self._slots) if r is not None and (i in cut or not active[i])]
        return self._harvest(finished, cut)

    def _stopped_by_text(self) -> dict[int, int]:
        """Slot -> its length up to the end of a stop string, where one has turned up; ends the decoding of those."""
        stop = self.program.stop
        assert stop is not None
        recent, lengths = np.asarray(self.program.recent(self._state)), np.asarray(self._state.lengths)
        cut = {}
        for slot, request in enumerate(self._slots):
            if request is None:
                continue
            length, new = int(lengths[slot]), int(lengths[slot]) - self._searched[slot]
            tokens = recent[slot, -min(recent.shape[1], length - len(request.prompt)) :]
            kept = stop.first_match(tokens, new) if new else None
            if kept is not None:
                cut[slot] = length - len(tokens) + kept
            self._searched[slot] = length
        for _, slots in self._padded(list(cut)):
            self._state = self.program.deactivate(self._state, slots)
        return cut

    def _admit(self) -> None:
        free = [i for i, r in enumerate(self._slots) if r is None]
        chosen = free[: len(self._waiting)]
        requests = [self._waiting.popleft() for _ in chosen]
        for start, slots in self._padded(chosen):
            self._place(requests[start : start + len(slots)], slots)
        for slot, request in zip(chosen, requests, strict=True):
            self._slots[slot] = request
            self._searched[slot] = len(request.prompt)
        self._refill(chosen)

    def _place(self, requests: Sequence[Request], slots: np.ndarray) -> None:
        rows = len(slots)
        prompts = np.zeros((rows, self.config.max_prompt_length), np.int32)
        lengths, limits = np.ones(rows, np.int32), np.ones(rows, np.int32)
        ids, temperatures = np.zeros(rows, np.uint32), np.ones(rows, np.float32)
        for i, r in enumerate(requests):
            prompts[i, : len(r.prompt)] = r.prompt
            lengths[i], limits[i] = len(r.prompt), len(r.prompt) + r.max_new_tokens
            ids[i], temperatures[i] = r.sample_id, r.temperature
        self._state = self.program.place(self._state, slots, prompts, lengths, limits, ids, temperatures)

    def _refill(self, slots: list[int]) -> None:
        if not slots:
            return
        lengths = np.asarray(self._state.lengths)
        left = sorted(slots, key=lambda s: lengths[s])
        while left:
            # the largest piece, from the short end, that its longest member leaves within prefill_tokens
            for _, piece in (self._padded(left[:rows])[0] for rows in reversed(self.config.row_ladder)):
                longest = max(lengths[s] for s in piece if s < self.config.slots)
                length = next(n for n in self.config.length_ladder if n >= longest)
                if self._fits(len(piece), length):
                    break
            self._state = self.program.refill(self.snapshot.params, self._state, piece, length)
            left = left[len(piece) :]

    def _fits(self, rows: int, length: int) -> bool:
        """Whether one refill may have so many rows of this length."""
        return rows * length <= self.config.prefill_tokens or rows == self.config.row_ladder[0]

    def _decode(self, min_active: int) -> None:
        self._state, steps = self.program.decode(
            self.snapshot.params, self._state, np.int32(self.version), np.int32(min_active)
        )
        self.decoded_slot_steps += int(steps) * self.config.slots

    def _harvest(self, finished: list[int], cut: dict[int, int]) -> list[Completion]:
        completions = []
        for start, slots in self._padded(finished):
            rows = [np.asarray(b) for b in self.program.take(self._state, slots)]
            for i, slot in enumerate(finished[start : start + len(slots)]):
                request = self._slots[slot]
                assert request is not None
                tokens, logprobs, versions, length = (b[i] for b in rows)
                whole = (request, tokens, logprobs, versions, cut.get(slot, int(length)))
                completions.append(self._completion(*whole, cut=slot in cut))
                self._slots[slot] = None
        return completions

    def _completion(
        self, request: Request, tokens: Any, logprobs: Any, versions: Any, length: int, cut: bool
    ) -> Completion:
        prompt_length = len(request.prompt)
        response = slice(prompt_length, length)
        self.generated_tokens += length - prompt_length
        stopped = cut or int(tokens[length - 1]) in self.config.eos_ids
        head = np.zeros(prompt_length)
        return Completion(
            request,
            tokens=tokens[:length].copy(),
            behaviour_logprobs=np.concatenate([head, logprobs[response]]).astype(np.float32),
            policy_versions=np.concatenate([head + PROMPT_VERSION, versions[response]]).astype(np.int32),
            finish_reason="stop" if stopped else "length",
        )

    def _padded(self, slots: list[int]) -> list[tuple[int, np.ndarray]]:
        """Cuts slots into pieces of the ladder's sizes, padded with an index out of range: [(start, piece)]."""
        pieces, start = [], 0
        while start < len(slots):
            left = len(slots) - start
            size = next((n for n in self.config.row_ladder if n >= left), self.config.row_ladder[-1])
            piece = np.full(size, self.config.slots, np.int32)
            chosen = slots[start : start + size]
            piece[: len(chosen)] = chosen
            pieces.append((start, piece))
            start += size
        return pieces

    def _empty_state(self, seed: int) -> SlotState:
        model, c = self.program.model, self.config
        shape = (c.slots, model.config.kv_heads, c.max_length, model.config.head_dim)
        everywhere = sharding.replicated(model.mesh)

        def zeros(width: tuple[int, ...], dtype: Any) -> jax.Array:
            return jax.device_put(np.zeros(width, dtype), everywhere)

        table, column = (c.slots, c.max_length), (c.slots,)
        return SlotState(
            cache=empty_cache(shape, model.config.layers, model.config.compute_dtype, model.mesh),
            tokens=zeros(table, np.int32),
            logprobs=zeros(table, np.float32),
            versions=zeros(table, np.int32),
            lengths=jax.device_put(np.ones(column, np.int32), everywhere),
            limits=zeros(column, np.int32),
            sample_ids=zeros(column, np.uint32),
            temperatures=zeros(column, np.float32),
            active=zeros(column, bool),
            key=jax.device_put(np.asarray(jax.random.key_data(jax.random.key(seed))), everywhere),
        )
