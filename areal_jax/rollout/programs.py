"""The engine's compiled programs: pure functions of the slots' device buffers.

`place` puts prompts into slots; `refill` computes keys and values of a slot's tokens so far, which is the prefill of a
new prompt and the recomputation of a live sequence under new weights alike, and `extend` does so piece by piece;
`copy_prompts` takes a prompt's keys and values over from another slot; `decode` draws tokens. Weights are arguments, so
a swap compiles nothing; buffers are donated, so no program allocates a second cache.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from areal_jax import sharding
from areal_jax.models.kv_cache import Cache, PagedKVCache, cache_sharding, empty_cache, empty_pool
from areal_jax.models.transformer import Model
from areal_jax.rollout.blocks import Paging
from areal_jax.rollout.sampling import EVERYTHING, Filter, sample_tokens, token_keys
from areal_jax.rollout.stopping import StopStrings
from areal_jax.types import Params


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
    """Sequence lengths that one refill is compiled for, ascending; () computes all in pieces."""
    prefill_tokens: int
    """Most tokens that are computed at once, or between two chunks while samples are decoded; what is longer than the
    length ladder is computed in pieces of so many."""
    eos_ids: tuple[int, ...]
    kv_on_update: str
    """On a weight swap: 'recompute' live keys and values (AReaL), 'keep' them (PipelineRL, arXiv 2509.19128), or let
    all samples 'finish' before it (no swap inside a sample)."""
    fewer: tuple[int, ...] = ()
    """Numbers of slots, ascending and under `slots`, that decode is compiled for besides: at the tail, when so few are
    alive and nothing waits, only those are computed."""
    paging: Paging | None = None
    """Of a paged cache; None is a dense one, a row of max_length per slot."""
    kept: Filter = EVERYTHING
    """Which tokens may be drawn."""
    static: bool = False
    """The baseline of static batches: a sampler asks for no sample until all of its slots are done."""

    def pieces(self, slots: Sequence[int]) -> list[tuple[int, np.ndarray]]:
        """Cuts slots into pieces of the row ladder's sizes, padded with an index out of range: [(start, piece)]."""
        pieces, start = [], 0
        while start < len(slots):
            left = len(slots) - start
            size = next((n for n in self.row_ladder if n >= left), self.row_ladder[-1])
            pieces.append((start, self.padded(slots[start : start + size], size)))
            start += size
        return pieces

    def padded(self, slots: Sequence[int], size: int) -> np.ndarray:
        """int32 [size]: the slots, then an index out of range, which every program passes over."""
        piece = np.full(size, self.slots, np.int32)
        piece[: len(slots)] = slots
        return piece

    def description(self) -> str:
        """'64 slots of 28 tokens; cache: dense'."""
        paging = self.paging
        cache = f"paged, {paging.blocks} blocks of {paging.block_size}" if paging else "dense"
        return f"{self.slots} slots of {self.max_length} tokens; cache: {cache}"

    def fits(self, rows: int, length: int) -> bool:
        """Whether one refill may have so many rows of this length."""
        return rows * length <= self.prefill_tokens

    @property
    def longest_refill(self) -> int:
        """Longer sequences are computed in pieces."""
        return self.length_ladder[-1] if self.length_ladder else 0

    def __post_init__(self) -> None:
        if not self.fits(self.row_ladder[0], self.longest_refill):
            raise ValueError(
                f"prefill_tokens is {self.prefill_tokens}, and the smallest refill of {self.longest_refill} tokens has "
                f"{self.row_ladder[0]} rows: raise it, or leave the length to pieces"
            )


class SlotState(NamedTuple):
    """Device buffers, one row per slot. `lengths` counts the tokens present; the last is not yet in the cache."""

    cache: Cache
    tokens: Any  # int32 [S, T]
    logprobs: Any  # float32 [S, T]
    versions: Any  # int32 [S, T]
    lengths: Any  # int32 [S]
    limits: Any  # int32 [S]: length at which the sample is cut
    sample_ids: Any  # uint32 [S]
    temperatures: Any  # float32 [S]
    active: Any  # bool [S]
    key: Any  # the key data that every token's key derives from


class Rows(NamedTuple):
    """What `place` puts into slots."""

    slots: np.ndarray  # int32 [R]
    prompts: np.ndarray  # int32 [R, max_prompt_length]
    lengths: np.ndarray  # int32 [R]
    limits: np.ndarray  # int32 [R]
    sample_ids: np.ndarray  # uint32 [R]
    temperatures: np.ndarray  # float32 [R]


class Progress(NamedTuple):
    """What the host learns of a chunk; small, and apart from the buffers, which the next program takes over."""

    steps: Any  # int32: decode steps done
    lengths: Any  # int32 [S]
    active: Any  # bool [S]


class Program(NamedTuple):
    """The engine's jitted functions, shared by all engines of one model and config."""

    model: Model
    config: EngineConfig
    place: Callable[[SlotState, Rows], SlotState]
    refill: Callable[..., SlotState]
    extend: Callable[..., SlotState]
    copy_prompts: Callable[..., SlotState]
    decode: Callable[..., tuple[SlotState, Progress]]
    take: Callable[..., Any]
    recent: Callable[[SlotState], jax.Array]
    set_active: Callable[..., SlotState]
    assign: Callable[..., SlotState]
    stop: StopStrings | None


def make_program(model: Model, config: EngineConfig, stop: StopStrings | None = None) -> Program:
    """Defines (does not yet compile) the functions of an engine for `model`.

    stop: ends a response by its text, besides config.eos_ids; looked for on the host after each chunk.
    """
    eos = np.asarray(config.eos_ids, np.int32)

    def place(state: SlotState, rows: Rows) -> SlotState:
        """Puts prompts into slots; a slot index out of range is padding and changes nothing."""

        def put(buffer: Any, value: Any) -> Any:
            return buffer.at[rows.slots].set(value, mode="drop")

        return state._replace(
            tokens=state.tokens.at[rows.slots, : rows.prompts.shape[1]].set(rows.prompts, mode="drop"),
            lengths=put(state.lengths, rows.lengths),
            limits=put(state.limits, rows.limits),
            sample_ids=put(state.sample_ids, rows.sample_ids),
            temperatures=put(state.temperatures, rows.temperatures),
            active=put(state.active, True),
        )

    def refill(params: Params, state: SlotState, slots: Any, length: int) -> SlotState:
        """Recomputes the cache of slots [R] from their first `length` tokens.

        What lies beyond a sequence's end is computed too and never read: decode writes a position before reading it.
        """
        tokens = state.tokens.at[slots, :length].get(mode="fill", fill_value=0)  # [R, length]
        positions = jnp.broadcast_to(jnp.arange(length), tokens.shape)
        _, keys_values = model.bind(params).prefill(tokens, positions, jnp.ones_like(tokens))
        return state._replace(cache=state.cache.write_rows(slots, keys_values))

    def extend(params: Params, state: SlotState, slots: Any, start: Any) -> SlotState:
        """Computes a piece of prefill_tokens positions of slots [R], from `start` on; what comes before is computed."""
        at = start + jnp.arange(config.prefill_tokens)
        tokens = state.tokens.at[slots[:, None], at[None]].get(mode="fill", fill_value=0)  # [R, L]
        keys_values = model.bind(params).extend(tokens, at, state.cache.dense_rows(slots))
        return state._replace(cache=state.cache.write_at(slots, at, keys_values))

    def copy_prompts(state: SlotState, sources: Any, targets: Any) -> SlotState:
        """Gives slots `targets` [R] the keys and values that `sources` [R] have of the same prompt."""
        return state._replace(cache=state.cache.copy_rows(sources, targets, config.max_prompt_length))

    def decode_rows(params: Params, state: SlotState, version: Any, min_active: Any) -> tuple[SlotState, jax.Array]:
        policy = model.bind(params)
        rows = jnp.arange(state.lengths.shape[0])

        def unfinished(carry: tuple[jax.Array, SlotState]) -> jax.Array:
            step, s = carry
            return (step < config.chunk) & (jnp.sum(s.active) > min_active)

        def one(carry: tuple[jax.Array, SlotState]) -> tuple[jax.Array, SlotState]:
            step, s = carry
            last = s.lengths - 1
            hidden, cache = policy.decode(s.tokens[rows, last], last, s.cache)
            keys = token_keys(jax.random.wrap_key_data(s.key), s.sample_ids, s.lengths)
            drawn, logprobs = sample_tokens(policy.logits(hidden), keys, s.temperatures, config.kept)
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

    def decode(
        params: Params, state: SlotState, slots: Any, version: Any, min_active: Any
    ) -> tuple[SlotState, Progress]:
        """Up to `chunk` tokens for every active slot; leaves early once at most `min_active` slots are active.

        slots: int32 [N] with every active one among them, to compute those alone; None computes all.
        """
        if slots is None:
            state, steps = decode_rows(params, state, version, min_active)
        else:
            some, steps = decode_rows(params, _gather(state, slots), version, min_active)
            state = _scatter(state, slots, some)
        return state, Progress(steps, state.lengths, state.active)

    def take(state: SlotState, slots: Any) -> tuple[Any, ...]:
        """Tokens, log-probs and versions [R, T] of slots [R]."""
        buffers = (state.tokens, state.logprobs, state.versions)
        return tuple(b.at[slots].get(mode="fill", fill_value=0) for b in buffers)

    def recent(state: SlotState) -> jax.Array:
        """The last tokens of every slot, [S, chunk + stop.window]: enough to find a stop string in the newest chunk."""
        back = jnp.arange(config.chunk + (stop.window if stop else 0))[::-1]  # ..., 1, 0
        return jnp.take_along_axis(state.tokens, jnp.maximum(0, state.lengths[:, None] - 1 - back), axis=1)

    def set_active(state: SlotState, slots: Any, active: Any) -> SlotState:
        return state._replace(active=state.active.at[slots].set(active, mode="drop"))

    def assign(state: SlotState, tables: Any) -> SlotState:
        """Gives a paged cache these tables."""
        assert isinstance(state.cache, PagedKVCache)
        return state._replace(cache=state.cache._replace(tables=tables))

    # outputs have the inputs' layout whatever the compiler would choose: another would compile the next program anew
    layout, here = _state_sharding(model, config), sharding.replicated(model.mesh)
    return Program(
        model,
        config,
        stop=stop,
        place=jax.jit(place, donate_argnums=0, out_shardings=layout),
        refill=jax.jit(refill, donate_argnums=1, static_argnums=3, out_shardings=layout),
        extend=jax.jit(extend, donate_argnums=1, out_shardings=layout),
        copy_prompts=jax.jit(copy_prompts, donate_argnums=0, out_shardings=layout),
        decode=jax.jit(decode, donate_argnums=1, out_shardings=(layout, here)),
        take=jax.jit(take, out_shardings=here),
        recent=jax.jit(recent, out_shardings=here),
        set_active=jax.jit(set_active, donate_argnums=0, out_shardings=layout),
        assign=jax.jit(assign, donate_argnums=0, out_shardings=layout),
    )


def _gather(state: SlotState, slots: Any) -> SlotState:
    """The rows of slots [N]; those of an index out of range are idle."""

    def rows(buffer: Any) -> Any:
        return buffer.at[slots].get(mode="fill", fill_value=0)

    columns = {name: rows(getattr(state, name)) for name in SlotState._fields if name not in ("cache", "key")}
    some = state._replace(cache=state.cache.rows(slots), **columns)
    return some._replace(lengths=jnp.maximum(1, some.lengths))


def _scatter(state: SlotState, slots: Any, some: SlotState) -> SlotState:
    """`state` with what decode changes taken over from the rows `some` of slots [N]."""

    def put(buffer: Any, rows: Any) -> Any:
        return buffer.at[slots].set(rows, mode="drop")

    return state._replace(
        cache=state.cache.put_rows(slots, some.cache),
        tokens=put(state.tokens, some.tokens),
        logprobs=put(state.logprobs, some.logprobs),
        versions=put(state.versions, some.versions),
        lengths=put(state.lengths, some.lengths),
        active=put(state.active, some.active),
    )


def _state_sharding(model: Model, config: EngineConfig) -> SlotState:
    abstract = jax.eval_shape(lambda: _empty_cache(model, config))
    others = dict.fromkeys(SlotState._fields[1:], sharding.replicated(model.mesh))
    return SlotState(cache_sharding(abstract, model.mesh), **others)


def _empty_cache(model: Model, config: EngineConfig) -> Cache:
    c, paging = model.config, config.paging
    if paging is None:
        shape = (config.slots, c.kv_heads, config.max_length, c.head_dim)
        return empty_cache(shape, c.layers, c.compute_dtype, model.mesh)
    shape = (paging.blocks, c.kv_heads, paging.block_size, c.head_dim)
    tables = (config.slots, paging.blocks_for(config.max_length))
    return empty_pool(shape, tables, c.layers, c.compute_dtype, model.mesh)


def empty_state(model: Model, config: EngineConfig, seed: int) -> SlotState:
    """Buffers with every slot idle; tokens are drawn from keys that derive from `seed`."""
    everywhere = sharding.replicated(model.mesh)

    def zeros(width: tuple[int, ...], dtype: Any) -> jax.Array:
        return sharding.place(np.zeros(width, dtype), everywhere)

    table, column = (config.slots, config.max_length), (config.slots,)
    return SlotState(
        cache=_empty_cache(model, config),
        tokens=zeros(table, np.int32),
        logprobs=zeros(table, np.float32),
        versions=zeros(table, np.int32),
        lengths=sharding.place(np.ones(column, np.int32), everywhere),
        limits=zeros(column, np.int32),
        sample_ids=zeros(column, np.uint32),
        temperatures=zeros(column, np.float32),
        active=zeros(column, bool),
        key=sharding.place(np.asarray(jax.random.key_data(jax.random.key(seed))), everywhere),
    )


def warm_up(program: Program, params: Params, state: SlotState) -> SlotState:
    """Compiles every shape that an engine can meet, on slots that are all idle; changes nothing that is read."""
    config = program.config
    for rows in config.row_ladder:
        nothing = config.padded([], rows)
        state = program.place(state, empty_rows(config, rows))
        state = program.copy_prompts(state, nothing, nothing)
        for length in config.length_ladder:
            if config.fits(rows, length):
                state = program.refill(params, state, nothing, length)
        program.take(state, nothing)
        if program.stop or config.paging or config.max_prompt_length > config.longest_refill:
            state = program.set_active(state, nothing, np.bool_(False))
    if program.stop:
        program.recent(state)
    if config.max_length > config.longest_refill:
        state = program.extend(params, state, config.padded([], 1), np.int32(0))
    if isinstance(state.cache, PagedKVCache):
        state = program.assign(state, np.asarray(state.cache.tables))
    for slots in (None, *(config.padded([], size) for size in config.fewer)):
        state, _ = program.decode(params, state, slots, np.int32(0), np.int32(0))
    return jax.block_until_ready(state)


def empty_rows(config: EngineConfig, rows: int) -> Rows:
    """Rows that place nothing, to be filled in."""
    return Rows(
        slots=config.padded([], rows),
        prompts=np.zeros((rows, config.max_prompt_length), np.int32),
        lengths=np.ones(rows, np.int32),
        limits=np.ones(rows, np.int32),
        sample_ids=np.zeros(rows, np.uint32),
        temperatures=np.ones(rows, np.float32),
    )
