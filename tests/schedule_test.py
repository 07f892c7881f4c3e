"""The engine's decisions, on a device that the test plays: nobody is lost, overtaken, or given what another has."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_jax.rollout.blocks import BlockPool, Paging
from areal_jax.rollout.programs import EngineConfig
from areal_jax.rollout.schedule import Request, Schedule

EOS = (1,)


def config(**changes):
    fields = {
        "slots": 4, "max_prompt_length": 12, "max_length": 32, "chunk": 4, "row_ladder": (1, 4),
        "length_ladder": (6, 8), "prefill_tokens": 8, "eos_ids": EOS, "kv_on_update": "recompute",
    }  # fmt: skip
    return EngineConfig(**(fields | changes))


def request(i, length=4, new=8, prompt=None):
    tokens = np.full(length, i if prompt is None else prompt, np.int32)
    return Request(i, tokens, new, 1.0)


class Device:
    """Draws a token a step in every running slot; sample i ends after ends[i] tokens, or by its text if in cuts."""

    def __init__(self, schedule, ends, cuts=()):
        self.schedule, self.ends, self.cuts = schedule, ends, cuts
        self.lengths = np.ones(schedule.config.slots, int)
        self.active = np.zeros(schedule.config.slots, bool)
        self.computed = {}  # slot -> tokens whose keys and values are there
        self.started, self.finished, self.prefilled = [], [], []

    def turn(self, version=0):
        s, c = self.schedule, self.schedule.config
        busy = bool(s.running())
        admission = s.admit(version)
        tokens = 0
        for slot, r in admission.placed.items():
            self.lengths[slot], self.active[slot], self.computed[slot] = len(r.prompt), True, 0
            self.started.append(r.sample_id)
        for slot in admission.refilled:
            self.computed[slot] = self.lengths[slot]
            tokens += self.lengths[slot]
        for source, target in admission.copied:
            assert self.computed[source] >= self.lengths[target]
            assert (s.slots[source].request.prompt == s.slots[target].request.prompt).all()
            self.computed[target] = self.lengths[target]
        for slot, start in admission.pieces:
            assert start == 0 or self.computed[slot] == start
            self.computed[slot] = start + c.prefill_tokens
            tokens += c.prefill_tokens
        self.active[admission.started] = True
        self.active[admission.held] = False
        self.prefilled.append((busy, tokens, len(admission.refilled) + len(admission.pieces)))
        chunk = s.chunk()
        if chunk is None:
            return
        self.active[chunk.parked] = False
        for slot in chunk.parked:
            self.computed[slot] = 0
        order = list(s.slots)
        parked = [order.index(i) for i in order if s.slots[i].state == "parked"]
        assert not parked or all(order.index(i) < min(parked) for i in chunk.running)  # nobody is overtaken
        if not chunk.running:
            return
        assert set(chunk.running) == set(np.flatnonzero(self.active)) & set(s.slots)
        assert chunk.min_active < len(chunk.running)
        for _ in range(c.chunk):
            if sum(self.active[chunk.running]) <= chunk.min_active:
                break
            for slot in (i for i in chunk.running if self.active[i]):
                assert self.computed[slot] >= self.lengths[slot] - 1  # all but the last, which is fed
                if s.pool:
                    assert s.pool.lacking(slot, self.lengths[slot]) == 0
                self.computed[slot] = self.lengths[slot]
                self.lengths[slot] += 1
                r = s.slots[slot].request
                drawn = self.lengths[slot] - len(r.prompt)
                self.active[slot] = drawn < min(r.max_new_tokens, self.ends.get(r.sample_id, 99))
        for i, slot in s.slots.items():  # found in what an earlier chunk drew, while this one was under way
            if slot.request.sample_id in self.cuts and slot.length > len(slot.request.prompt):
                slot.cut, self.active[i] = slot.length, False
        self.finished += [slot.request.sample_id for slot in s.land(self.lengths, self.active).values()]

    def drain(self, turns=500):
        for _ in range(turns):
            if not (self.schedule.slots or self.schedule.waiting):
                return
            self.turn()
        pytest.fail(f"not within {turns} turns: {self.schedule.slots}, {self.schedule.waiting}")


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 12), st.integers(1, 20), st.integers(1, 20), st.integers(0, 3)), max_size=25),
    st.sampled_from([None, 8, 9, 11, 16]),
    st.booleans(),
    st.sets(st.integers(0, 24)),
)
def test_every_sample_is_drawn_once_and_in_order(samples, blocks, swaps, cuts):
    """Samples of (prompt length, limit, end, prompt). Blocks have 4 tokens: 8 of them hold one longest sequence."""
    schedule = Schedule(config(paging=Paging(blocks, 4) if blocks else None, fewer=(1, 2)))
    device = Device(schedule, {i: end for i, (_, _, end, _) in enumerate(samples)}, cuts)
    for i, (length, new, _, prompt) in enumerate(samples):
        schedule.submit([request(i, length, new, prompt)])
        device.turn(version=i if swaps else 0)
        if swaps:
            refilled, pieces = schedule.swap(i + 1)
            assert set(refilled) == set(schedule.running())
            for slot, state in schedule.slots.items():
                if state.state == "filling":  # all that is computed so far, again
                    assert pieces == [(slot, start) for start in range(0, device.computed[slot], 8)]
    for _ in range(2000):
        if not (schedule.slots or schedule.waiting):
            break
        device.turn(version=len(samples) if swaps else 0)
    assert device.started == list(range(len(samples)))
    assert sorted(device.finished) == list(range(len(samples)))
    for busy, tokens, parts in device.prefilled:
        assert not busy or parts == 1 or tokens <= schedule.config.prefill_tokens
    if schedule.pool:
        assert schedule.pool.free == blocks


def test_a_long_prompt_goes_in_pieces_between_chunks_and_others_are_decoded_meanwhile():
    schedule = Schedule(config(prefill_tokens=8, max_length=64, max_prompt_length=40))
    device = Device(schedule, {})
    schedule.submit([request(0, 4, 40), request(1, 30, 4), request(2, 4, 4)])
    drawn = []
    for _ in range(6):
        device.turn()
        drawn.append(int(device.lengths[0]) - 4)
    # nothing was decoded before the first turn: a short prompt, and all four pieces of the long one
    assert [tokens for _, tokens, _ in device.prefilled[:2]] == [4 + 32, 4]
    device.drain()
    schedule.submit([request(3, 4, 40), request(4, 4, 40)])
    device.turn()
    schedule.submit([request(5, 30, 4), request(6, 4, 4)])
    drawn = []
    for _ in range(5):
        device.turn()
        drawn.append(int(device.lengths[0]) - 4)
    assert drawn == [8, 12, 16, 20, 24]  # it is decoded all the time
    assert [tokens for _, tokens, _ in device.prefilled[-5:]] == [8, 8, 8, 8, 4]
    device.drain()
    assert device.started == list(range(7))


def test_a_long_prompt_is_computed_at_once_when_nothing_else_is_decoded():
    schedule = Schedule(config(prefill_tokens=8, max_length=64, max_prompt_length=40))
    device = Device(schedule, {})
    schedule.submit([request(0, 30, 4)])
    device.turn()
    assert device.prefilled == [(False, 32, 4)]
    assert device.finished == [0]


def test_while_samples_are_decoded_prompts_are_let_in_by_their_tokens():
    schedule = Schedule(config(prefill_tokens=8))
    device = Device(schedule, {0: 1, 1: 1, 2: 1})
    schedule.submit([request(i, 6, 20) for i in range(4)])
    device.turn()  # nothing was decoded before: all four
    schedule.submit([request(i, 4, 8) for i in range(4, 7)])
    assert device.started == [0, 1, 2, 3]
    assert device.finished == [0, 1, 2]
    device.turn()
    assert device.started == [0, 1, 2, 3, 4, 5]  # another four tokens would be more than eight
    device.turn()
    assert device.started == [0, 1, 2, 3, 4, 5, 6]


def test_the_youngest_make_room_and_come_back_before_others_are_let_in():
    schedule = Schedule(config(paging=Paging(blocks=8, block_size=4)))
    device = Device(schedule, {})
    schedule.submit([request(i, 4, 28) for i in range(3)])
    live = []
    while schedule.slots or schedule.waiting:
        device.turn()
        live.append(len(schedule.running()))
    assert schedule.preemptions > 0
    assert device.finished == [0, 1, 2]
    assert 2 in live


def test_a_prompt_that_is_being_computed_gives_its_blocks_to_older_samples():
    """Sixteen blocks: the second sample's prompt takes eleven of them, and the first one needs the others and more."""
    sizes = {"max_length": 64, "max_prompt_length": 44, "prefill_tokens": 4, "length_ladder": (4,)}
    schedule = Schedule(config(paging=Paging(blocks=16, block_size=4), **sizes))
    device = Device(schedule, {})
    schedule.submit([request(0, 4, 40)])
    device.turn()
    schedule.submit([request(1, 42, 4)])
    while schedule.slots or schedule.waiting:
        before = int(device.lengths[0])
        device.turn()
        assert 0 in device.finished or device.lengths[0] == before + 4  # the older one never stops
    assert schedule.preemptions > 0
    assert device.finished == [0, 1]


def test_a_pool_gives_blocks_once_and_takes_them_back():
    pool = BlockPool(Paging(blocks=6, block_size=4), slots=3, max_length=16)
    assert pool.grow(0, 9)
    assert pool.lacking(0, 13) == 1
    assert not pool.grow(1, 16)
    assert pool.free == 3
    assert pool.grow(1, 12)
    assert (pool.tables[:2] < 6).sum() == len({*pool.tables[:2].ravel().tolist()} - {6}) == 6
    pool.release(0)
    assert pool.free == 3
    assert (pool.tables[0] == 6).all()
    assert pool.share({1: 16, 2: 16}) == [2]
    assert pool.free == 2
    with pytest.raises(ValueError, match="5 blocks of 4 tokens do not hold one sequence of 24"):
        BlockPool(Paging(blocks=5, block_size=4), slots=2, max_length=24)
