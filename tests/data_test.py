"""The embedded task, its tokenizer, the prompt stream and packing."""

import dataclasses
import pathlib
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_jax import warm_start
from areal_jax.data import arithmetic, packing, prompts, tokenizer
from areal_jax.data.sources import SourceConfig, open_source
from areal_jax.data.templates import Template, TemplateConfig
from areal_jax.models import pretrained
from areal_jax.rewards.math import exact_answer
from areal_jax.types import PROMPT_VERSION, Prompt, UserError
from areal_jax.warm_start import supervised_example
from tests.helpers import ROOT, trajectory


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


def test_worked_solutions_by_hand():
    assert arithmetic.worked_solution(347, 586) == "7+6+0=13;4+8+1=13;3+5+1=09#933"
    assert arithmetic.worked_solution(95, 15) == "5+5+0=10;9+1+1=11#110"


@given(st.integers(2, 6).flatmap(lambda n: st.tuples(*[st.integers(10 ** (n - 1), 10**n - 1)] * 2)))
def test_every_worked_solution_is_right_and_rewarded(pair):
    a, b = pair
    prompt = Prompt(0, np.zeros(1), f"{a}+{b}=", str(a + b))
    assert exact_answer(prompt, arithmetic.worked_solution(a, b), "stop") == 1.0
    assert exact_answer(prompt, arithmetic.direct_answer(a, b), "stop") == 1.0
    assert arithmetic.split_of(a, b) == arithmetic.split_of(b, a)


@pytest.mark.parametrize("response", ["", "933", "#", "#93", "##933", "#9#933", "#933;", "# 933", "#-933", "#933#"])
def test_wrong_answers_get_nothing(response):
    assert exact_answer(Prompt(0, np.zeros(1), "347+586=", "933"), response, "stop") == 0.0


def test_a_truncated_answer_gets_nothing():
    prompt = Prompt(0, np.zeros(1), "347+586=", "933")
    assert exact_answer(prompt, "#933", "length") == 0.0
    assert exact_answer(prompt, "#933", "stop") == 1.0


def test_splits_are_disjoint_whole_and_the_same_every_time(cache):
    operands = {}
    for split, size in arithmetic.SPLIT_SIZES.items():
        source = arithmetic.load(split, cache)
        assert len(source) == size
        pairs = [frozenset(source[i]["prompt"].decode()[:-1].split("+")) for i in range(size)]
        operands[split] = set(pairs)
        assert len(operands[split]) == size  # no problem twice
    assert not operands["train"] & (operands["validation"] | operands["test"])
    assert not operands["validation"] & operands["test"]
    first = next(arithmetic.generate("test"))
    assert first == next(arithmetic.generate("test"))


def test_the_number_of_steps_has_a_tail():
    lengths = [len(r["worked"].split(";")) for _, r in zip(range(3000), arithmetic.generate("train"), strict=False)]
    share = np.bincount(lengths, minlength=7)[2:] / 3000
    expected = 0.8 ** np.arange(5) / sum(0.8 ** np.arange(5))
    np.testing.assert_allclose(share, expected, atol=0.03)


def test_the_longest_problem_fits_the_default_lengths():
    from configs import default

    c = default.get_config().rollout
    assert len("999999+999999=") <= c.max_prompt_length
    assert len(arithmetic.worked_solution(999_999, 999_999)) + 1 <= c.max_response_length


def test_a_damaged_data_file_is_named(tmp_path):
    arithmetic.load("test", tmp_path)
    file = next(pathlib.Path(tmp_path).rglob("*test.array_record*"))
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    with pytest.raises(UserError, match="delete that directory"):
        arithmetic.load("test", tmp_path)


def test_tokenizer_round_trips_and_loads_like_any_other(tmp_path):
    built = tokenizer.build_character_tokenizer(arithmetic.ALPHABET)
    built.save_pretrained(tmp_path)
    loaded = pretrained.find_tokenizer(str(tmp_path))
    text = "347+586=7+6+0=13;4+8+1=13#933"
    for t in (built, loaded):
        assert t.decode(t.encode(text)) == text
        assert t.encode("0x\n")[1:] == [t.unk_token_id] * 2
        assert (t.pad_token_id, t.eos_token_id, len(t)) == (0, 1, 17)
    assert loaded.decode([*loaded.encode("12"), 1], skip_special_tokens=True) == "12"


def test_the_prompt_stream_is_seeded_and_resumes_exactly(cache):
    source = open_source(SourceConfig("arithmetic", cache_dir=cache), "validation")
    stream = prompts.RecordStream(source, seed=3)
    first = [next(stream)["prompt"] for _ in range(450)]  # more than an epoch of 400
    assert len(set(first[:400])) == 400
    again = prompts.RecordStream(source, seed=3)
    assert [next(again)["prompt"] for _ in range(100)] == first[:100]
    state = again.get_state()
    rest = [next(again)["prompt"] for _ in range(350)]
    resumed = prompts.RecordStream(source, seed=3)
    resumed.set_state(state)
    assert [next(resumed)["prompt"] for _ in range(350)] == rest == first[100:]
    assert next(prompts.RecordStream(source, seed=4))["prompt"] != first[0]


def test_a_prompt_that_is_too_long_names_both_lengths():
    t = tokenizer.build_character_tokenizer(arithmetic.ALPHABET)
    with pytest.raises(UserError, match=r"has 7 tokens.*max_prompt_length is 6"):
        Template(TemplateConfig(), t).prompt({"prompt": "123+45=", "answer": "168"}, 0, 6)


def test_a_supervised_example_trains_on_the_response_and_its_end():
    t = tokenizer.build_character_tokenizer(arithmetic.ALPHABET)
    example = supervised_example("1+2=", "#3", t)
    assert example.tokens.tolist() == [*t.encode("1+2=#3"), t.eos_token_id]
    assert example.loss_mask.tolist() == [0, 0, 0, 0, 1, 1, 1]


def test_a_warm_start_reads_the_same_examples_however_its_rows_are_rounded_up_to_the_mesh():
    source = [{"prompt": f"{i}+1=", "worked": f"0+0+0=00#{i + 1}", "direct": f"#{i + 1}"} for i in range(40)]
    data = warm_start.Data(source, source, tokenizer.build_character_tokenizer(arithmetic.ALPHABET))
    config = warm_start.WarmStartConfig(0, 3, 32, 8, 16, 0.9, 4, 1e-3, 4, 8, 2, 0.5, 1e-3, 1e-4)

    def real_tokens(rows):
        examples = warm_start._Examples(config, data, packing.PackingConfig(32, rows, 24))
        return [b.tokens[b.segment_ids > 0].tolist() for b, _ in (examples.next_batch(0.5) for _ in range(5))]

    assert real_tokens(3) == real_tokens(8)


lengths = st.lists(st.tuples(st.integers(1, 4), st.integers(1, 6)), min_size=1, max_size=30)


@given(lengths, st.integers(0, 2))
def test_packing_keeps_every_token_once_and_apart(shape, halvings):
    rng = np.random.default_rng(0)
    batch = [trajectory(i, p, r, rng) for i, (p, r) in enumerate(shape)]
    advantages = rng.standard_normal(len(batch)).astype(np.float32)
    config = packing.PackingConfig(row_length=16, rows=2, max_sequence_length=10, halvings=halvings)
    bound = config.max_micro_batches(len(batch))
    packed, layout = packing.pack(batch, config, bound)
    spread = layout.spread([np.full(len(t.tokens), a) for t, a in zip(batch, advantages, strict=True)])
    assert int(packed.micro_batches) <= bound
    found = {}
    for m in range(bound):
        for r in range(2):
            segments = packed.segment_ids[m, r]
            for s in range(1, segments.max() + 1):
                (span,) = np.nonzero(segments == s)
                assert (np.diff(span) == 1).all()
                part = 16 >> int(packed.halvings[m])
                assert span[0] // part == span[-1] // part
                assert packed.positions[m, r, span].tolist() == list(range(len(span)))
                found[tuple(packed.behaviour_logprobs[m, r, span])] = (m, r, span)
            assert (packed.loss_mask[m, r][segments == 0] == 0).all()
            assert m < int(packed.micro_batches) or (segments == 0).all()
    assert len(found) == len(batch)
    for t, a in zip(batch, advantages, strict=True):
        where = found[tuple(t.behaviour_logprobs)]
        np.testing.assert_array_equal(packed.tokens[where], t.tokens)
        np.testing.assert_array_equal(packed.policy_versions[where], t.policy_versions)
        np.testing.assert_array_equal(packed.loss_mask[where], t.loss_mask)
        np.testing.assert_array_equal(spread[where], np.full(len(t.tokens), a))
    for t, back in zip(batch, layout.gather(packed.behaviour_logprobs), strict=True):
        np.testing.assert_array_equal(back, t.behaviour_logprobs)
    assert np.count_nonzero(spread) <= sum(len(t.tokens) for t in batch)
    assert 0 < packing.efficiency([packed]) <= 1


def test_rows_by_hand():
    assert packing.assign_rows([3, 9, 4, 6, 2], 10) == [[1], [3, 2], [0, 4]]
    with pytest.raises(ValueError, match="has 11 tokens; a row holds 10"):
        packing.assign_rows([11], 10)


def test_micro_batches_by_hand():
    """Rows of 8: two a micro-batch. The two over 4 tokens need uncut rows, where 3, 2 and 1 find room; 4 does not fit
    into what is left and gets a micro-batch of four rows of 4 with the last 2 and 1."""
    config = packing.PackingConfig(row_length=8, rows=2, max_sequence_length=8, halvings=1)
    found = packing.assign_micro_batches([5, 6, 4, 3, 2, 1, 2, 1], config)
    assert found == [(0, [[1, 4], [0, 3]]), (1, [[2], [6, 5, 7], [], []])]
    assert packing.assign_micro_batches([4, 4, 1], config) == [(1, [[0], [1], [2], []])]
    assert packing.assign_micro_batches([], config) == []


@given(st.lists(st.integers(1, 40), min_size=1, max_size=60))
def test_cut_rows_need_few_more_micro_batches(lengths):
    """Each length of rows but the first may begin one micro-batch more."""
    plain = packing.PackingConfig(row_length=40, rows=2, max_sequence_length=40)
    cut = dataclasses.replace(plain, halvings=2)
    few, more = (len(packing.assign_micro_batches(lengths, c)) for c in (plain, cut))
    assert more <= few + 3


def test_prompt_positions_carry_their_version():
    t = trajectory(0, 3, 2, np.random.default_rng(0))
    assert (t.policy_versions[:3] == PROMPT_VERSION).all()
    assert (t.prompt_length, t.response_length) == (3, 2)


def test_two_processes_may_make_the_data_set_at_once(tmp_path):
    program = (
        "import pathlib, sys; from areal_jax.data import arithmetic; "
        "print(len(arithmetic.load('test', pathlib.Path(sys.argv[1]))))"
    )
    command = [sys.executable, "-c", program, str(tmp_path)]
    running = [subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    answers = [process.communicate(timeout=120)[0] for process in running]
    assert [process.returncode for process in running] == [0, 0]
    assert answers[0] == answers[1]
    assert int(answers[0]) > 0
