"""The slot engine: independence of slots and order, exact versions and log-probs across weight swaps."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_jax import sharding
from areal_jax.compiles import CompileCounter
from areal_jax.rl.logprobs import token_logprobs
from areal_jax.rollout.blocks import Paging
from areal_jax.rollout.engine import Engine
from areal_jax.rollout.programs import EngineConfig, make_program
from areal_jax.rollout.schedule import Request
from areal_jax.rollout.stopping import StopStrings
from areal_jax.types import PolicySnapshot
from tests.helpers import TINY, tiny_model

CONFIG = EngineConfig(
    slots=4, max_prompt_length=6, max_length=24, chunk=3, row_ladder=(1, 4), length_ladder=(6, 24), prefill_tokens=64,
    eos_ids=(1,), kv_on_update="recompute",
)  # fmt: skip
MODEL = tiny_model()
PAGED = dataclasses.replace(CONFIG, slots=6, fewer=(2,), paging=Paging(blocks=13, block_size=4))
"""Blocks for two sequences of the greatest length and a bit: six slots, and samples are parked time and again."""
PIECES = dataclasses.replace(CONFIG, length_ladder=(3,), prefill_tokens=3, row_ladder=(1, 2))
"""Most prompts, and all that is computed again after a swap, in pieces of three tokens."""


@functools.cache
def compiled(config):
    """A program per config, for all tests: compiling is most of their time."""
    return make_program(MODEL, config)


PROGRAM = compiled(CONFIG)
PIECES_PROGRAM = compiled(PIECES)
PAGED_PROGRAM = compiled(PAGED)
PROGRAMS = {"recompute": PROGRAM, "keep": compiled(dataclasses.replace(CONFIG, kv_on_update="keep"))}
PARAMS = [MODEL.init_params(seed) for seed in range(6)]


def letters(tokens):
    return "".join(chr(ord("a") + t) for t in tokens)


def requests(n, temperature=1.0, limit=18):
    rng = np.random.default_rng(0)
    return [Request(i, rng.integers(3, 17, 1 + i % 6).astype(np.int32), limit, temperature) for i in range(n)]


def drain(engine, swaps=()):
    """Runs to the end; before turn i swaps to the version swaps[i], if any."""
    done = {}
    turn = 0
    while engine.unfinished:
        if turn < len(swaps) and swaps[turn] is not None:
            engine.set_params(PolicySnapshot(swaps[turn], PARAMS[swaps[turn]]))
        for c in engine.step():
            done[c.request.sample_id] = c
        turn += 1
    return done


@jax.jit
def forced(params, batch, positions):
    policy = MODEL.bind(params)
    hidden = policy(batch, positions, jnp.ones_like(batch))
    return token_logprobs(hidden, policy.output(), batch, positions > 0, 1.0, CONFIG.max_length)[0]


def teacher_forced(params, tokens):
    """Log-probs of the tokens in one full forward; padded at the end, which causality keeps out."""
    padded = np.zeros((1, CONFIG.max_length), np.int32)
    padded[0, : len(tokens)] = tokens
    return np.asarray(forced(params, padded, np.arange(CONFIG.max_length)[None]))[0, : len(tokens)]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_results_do_not_depend_on_slots_or_order(temperature):
    wanted = requests(9, temperature)
    engine = Engine(PROGRAM, PolicySnapshot(0, PARAMS[0]), seed=0)
    engine.submit(wanted)
    reference = drain(engine)
    assert sorted(reference) == list(range(9))
    one_slot = dataclasses.replace(CONFIG, slots=1, row_ladder=(1,), chunk=5)
    seven_slots = dataclasses.replace(CONFIG, slots=7, fewer=(2, 3), chunk=4)  # at the tail, 3 and then 2 of them
    paged_pieces = dataclasses.replace(PAGED, length_ladder=(), prefill_tokens=4)
    orders = (one_slot, wanted), (seven_slots, wanted), (CONFIG, wanted[::-1]), (PAGED, wanted), (PAGED, wanted[::-1])
    orders += (PIECES, wanted), (paged_pieces, wanted)
    for config, order in orders:
        engine = Engine(compiled(config), PolicySnapshot(0, PARAMS[0]), seed=0)
        engine.submit(order)
        found = drain(engine)
        assert sorted(found) == list(range(9))
        for i, c in found.items():
            np.testing.assert_array_equal(c.tokens, reference[i].tokens)
            np.testing.assert_allclose(c.behaviour_logprobs, reference[i].behaviour_logprobs, atol=1e-5)


@settings(max_examples=24, deadline=None)
@given(
    st.lists(st.sampled_from([None, 1, 2, 3, 4, 5]), max_size=20),
    st.sampled_from(["dense", "a token at a time", "paged", "in pieces"]),
)
def test_log_probs_equal_a_teacher_forced_forward_of_each_tokens_own_version(swaps, how):
    """With a token at a time, weights change after any token, the first and the last included."""
    increasing, newest = [], 0
    for s in swaps:
        increasing.append(s if s is not None and s > newest else None)
        newest = max(newest, s or 0)
    one_by_one = compiled(dataclasses.replace(CONFIG, chunk=1))
    programs = {"dense": PROGRAM, "a token at a time": one_by_one, "paged": PAGED_PROGRAM, "in pieces": PIECES_PROGRAM}
    engine = Engine(programs[how], PolicySnapshot(0, PARAMS[0]), seed=1)
    engine.submit(requests(6))
    drawn = drain(engine, increasing)
    assert sorted(drawn) == list(range(6))
    for c in drawn.values():
        n = len(c.request.prompt)
        versions = c.policy_versions
        assert (versions[:n] == -1).all()
        assert (np.diff(versions[n:]) >= 0).all()
        assert (c.behaviour_logprobs[:n] == 0).all()
        for version in np.unique(versions[n:]):
            mine = versions == version
            np.testing.assert_allclose(
                c.behaviour_logprobs[mine], teacher_forced(PARAMS[version], c.tokens)[mine], atol=1e-4
            )
        assert len(c.tokens) - n <= c.request.max_new_tokens
        ended = c.tokens[-1] == 1
        assert c.finish_reason == ("stop" if ended else "length")
        assert not (c.tokens[n:-1] == 1).any()
        assert ended or len(c.tokens) - n == c.request.max_new_tokens


@pytest.mark.parametrize("changes", [{}, {"fewer": (1, 2)}, {"paging": Paging(blocks=40, block_size=4)}])
def test_a_group_s_prompt_is_computed_once(changes):
    """Two groups of four; the same tokens as without sharing, over swaps too."""
    program = compiled(dataclasses.replace(CONFIG, slots=8, **changes))
    rng = np.random.default_rng(1)
    prompts = [rng.integers(3, 17, n).astype(np.int32) for n in (6, 4)]
    wanted = [Request(4 * g + i, prompt, 18, 1.0) for g, prompt in enumerate(prompts) for i in range(4)]
    rows = []

    def counted(params, state, slots, length):
        rows.append(int((slots < 8).sum()))
        return program.refill(params, state, slots, length)

    together = Engine(program._replace(refill=counted), PolicySnapshot(0, PARAMS[0]), seed=0)
    together.submit(wanted)
    first = together.step()
    assert (first, rows) == ([], [2])
    shared = drain(together, [None, 1, None, 2])
    for request in wanted:
        alone = Engine(program, PolicySnapshot(0, PARAMS[0]), seed=0)
        alone.submit([request])
        alone.step()
        result = drain(alone, [None, 1, None, 2])[request.sample_id]
        np.testing.assert_array_equal(result.tokens, shared[request.sample_id].tokens)
        np.testing.assert_array_equal(result.policy_versions, shared[request.sample_id].policy_versions)
        np.testing.assert_allclose(result.behaviour_logprobs, shared[request.sample_id].behaviour_logprobs, atol=1e-5)


def test_a_prompt_s_keys_of_older_weights_are_not_shared():
    engine = Engine(PROGRAMS["keep"], PolicySnapshot(0, PARAMS[0]), seed=0)
    prompt = np.array([5, 6, 7], np.int32)
    engine.submit([Request(0, prompt, 18, 1.0)])
    engine.step()
    engine.set_params(PolicySnapshot(1, PARAMS[1]))
    engine.submit([Request(1, prompt, 18, 1.0)])
    assert engine.step() == []  # both are in slots now
    after = drain(engine)[1]
    response = after.policy_versions == 1
    np.testing.assert_allclose(
        after.behaviour_logprobs[response], teacher_forced(PARAMS[1], after.tokens)[response], atol=1e-4
    )


def test_finish_swaps_between_samples_alone():
    program = compiled(dataclasses.replace(CONFIG, kv_on_update="finish"))
    engine = Engine(program, PolicySnapshot(0, PARAMS[0]), seed=1)
    engine.submit(requests(9))
    done = engine.step()
    with pytest.raises(RuntimeError, match="swap when none is"):
        engine.set_params(PolicySnapshot(1, PARAMS[1]))
    engine.hold(True)
    while engine.live:
        done += engine.step()
    engine.set_params(PolicySnapshot(1, PARAMS[1]))
    engine.hold(False)
    done += drain(engine).values()
    versions = {c.request.sample_id: set(c.policy_versions[c.policy_versions >= 0]) for c in done}
    assert sorted(versions) == list(range(9))
    assert all(versions[i] == {0} for i in range(4))
    assert all(versions[i] == {1} for i in range(4, 9))


def test_the_next_logits_after_a_swap_are_those_of_a_fresh_forward_under_the_new_weights():
    """Recomputed keys and values: a greedy token after the swap is the argmax of a whole forward, and so on."""
    engine = Engine(PROGRAM, PolicySnapshot(0, PARAMS[0]), seed=0)
    engine.submit(requests(4, temperature=0.0))
    for completion in drain(engine, [None, None, 4]).values():
        positions = np.arange(CONFIG.max_length)[None]
        padded = np.zeros((1, CONFIG.max_length), np.int32)
        padded[0, : len(completion.tokens)] = completion.tokens
        for version in (0, 4):
            policy = MODEL.bind(PARAMS[version])
            logits = policy.logits(policy(padded, positions, jnp.ones_like(padded)))[0]
            drawn = np.flatnonzero(completion.policy_versions == version)
            np.testing.assert_array_equal(np.argmax(logits[drawn - 1], axis=-1), completion.tokens[drawn])


def test_version_stamps_around_a_swap_are_exact():
    engine = Engine(PROGRAM, PolicySnapshot(0, PARAMS[0]), seed=2)
    never_ends = [Request(0, np.array([5, 6], np.int32), 9, 0.0)]
    engine.submit(never_ends)
    completion = drain(engine, [None, 3, None])[0]  # chunks of 3 tokens: one under version 0, the rest under 3
    if len(completion.tokens) == 11:
        np.testing.assert_array_equal(completion.policy_versions, [-1, -1, 0, 0, 0, 3, 3, 3, 3, 3, 3])
    else:
        pytest.fail(f"the sample ended early: {completion.tokens}; choose another prompt")


def test_recompute_and_keep_differ_after_a_swap_and_agree_without():
    outcomes = {}
    for mode, program in PROGRAMS.items():
        for swaps in ((), (None, 4)):
            engine = Engine(program, PolicySnapshot(0, PARAMS[0]), seed=3)
            engine.submit(requests(4, limit=15))
            outcomes[mode, swaps] = drain(engine, swaps)
    for i in range(4):
        same = [outcomes[mode, ()][i].behaviour_logprobs for mode in PROGRAMS]
        np.testing.assert_array_equal(*same)
    kept = [outcomes[mode, (None, 4)] for mode in PROGRAMS]
    assert any(
        len(kept[0][i].tokens) != len(kept[1][i].tokens)
        or np.abs(kept[0][i].behaviour_logprobs - kept[1][i].behaviour_logprobs).max() > 1e-4
        for i in range(4)
    )


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"paging": Paging(blocks=13, block_size=4)},
        {"length_ladder": (3,), "prefill_tokens": 3, "row_ladder": (1, 2)},
    ],
)
def test_nothing_compiles_after_warm_up(changes):
    stop = StopStrings(["ab"], letters) if "length_ladder" in changes else None
    program = make_program(MODEL, dataclasses.replace(CONFIG, slots=5, fewer=(1, 2), **changes), stop)
    engine = Engine(program, PolicySnapshot(0, PARAMS[0]), seed=0)
    counter = CompileCounter()
    engine.warm_up()
    assert counter.total > 0
    counter.warm()
    engine.submit(requests(17) + requests(17))
    drain(engine, [None, 1, None, 2])
    other = Engine(program, PolicySnapshot(0, PARAMS[3]), seed=9)  # what an evaluation does
    other.submit(requests(3, temperature=0.0))
    drain(other)
    assert counter.after_warmup == 0


def test_samples_without_blocks_wait_or_are_parked_and_none_is_lost():
    engine = Engine(PAGED_PROGRAM, PolicySnapshot(0, PARAMS[0]), seed=7)
    engine.submit(requests(30))
    pool, most, turns = engine._schedule.pool, 0, 0
    done = []
    while engine.unfinished:
        done += engine.step()
        held = pool.tables[pool.tables < PAGED.paging.blocks]
        assert len(set(held)) == len(held)  # no block has two owners
        assert len(held) + pool.free == PAGED.paging.blocks
        most, turns = max(most, engine.live), turns + 1
        assert turns < 1000
    assert sorted(c.request.sample_id for c in done) == list(range(30))
    assert engine.preemptions > 0  # else this test shows nothing
    assert most > 2  # sequences of the greatest length that there is room for
    assert pool.free == PAGED.paging.blocks


@pytest.mark.parametrize("chunk", [1, 3, 7])
def test_stop_strings_end_a_response_at_the_first_match_whatever_the_chunk(chunk):
    plain = Engine(compiled(dataclasses.replace(CONFIG, chunk=chunk)), PolicySnapshot(0, PARAMS[0]), 4)
    plain.submit(requests(20))
    whole = drain(plain)
    texts = {i: letters(c.tokens[len(c.request.prompt) :]) for i, c in whole.items()}
    longest = max(texts.values(), key=len)
    strings = (longest[4:6], longest[8:11])  # of two and three tokens: they straddle chunks
    paging = Paging(blocks=13, block_size=4) if chunk == 3 else None
    changes = {"chunk": chunk, "paging": paging}
    program = make_program(MODEL, dataclasses.replace(CONFIG, **changes), StopStrings(strings, letters))
    engine = Engine(program, PolicySnapshot(0, PARAMS[0]), 4)
    engine.submit(requests(20))
    cut = drain(engine)
    stopped = 0
    for i, text in texts.items():
        ends = [text.index(s) + len(s) for s in strings if s in text]
        n = len(whole[i].request.prompt) + min(ends, default=len(text))
        for name in ("tokens", "policy_versions"):
            np.testing.assert_array_equal(getattr(cut[i], name), getattr(whole[i], name)[:n])
        np.testing.assert_allclose(cut[i].behaviour_logprobs, whole[i].behaviour_logprobs[:n], atol=1e-5)
        assert cut[i].finish_reason == ("stop" if ends else whole[i].finish_reason)
        stopped += bool(ends)
    assert stopped >= 1
    assert engine.generated_tokens == sum(len(c.tokens) - len(c.request.prompt) for c in cut.values())


@pytest.mark.parametrize(
    ("changes", "swaps"),
    [
        ({"kv_on_update": "recompute"}, [None, 1, None, 2, 3]),
        ({"kv_on_update": "keep"}, [None, 1, None, 2, 3]),
        ({"fewer": (1, 3)}, []),  # leaves chunks early, so that swaps would come elsewhere
    ],
)
def test_stop_strings_are_found_across_swaps_and_at_the_tail(changes, swaps):
    """Each sample ends where the same sample without stop strings has its first match."""
    changes = {"slots": 6, **changes}
    outcomes = []
    for strings in ((), ("a", "bc")):
        stop = StopStrings(strings, letters) if strings else None
        program = make_program(MODEL, dataclasses.replace(CONFIG, **changes), stop)
        engine = Engine(program, PolicySnapshot(0, PARAMS[0]), seed=6)
        engine.submit(requests(6))  # one a slot: they are all at the same place when weights change
        outcomes.append(drain(engine, swaps))
    plain, cut = outcomes
    assert sorted(cut) == list(range(6))
    stopped = 0
    for i, c in plain.items():
        text = letters(c.tokens[len(c.request.prompt) :])
        ends = [text.index(s) + len(s) for s in ("a", "bc") if s in text]
        n = len(c.request.prompt) + min(ends, default=len(text))
        np.testing.assert_array_equal(cut[i].tokens, c.tokens[:n])
        stopped += bool(ends)
    assert stopped >= 1


def test_stop_strings_match_text_and_not_tokens():
    spelt = {0: "", 1: "ab", 2: "c", 3: "d", 4: "bc"}
    stop = StopStrings(["bcd"], lambda tokens: "".join(spelt[t] for t in tokens))
    assert stop.first_match(np.array([1, 2, 3, 2]), new=4) == 3  # ab c d
    assert stop.first_match(np.array([1, 2, 0, 3, 3]), new=2) == 4  # begun among the older tokens
    assert stop.first_match(np.array([4, 3, 2]), new=1) is None  # what was found before is not found again
    assert stop.first_match(np.array([4, 2, 3]), new=3) is None
    with pytest.raises(ValueError, match="none of them empty"):
        StopStrings(["a", ""], letters)


def test_a_refill_keeps_within_its_tokens():
    """With room for 48 tokens, rows of 24 are computed two at a time, and nothing else changes."""
    outcomes = []
    for tokens in (10_000, 48):
        program = compiled(dataclasses.replace(CONFIG, row_ladder=(1, 2, 4), prefill_tokens=tokens))
        refill, shapes = program.refill, []

        def counted(params, state, slots, length, refill=refill, shapes=shapes):
            shapes.append(len(slots) * length)
            return refill(params, state, slots, length)

        engine = Engine(program._replace(refill=counted), PolicySnapshot(0, PARAMS[0]), seed=5)
        engine.submit(requests(8))
        outcomes.append(drain(engine, [None, 1, None, 2, None, 3]))
        assert max(shapes) == (96 if tokens > 96 else 48)
    for i in range(8):
        np.testing.assert_array_equal(outcomes[0][i].tokens, outcomes[1][i].tokens)


def test_a_request_that_does_not_fit_is_refused():
    engine = Engine(PROGRAM, PolicySnapshot(0, PARAMS[0]), seed=0)
    with pytest.raises(ValueError, match="prompt of 7 tokens"):
        engine.submit([Request(0, np.ones(7, np.int32), 4, 1.0)])
    with pytest.raises(ValueError, match="up to 23 new"):
        engine.submit([Request(0, np.ones(4, np.int32), 23, 1.0)])


MESHES = {
    "one device": ({"data": 1, "fsdp": 1, "tensor": 1}, None),
    "data and tensor": ({"data": 2, "fsdp": 1, "tensor": 2}, None),
    "tensor, paged": ({"data": 1, "fsdp": 1, "tensor": 2}, Paging(blocks=48, block_size=4)),
}


@functools.cache
def compiled_on(name):
    """A program on one of MESHES, its vocabulary sharded too, and two versions of its parameters."""
    shape, paging = MESHES[name]
    mesh = sharding.make_mesh(shape, jax.devices()[: int(np.prod(list(shape.values())))])
    model = tiny_model(dataclasses.replace(TINY, vocab_size=18), mesh)
    program = make_program(model, dataclasses.replace(CONFIG, slots=8, fewer=(2, 4), paging=paging))
    return program, [model.init_params(seed) for seed in (0, 1)]


@pytest.mark.parametrize("name", [n for n in MESHES if n != "one device"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_sharded_engine_draws_the_same_tokens(name, temperature):
    """Groups of prompts, a swap on the way, and few left at the end."""
    prompts = requests(6, temperature)
    wanted = [dataclasses.replace(r, sample_id=6 * g + i) for i, r in enumerate(prompts) for g in (0, 1)]
    outcomes = []
    for where in ("one device", name):
        program, params = compiled_on(where)
        engine = Engine(program, PolicySnapshot(0, params[0]), seed=0)
        engine.submit(wanted)
        done = engine.step() + engine.step()
        engine.set_params(PolicySnapshot(1, params[1]))
        outcomes.append({c.request.sample_id: c for c in [*done, *drain(engine).values()]})
    one, sharded = outcomes
    assert sorted(one) == sorted(sharded) == list(range(12))
    for i, c in one.items():
        np.testing.assert_array_equal(c.tokens, sharded[i].tokens)
        np.testing.assert_array_equal(c.policy_versions, sharded[i].policy_versions)
        np.testing.assert_allclose(c.behaviour_logprobs, sharded[i].behaviour_logprobs, atol=1e-5)
