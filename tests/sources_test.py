"""Problems from files, TFDS and reasoning-gym, and the prompts made of them."""

import gzip
import json
import pathlib

import numpy as np
import pytest
from tokenizers import processors

from areal_jax.answers import final_answer, last_box
from areal_jax.data import arithmetic
from areal_jax.data.prompts import PromptStream, RecordStream, fixed_prompts
from areal_jax.data.sources import SourceConfig, open_source, without_first
from areal_jax.data.templates import OverlongPrompt, Template, TemplateConfig
from areal_jax.data.tokenizer import build_character_tokenizer
from areal_jax.types import UserError

ALPHABET = "0123456789+=;# QA:\nabcdefghijklmnopqrstuvwxyz<>|{}\\"


@pytest.fixture
def tokenizer():
    return build_character_tokenizer(ALPHABET)


def write_jsonl(path: pathlib.Path, records) -> pathlib.Path:
    text = "".join(json.dumps(r) + "\n" for r in records)
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return path


def problems(n):
    return [{"question": f"what is {i} + 1?", "answer": f"it is so\n#### {i + 1:,}"} for i in range(n)]


def jsonl(path, **keys):
    return SourceConfig("jsonl", path=str(path), **keys)


# --- answers ---


@pytest.mark.parametrize(
    ("solution", "answer"),
    [
        ("He has 3 * 4 = <<3*4=12>>12.\n#### 12", "12"),
        ("#### 1,234,567", "1234567"),
        (r"so $x = \boxed{\frac{1}{2}}$.", r"\frac{1}{2}"),
        (r"\boxed{3} and then \boxed{7}", "7"),
        (r"\boxed{3} or \fbox{4}", "4"),
        (r"so \boxed 5.", "5"),
        ("#### (1,2)", "(1,2)"),
        (r"\boxed{1,000}", "1000"),
        (" 42 ", "42"),
    ],
)
def test_the_final_answer_of_a_solution(solution, answer):
    assert final_answer(solution) == answer


def test_the_last_box_that_closes():
    assert last_box(r"\boxed{a{b}{c{d}}} x") == "a{b}{c{d}}"
    assert last_box(r"\boxed{1} \boxed{2") == "1"
    assert last_box(r"\boxed{") is None
    assert last_box("none") is None


# --- files ---


@pytest.mark.parametrize("name", ["train.jsonl", "train.jsonl.gz"])
def test_json_lines_plain_and_gzipped(tmp_path, name):
    path = write_jsonl(tmp_path / name, problems(50))
    source = open_source(jsonl(path), "train")
    assert len(source) == 50
    assert source[2] == {"prompt": "what is 2 + 1?", "answer": "3", "solution": "it is so\n#### 3"}


def test_splits_by_hash_are_disjoint_whole_and_keep_repeated_questions_together(tmp_path):
    path = write_jsonl(tmp_path / "all.jsonl", problems(400) * 2)
    config = jsonl(path, test_fraction=0.2, validation_fraction=0.1)
    questions = {s: [r["prompt"] for r in open_source(config, s)] for s in ("train", "validation", "test")}
    sets = {s: set(q) for s, q in questions.items()}
    assert sum(map(len, questions.values())) == 800
    assert len(sets["train"] | sets["validation"] | sets["test"]) == 400 == sum(map(len, sets.values()))
    assert 0.1 < len(sets["test"]) / 400 < 0.3
    assert 0.05 < len(sets["validation"]) / 400 < 0.15


def test_a_heldout_file_is_the_test_split_and_takes_nothing_from_training(tmp_path):
    path = write_jsonl(tmp_path / "train.jsonl", problems(40))
    other = write_jsonl(tmp_path / "test.jsonl", problems(45)[40:])
    again = [{"question": "What is  3 + 1?", "answer": "#### 4"}]  # held out, in other letters
    write_jsonl(other, problems(45)[40:] + again)
    config = jsonl(path, heldout_path=str(other), test_fraction=0.5)
    assert [r["answer"] for r in open_source(config, "train")] == [str(i + 1) for i in range(40) if i != 3]
    assert [r["answer"] for r in open_source(config, "test")] == ["41", "42", "43", "44", "45", "4"]
    with pytest.raises(UserError, match=r"validation_fraction is 0: set it"):
        open_source(config, "validation")


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('{"question": "a", "answer": ', "line 3: no JSON"),
        ('["a", "b"]', "line 3: list where an object was expected"),
        ('{"question": "a"}', r"line 3: 'answer' is None.*see data.answer_key"),
        ('{"question": "", "answer": "1"}', "line 3: 'question' is ''"),
        ('{"question": "a", "answer": [1]}', r"line 3: 'answer' is \[1\]"),
        ('{"question": "a", "answer": true}', "line 3: 'answer' is True"),
        ('{"question": "a", "answer": "so #### "}', "line 3: the answer .* ends in an empty"),
    ],
)
def test_a_broken_line_is_named_with_its_file(tmp_path, line, words):
    path = write_jsonl(tmp_path / "bad.jsonl", problems(1))
    path.write_text(path.read_text() + "\n" + line + "\n")
    with pytest.raises(UserError, match=rf"bad\.jsonl, {words}"):
        open_source(jsonl(path), "train")


def test_a_number_as_answer_and_other_keys(tmp_path):
    path = write_jsonl(tmp_path / "n.jsonl", [{"problem": "a", "result": 0.5}])
    config = jsonl(path, question_key="problem", answer_key="result")
    assert open_source(config, "train")[0] == {"prompt": "a", "answer": "0.5", "solution": "0.5"}


def test_files_that_cannot_be_read(tmp_path):
    cut = write_jsonl(tmp_path / "cut.jsonl.gz", problems(2000))
    cut.write_bytes(cut.read_bytes()[:3000])
    with pytest.raises(UserError, match=r"cut\.jsonl\.gz cannot be read after line [1-9]"):
        open_source(jsonl(cut), "train")
    with pytest.raises(UserError, match=r"none\.jsonl cannot be read after line 0"):
        open_source(jsonl(tmp_path / "none.jsonl"), "train")
    latin = tmp_path / "latin.jsonl"
    latin.write_bytes(b'{"question": "\xff", "answer": "1"}\n')
    with pytest.raises(UserError, match=r"latin\.jsonl cannot be read"):
        open_source(jsonl(latin), "train")
    empty = write_jsonl(tmp_path / "empty.jsonl", [])
    with pytest.raises(UserError, match="no problems in the split 'train'"):
        open_source(jsonl(empty), "train")
    with pytest.raises(UserError, match=r"data\.path is empty"):
        open_source(SourceConfig("jsonl"), "train")


def test_the_gsm8k_files_are_read_whole():
    directory = pathlib.Path(__file__).parent.parent.parent / "shared" / "gsm8k"
    if not directory.is_dir():
        pytest.skip("GSM8K is not on this machine")
    config = jsonl(directory / "train.jsonl.gz", heldout_path=str(directory / "test.jsonl.gz"))
    assert len(open_source(config, "train")) == 7473
    test = open_source(config, "test")
    assert len(test) == 1319
    assert test[0]["answer"] == "18"


# --- TFDS and reasoning-gym ---


def test_a_tfds_name_is_read_without_tensorflow(tmp_path):
    arithmetic.load("test", tmp_path)  # written as any TFDS data set is
    config = SourceConfig("tfds/areal_arithmetic/arithmetic", cache_dir=tmp_path, question_key="prompt")
    source = open_source(config, "test")
    assert len(source) == 600
    assert sum(map(int, source[5]["prompt"].rstrip("=").split("+"))) == int(source[5]["answer"])
    with pytest.raises(UserError, match=r"no 'question'; it has \['answer', .*data.question_key"):
        open_source(SourceConfig("tfds/areal_arithmetic/arithmetic", cache_dir=tmp_path), "test")
    with pytest.raises(UserError, match=r"cannot give 'nothing_of_the_kind'.*no such data set"):
        open_source(SourceConfig("tfds/nothing_of_the_kind", cache_dir=tmp_path), "test")
    with pytest.raises(UserError, match=r"split 'dev' \(data.test_split\)"):
        open_source(SourceConfig("tfds/areal_arithmetic/arithmetic", cache_dir=tmp_path, test_split="dev"), "test")


def test_a_reasoning_gym_task_has_disjoint_splits():
    pytest.importorskip("reasoning_gym")
    config = SourceConfig("reasoning_gym/basic_arithmetic")
    train, validation, test = (open_source(config, split) for split in ("train", "validation", "test"))
    assert len(test) == 1000
    assert len(train) > 10_000
    assert len(validation) > 250
    questions = [{r["prompt"] for r in split} for split in (train, validation, test)]
    assert not questions[0] & questions[1]
    assert not questions[0] & questions[2]
    assert not questions[1] & questions[2]
    assert all(r["answer"] for r in test)
    with pytest.raises(UserError, match="no task 'juggling'"):
        open_source(SourceConfig("reasoning_gym/juggling"), "train")


def test_an_unknown_name_lists_the_forms():
    with pytest.raises(UserError, match=r"'gsm9k'; expected one of arithmetic, .*tfds/NAME"):
        open_source(SourceConfig("gsm9k"), "train")


def test_two_digit_addition_is_every_pair_once(tmp_path):
    config = SourceConfig("two_digit_addition", cache_dir=tmp_path)
    seen = {}
    for split in ("train", "validation", "test"):
        for record in open_source(config, split):
            a, b = map(int, record["prompt"].split(" + "))
            assert a + b == int(record["answer"])
            assert 10 <= min(a, b) <= max(a, b) <= 99
            seen.setdefault(frozenset((a, b)), []).append(split)
    assert len(seen) == 90 * 91 // 2
    assert all(len(splits) == 1 for splits in seen.values())


# --- prompts ---

SHOTS = [{"prompt": "1 + 1", "answer": "2", "solution": "one and one make 2"}]


def test_plain_and_few_shot_prompts(tokenizer):
    assert Template(TemplateConfig(), tokenizer).render("3 + 4") == "3 + 4"
    config = TemplateConfig("few_shot", "Q: {question}\nA:", " {solution} so {answer}\n\n", "add")
    rendered = Template(config, tokenizer, SHOTS).render("3 + 4")
    assert rendered == "add\n\nQ: 1 + 1\nA: one and one make 2 so 2\n\nQ: 3 + 4\nA:"


def test_braces_in_questions_and_solutions_are_left_alone(tokenizer):
    config = TemplateConfig("few_shot", "Q: {question}\nA:", " {solution}\n")
    shot = {"prompt": r"\x{1}", "answer": "1", "solution": r"\y{2} {x}"}
    assert Template(config, tokenizer, [shot]).render("{z}") == "Q: \\x{1}\nA: \\y{2} {x}\nQ: {z}\nA:"


CHAT = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def test_a_chat_prompt_is_the_tokenizers_own_template(tokenizer):
    with pytest.raises(UserError, match="no chat template"):
        Template(TemplateConfig("chat"), tokenizer)
    tokenizer.chat_template = CHAT
    plain = Template(TemplateConfig("chat", "{question} ="), tokenizer).render("3 + 4")
    assert plain == "<|user|>3 + 4 =\n<|assistant|>"
    config = TemplateConfig("chat", "{question}", " {answer}\n\n", "add")
    rendered = Template(config, tokenizer, SHOTS).render("3 + 4")
    assert rendered == "<|system|>add\n<|user|>1 + 1\n<|assistant|>2\n<|user|>3 + 4\n<|assistant|>"


def with_special_tokens(tokenizer, template):
    """The tokenizer, putting special tokens about a text as `template` says ($A is the text)."""
    ids = [(t, tokenizer.convert_tokens_to_ids(t)) for t in ("<eos>", "<pad>")]
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(single=template, special_tokens=ids)
    return tokenizer


def test_what_a_tokenizer_puts_before_a_text_is_kept_and_an_end_of_sequence_is_not(tokenizer):
    text = tokenizer.encode("12")
    bos = with_special_tokens(build_character_tokenizer(ALPHABET), "<pad> $A")  # any token may serve as BOS
    assert Template(TemplateConfig(), bos).encode("12").tolist() == [bos.pad_token_id, *text]
    both = with_special_tokens(build_character_tokenizer(ALPHABET), "<pad> $A <eos>")
    assert Template(TemplateConfig(), both).encode("12").tolist() == [both.pad_token_id, *text]
    both.chat_template = CHAT
    assert Template(TemplateConfig("chat"), both).encode("12").tolist() == text  # a chat template brings its own


def test_tokens_that_the_model_does_not_know_are_refused(tokenizer):
    known = len(tokenizer)
    tokenizer.add_tokens(["<think>"])
    template = Template(TemplateConfig(), tokenizer, vocab_size=known)
    assert template.encode("12").max() < known
    with pytest.raises(UserError, match=rf"'<think>' of the prompt has id {known}, and .* ends at {known - 1}"):
        template.encode("12 <think>")


def test_pad_equal_to_eos_and_no_pad_token_are_ordinary(tokenizer):
    want = Template(TemplateConfig(), tokenizer).encode("1 + 2").tolist()
    for pad in (tokenizer.eos_token, None):
        other = build_character_tokenizer(ALPHABET)
        other.pad_token = pad
        assert Template(TemplateConfig(), other).encode("1 + 2").tolist() == want


# --- streams ---


def stream_of(source, tokenizer, longest, skip, seed=0):
    return PromptStream(RecordStream(source, seed), Template(TemplateConfig(), tokenizer), longest, skip)


def records(*lengths):
    return [{"prompt": "a" * n, "answer": str(n), "solution": str(n)} for n in lengths]


def test_overlong_prompts_are_skipped_with_a_count_or_refused(tokenizer):
    source = records(3, 9, 4, 9, 5)
    stream = stream_of(source, tokenizer, 6, skip=True)
    drawn = [stream() for _ in range(6)]
    assert sorted(p.answer for p, _ in drawn[:3]) == ["3", "4", "5"]
    assert [p.prompt_id for p, _ in drawn] == list(range(6))
    assert stream.skipped >= 2
    refusing = stream_of(source, tokenizer, 6, skip=False)
    with pytest.raises(OverlongPrompt, match=r"has 9 tokens; rollout.max_prompt_length is 6.*data.overlong='skip'"):
        [refusing() for _ in range(5)]
    with pytest.raises(UserError, match="all 2 training prompts"):
        stream_of(records(8, 9), tokenizer, 6, skip=True)()


def test_a_stream_that_skips_resumes_exactly(tokenizer):
    source = records(*np.random.default_rng(0).integers(1, 10, 30))
    whole = stream_of(source, tokenizer, 6, skip=True)
    drawn = [whole() for _ in range(50)]
    resumed = stream_of(source, tokenizer, 6, skip=True)
    resumed.set_state(json.loads(json.dumps(drawn[19][1])))
    for want, state in drawn[20:]:
        got, got_state = resumed()
        assert (got.prompt_id, got.text, got_state) == (want.prompt_id, want.text, state)
    assert resumed.skipped == whole.skipped


def test_held_out_prompts_keep_the_files_order(tokenizer):
    source = records(3, 9, 4, 5)
    template = Template(TemplateConfig(), tokenizer)
    prompts = fixed_prompts(source, 2, template, 6, skip_overlong=True)
    assert [(p.prompt_id, p.answer) for p in prompts] == [(0, "3"), (1, "4")]
    with pytest.raises(OverlongPrompt):
        fixed_prompts(source, 2, template, 6, skip_overlong=False)
    with pytest.raises(UserError, match="no held-out prompt"):
        fixed_prompts(records(9), 2, template, 6, skip_overlong=True)


def test_examples_are_taken_out_of_training():
    source = records(1, 2, 3)
    rest = without_first(source, 2)
    assert [rest[i]["answer"] for i in range(len(rest))] == ["3"]
    assert without_first(source, 0) is source
