"""Grading: numbers in all their spellings, GSM8K's own solutions, and a pool that no answer can hang."""

import contextlib
import gzip
import json
import os
import pathlib
import random
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_jax.answers import final_answer
from areal_jax.environments.single_turn import SingleTurn
from areal_jax.rewards.grader import judge
from areal_jax.rewards.math import Question, fold, last_number, math_answer, parse_number, text_answer
from areal_jax.rewards.pool import GradingPool, PoolConfig, looks_hostile
from areal_jax.rollout.engine import Completion
from areal_jax.rollout.grading import Grader, GradingConfig
from areal_jax.rollout.schedule import Request
from areal_jax.types import Prompt
from experiments.grading import HOSTILE
from tests.helpers import ROOT, environment

GSM8K = pathlib.Path(__file__).parent.parent.parent / "shared" / "gsm8k" / "test.jsonl.gz"


def prompt(answer):
    return Prompt(0, np.zeros(1, np.int32), "", answer)


def grade(answer, response):
    return math_answer(prompt(answer), response, "stop")


# --- numbers ---

RIGHT = [
    ("18", "so she has 18"), ("18", r"\boxed{18}"), ("18", "#### 18"), ("1234.5", r"\boxed{1,234.50}"),
    ("70000", "he made $70,000."), ("70000", r"\boxed{\$70{,}000}"), ("0.75", r"\boxed{\frac{3}{4}}"),
    ("3/4", r"\boxed{0.75}"), (r"\frac{3}{4}", "it is 3/4 of it"), (r"\frac12", r"\boxed{\dfrac{1}{2}}"),
    ("1.5", r"\boxed{1 1/2}"), ("-7", r"\boxed{-7 \text{ cm}}"), ("-7", "the answer is -7."), ("7", "10 - 3 = 7"),
    ("25", r"\boxed{25\%}"), ("0.25", r"\boxed{25\%}"), ("25%", r"\boxed{0.25}"), ("5", r"\boxed{x = 5}"),
    ("42", r"\boxed{42 dollars}"), ("5", r"\boxed{5\text{ cm}^2}"), ("5", r"\boxed{5 cm^2}"),
    ("90", r"\boxed{90^\circ}"),
    ("123", "the answer is １２３"), ("-4", "it is \u22124"), ("3", r"first \boxed{2}, then \boxed{3}"),
    ("7", r"\boxed{7} unless \boxed{8"), ("12", "#### 12\n"), ("1e3", r"\boxed{1e3}"), ("x+1", r"\boxed{ x + 1 }"),
    (r"\frac{\pi}{2}", r"\boxed{\dfrac{\pi}{2}}"), ("(1,2)", r"\boxed{(1, 2)}"),
    ("24", "The area is 24 cm²."), ("24", r"\boxed{24 cm²}"), ("24", r"$24\text{ cm}^2$"), ("4", "4 m/s^2"),
    ("18", "**Answer:**\n- 18 eggs"), ("18", "Final answer \u2013 18"), ("-18", "a loss of -$18"), ("2", "5 - 3 = 2"),
    ("70000", r"$70{,}000$"), ("70000", r"$70\,000$"), ("70000", "70 000"), ("-5", "it is \u20115"), ("-3", "x = - 3"),
    ("3.5", r"\boxed{3½}"), ("72", r"\boxed{72°}"), ("60", "60 mph"), ("3", r"\boxed 3"), ("4", r"\fbox{4}"),
    ("3000000", r"\boxed{3 million}"), ("1000000", "1,000,000 people"), ("cat", r"\boxed{cat}"), ("540", "#### 540"),
    ("Tuesday", "It is on Tuesday."), (r"\text{Evelyn}", r"\boxed{Evelyn}"), ("B", r"\boxed{\text{B}}"),
    ("10:30", r"\boxed{10:30}"), ("6xy", r"\boxed{6xy}"), ("5", "the answer is **5**"), ("10", "$10.00"),
]  # fmt: skip
WRONG = [
    ("18", "she has 18 and gives 3"), ("18", r"\boxed{19}"), ("18", "18 ####  17"), ("18", ""), ("18", "eighteen"),
    ("18", r"\boxed{}"), ("3", r"\boxed{3} so \boxed{7}"), ("0.5", r"\boxed{5}"), ("25", r"\boxed{0.25}"),
    ("7", r"\boxed{-7}"), ("1000", "1,00"), ("3/4", r"\boxed{\frac{4}{3}}"), ("1", r"\boxed{\frac{1}{0}}") ,
    ("12", "twelve 1 2"), ("0.33", r"\boxed{\frac{1}{3}}"), ("18", "9" * 5000), ("18", r"\boxed{" + "9" * 1500 + "}"),
    ("6xy", r"\boxed{6}"), ("2ab", r"\boxed{2}"), ("5", r"\boxed{5xy}"), ("5", r"\boxed{5pi}"),
    ("3", r"\boxed{3 million}"), ("3", r"\boxed{3 \text{ and a half}}"), ("9", r"\boxed{9 squared}"),
    ("9", r"\boxed{9 factorial}"), ("12", r"\boxed{1 2}"), ("52", r"\boxed{5²}"), ("2", "The area is 24 cm²."),
    ("18", "a loss of -$18"), ("cat", r"\boxed{tac}"), ("18", "-18"),
    ("dog cat", r"\boxed{cat dog}"), ("03:22:03", r"\boxed{30:22:30}"), ("hello", "olleh"), ("31/2", r"\boxed{3½}"),
]  # fmt: skip


@pytest.mark.parametrize(("answer", "response"), RIGHT)
def test_right_answers_are_decided_in_process(answer, response):
    assert grade(answer, response) is True


@pytest.mark.parametrize(("answer", "response"), WRONG)
def test_wrong_answers(answer, response):
    outcome = grade(answer, response)
    assert outcome is False or isinstance(outcome, Question)
    if isinstance(outcome, Question):  # left to the symbolic grader; it may only be one that is no number
        assert parse_number(fold(outcome.answer)) is None or parse_number(fold(answer)) is None
        assert judge(outcome.reference, outcome.answer, outcome.boxed) is False


@pytest.mark.parametrize("text", ["5x", "2 pi", "(3, 4)", "1e5", "x", "", "3 + 4", "1/0", "--3", "1,2", "sqrt 2"])
def test_what_is_no_single_number(text):
    assert parse_number(text) is None


def test_an_expression_is_a_question():
    assert grade("x+1", r"\boxed{1+x}") == Question("x+1", "1+x", boxed=True)
    assert grade("18", r"\boxed{2 \cdot 9}") == Question("18", r"2 \cdot 9", boxed=True)
    assert grade("x+1", "it is $1+x$") == Question("x+1", "it is $1+x$", boxed=False)


@given(st.integers(-(10**12), 10**12), st.integers(0, 4), st.booleans())
def test_any_decimal_is_read_back(n, places, separators):
    text = f"{n / 10**places:,.{places}f}" if separators else f"{n / 10**places:.{places}f}"
    number = parse_number(text)
    assert number is not None
    assert float(number.value) == float(text.replace(",", ""))
    found = last_number(f"from 3 to {text}.")
    assert found is not None
    assert found.value == number.value


@given(st.text(max_size=300))
def test_no_text_makes_a_grade_raise(text):
    for answer in ("18", "x+1"):
        assert isinstance(grade(answer, text), bool | Question)
        assert isinstance(grade(answer, r"\boxed{" + text), bool | Question)


def test_gsm8k_solutions_are_right_and_shuffled_ones_wrong():
    if not GSM8K.exists():
        pytest.skip("GSM8K is not on this machine")
    with gzip.open(GSM8K, "rt") as file:
        solutions = [json.loads(line)["answer"] for line in file]
    answers = [final_answer(s) for s in solutions]
    assert len(solutions) == 1319
    assert all(grade(a, s) is True for a, s in zip(answers, solutions, strict=True))
    shuffled = answers.copy()
    random.Random(0).shuffle(shuffled)
    outcomes = [grade(a, s) for a, s in zip(shuffled, solutions, strict=True)]
    coincidences = [float(a) == float(b) for a, b in zip(shuffled, answers, strict=True)]
    assert outcomes == coincidences
    assert sum(coincidences) < 40


# --- the pool ---


@pytest.fixture(scope="module")
def pool():
    made = GradingPool(PoolConfig())
    yield made
    made.close()


@pytest.mark.parametrize(
    ("reference", "answer", "verdict"),
    [
        ("x+1", "1+x", True), (r"\frac{\sqrt{2}}{2}", r"\frac{1}{\sqrt{2}}", True), ("18", r"2 \cdot 9", True),
        ("x+1", "x-1", False), ("(1,2)", "(2,1)", False), ("x+1", r"\text{none of it}", False), ("18", "{{{", False),
    ],
)  # fmt: skip
def test_the_pool_decides_what_numbers_do_not(pool, reference, answer, verdict):
    assert pool.ask(Question(reference, answer, boxed=True)).result(timeout=30) is verdict


def test_the_pool_reads_an_answer_out_of_a_text(pool):
    assert pool.ask(Question("x+1", "therefore the answer is $1+x$.", boxed=False)).result(timeout=30) is True


def test_hostile_answers_all_come_back_and_stall_nobody(pool):
    """200 of them at once, against a stream of ordinary ones, which all come back right."""
    pool.ask(Question("x", "x+0", boxed=True)).result(timeout=60)  # the pool is warm
    asked = []
    for i in range(200):
        response = HOSTILE[i % len(HOSTILE)]
        for text in (response, r"\boxed{" + response + "}"):
            outcome = grade("5", text)
            if isinstance(outcome, Question):
                asked.append(pool.ask(outcome))
                break
    assert len(asked) > 100
    ordinary = [pool.ask(Question(f"x+{i}", f"{i}+x", boxed=True)) for i in range(100)]
    assert all(future.result(timeout=20) is True for future in ordinary)
    verdicts = [future.result(timeout=20) for future in asked]  # one after the other they would take minutes
    assert not any(verdicts)  # False, or None for one that was given up
    assert any(v is None for v in verdicts)


def test_a_worker_that_hogs_memory_or_dies_counts_as_none_and_is_replaced():
    others = workers_of_this_process()
    pool = GradingPool(PoolConfig(timeout_seconds=300.0, memory_mb=64))
    try:
        assert pool.ask(Question("1", "2", boxed=True)).result(timeout=60) is False
        hog = pool.ask(Question("7", "2^{10^{9}}", boxed=True))
        assert hog.result(timeout=120) is None  # 125 MB, long before the time is over
        pids = workers_of_this_process() - others
        assert len(pids) >= 3
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        assert pool.ask(Question("x+1", "1+x", boxed=True)).result(timeout=60) in (True, None)
        assert pool.ask(Question("x+1", "1+x", boxed=True)).result(timeout=60) is True
    finally:
        pool.close()
    assert_gone(pids)


def workers_of_this_process():
    """The grading processes whose nursery is ours."""
    mine = str(os.getpid())
    found = {}
    for path in pathlib.Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if b"areal_jax.rewards.grader" in (path / "cmdline").read_bytes():
                found[path.name] = (path / "stat").read_text().rsplit(") ", 1)[1].split()[1]
    nurseries = {pid for pid, parent in found.items() if parent == mine}
    return {int(pid) for pid, parent in found.items() if parent in nurseries}


def alive(pid):
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().split(") ")[1][0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def assert_gone(pids):
    """A killed process may take a moment to go."""
    deadline = time.monotonic() + 20
    while any(alive(p) for p in pids):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_closed_pool_answers_nobody_and_leaves_no_process():
    others = workers_of_this_process()
    pool = GradingPool(PoolConfig(timeout_seconds=60.0))
    pool.ask(Question("x+1", "1+x", boxed=True)).result(timeout=60)
    waiting = pool.ask(Question("7", "9^{9^{9^{9}}}", boxed=True))
    time.sleep(0.2)
    pids = workers_of_this_process() - others
    assert len(pids) >= 2
    pool.close()
    pool.close()
    with pytest.raises(BaseException, match="closed"):
        waiting.result(timeout=5)
    with pytest.raises(RuntimeError, match="closed"):
        pool.ask(Question("x", "x", boxed=True))
    assert_gone(pids)


def test_a_grader_that_cannot_start_is_an_error(monkeypatch):
    monkeypatch.setattr("areal_jax.rewards.workers.MAX_NURSERIES", 2)
    monkeypatch.setattr("sys.executable", "/bin/false")
    pool = GradingPool(PoolConfig())
    with pytest.raises(RuntimeError, match="cannot be started"):
        pool.ask(Question("x", "x", boxed=True)).result(timeout=30)


def test_what_goes_into_the_second_line():
    ordinary = (r"\frac{\sqrt{2}}{2}", "(1,2)", "x^2+1", "2^{10}", "5!", r"\binom{5}{2}", r"(-\infty, 3]", "**5**")
    assert not any(looks_hostile(Question("1", a, True)) for a in ordinary)
    assert all(looks_hostile(Question("1", a, True)) for a in ("9^{9^{9}}", "100!", "(" * 11, "2^{1000}", "1" * 40))


def test_what_hangs_without_looking_like_it_gives_way():
    """Expansions that no screen sees: ordinary questions behind them, and honest ones that are screened, come back."""
    pool = GradingPool(PoolConfig(timeout_seconds=8.0))
    hangs = [pool.ask(Question("7", f"(a+b+c+d+e)^{{{n}}}+(a-b-c-d-e)^{{{n}}}", True)) for n in range(60, 68)]
    hangs += [pool.ask(Question("7", "9^{9^{9^{9}}}", True)) for _ in range(3)]
    honest = [pool.ask(Question("120", "(3+2)!", True)) for _ in range(10)]
    assert all(looks_hostile(Question("120", "(3+2)!", True)) for _ in honest)
    assert pool.ask(Question("x+1", "1+x", boxed=True)).result(timeout=60) is True
    assert [f.result(timeout=60) for f in honest] == [True] * 10
    pool.close()  # what hangs is not waited for
    assert sum(f.done() and f.exception() is not None for f in hangs) > 0


def test_limits_on_this_machine_do_not_stop_grading(tmp_path):
    """Under a limit on processor time, and with a long directory for temporary files."""
    long = tmp_path / ("x" * 100)
    long.mkdir()
    code = (
        "from areal_jax.rewards.pool import *\n"
        "pool = GradingPool(PoolConfig())\n"
        "print(pool.ask(Question('x+1', '1+x', True)).result(timeout=60))\npool.close()"
    )
    done = subprocess.run(
        ["bash", "-c", 'ulimit -t 3600; exec "$0" -c "$1"', sys.executable, code],
        cwd=ROOT, env=environment(TMPDIR=str(long)), capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.stdout == "True\n", done.stderr
    assert list(long.iterdir()) == []


def test_text_is_compared_letter_by_letter():
    for answer, response, verdict in [
        ("a b", r"so \boxed{a  b}", True), ("a b", "it is\na b", True), ("ab", "ba", False), ("ab", "", False),
        ("Ab", "#### Ab", True), ("ab", "#### Ab", False), ("1 2", r"\boxed{2 1}", False),
    ]:  # fmt: skip
        assert text_answer(prompt(answer), response, "stop") is verdict


# --- from a completion to a reward ---


class Characters:
    def decode(self, tokens, skip_special_tokens):
        return "".join(map(chr, tokens))


def completion(text, finish_reason="stop"):
    tokens = np.array([1, *map(ord, text)], np.int32)
    drawn = np.arange(len(tokens)) > 0
    return Completion(
        Request(3, tokens[:1], 50, 1.0), tokens, np.where(drawn, -1.0, 0.0), np.where(drawn, 0, -1), finish_reason
    )


def test_verdicts_become_rewards_and_truncated_ones_are_wrong():
    grader = Grader(SingleTurn(math_answer), Characters(), GradingConfig(5.0, -5.0))
    lenient = Grader(SingleTurn(math_answer), Characters(), GradingConfig(5.0, -5.0, grade_truncated=True))
    try:
        for text, reason, strict, loose in [
            ("is 7", "stop", 5.0, 5.0), ("is 8", "stop", -5.0, -5.0), ("is 7", "length", -5.0, 5.0),
            (r"\boxed{3+4}", "stop", 5.0, 5.0), (r"\boxed{3+4}", "length", -5.0, 5.0),
        ]:  # fmt: skip
            for each, reward in ((grader, strict), (lenient, loose)):
                trajectory, timed_out = each(prompt("7"), completion(text, reason), False).result()
                assert (trajectory.reward, timed_out) == (reward, False)
    finally:
        grader.close()
        lenient.close()


def test_a_grade_that_times_out_is_counted_and_wrong():
    grader = Grader(SingleTurn(math_answer), Characters(), GradingConfig(pool=PoolConfig(timeout_seconds=0.3)))
    try:
        grader(prompt("x+7"), completion(r"\boxed{7+x}"), False).result()  # warm
        grading = grader(prompt("7"), completion(r"\boxed{9^{9^{9^{9}}}}"), False)
        assert not grading.done()
        trajectory, timed_out = grading.result()
        assert (trajectory.reward, timed_out) == (0.0, True)
    finally:
        grader.close()


def test_a_number_is_taken_as_it_is():
    grader = Grader(SingleTurn(lambda *_: 0.25), Characters(), GradingConfig(5.0, -5.0))
    assert grader(prompt("7"), completion("x", "length"), False).result()[0].reward == 0.25
    with pytest.raises(ValueError, match="expected a finite number"):
        Grader(SingleTurn(lambda *_: float("nan")), Characters())(prompt("7"), completion("x"), False)
