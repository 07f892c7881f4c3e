"""Grading: does it judge GSM8K's own solutions rightly, what does a grade cost, and can hostile answers stall it?

    python -m experiments.grading --gsm8k test.jsonl.gz

The attack: 200 answers made to hang, exhaust or confuse a grader are asked all at once while ordinary answers (numbers,
decided in process; expressions, decided in the pool) are graded one after another. Rounds with and without the attack
take turns.
"""

from __future__ import annotations

import argparse
import pathlib
import random
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from areal_jax.data.sources import SourceConfig, read_jsonl
from areal_jax.rewards.math import Question, math_answer
from areal_jax.rewards.pool import GradingPool, PoolConfig
from areal_jax.types import Prompt
from experiments import common

HOSTILE = (
    "9^{9^{9^{9}}}",
    "10^{10^{10}}",
    "2^{10^9}",
    "99999999!",
    "(10^8)!",
    "2**" * 200 + "2",
    "(" * 500 + "1" + ")" * 500,
    "\\left(" * 200,
    r"\frac{" * 300,
    r"\sqrt{" * 150 + "2" + "}" * 150,
    r"\sum_{n=1}^{10^9} n^n",
    r"\int e^{x^2} \sin(x^x) dx",
    r"\binom{10^7}{5\cdot 10^6}",
    r"\begin{pmatrix}" + "1&" * 500,
    "x^" * 300 + "x",
    "".join(f"x_{{{i}}}+" for i in range(300)),
    "x" * 2000,
    "1e999999999",
    "0." + "3" * 900,
    "7" * 100_000,
    "-" * 1000 + "1",
    "junk " * 200_000,
    "\uff3c\uff42\uff4f\uff58\uff45\uff44" + "\u202e" * 50 + "9",
    r"\boxed{7",
    r"\boxed{7}" * 300,
)
"""Towers of powers, factorials, deep nesting, megabytes of junk, odd unicode, boxes unclosed and repeated."""
ATTACK = 200


def outcome_of(reference: str, response: str) -> bool | Question:
    return math_answer(Prompt(0, np.zeros(1, np.int32), "", reference), response, "stop")


def verdict_of(pool: GradingPool, reference: str, response: str) -> bool | None:
    """The verdict, waited for."""
    outcome = outcome_of(reference, response)
    return pool.ask(outcome).result() if isinstance(outcome, Question) else outcome


def attack(pool: GradingPool) -> tuple[list[float], int]:
    """Asks all hostile answers at once. Returns the list that their seconds are put into, and how many there are."""
    seconds: list[float] = []

    def ask(question: Question) -> None:
        began = time.monotonic()
        pool.ask(question).add_done_callback(lambda _: seconds.append(time.monotonic() - began))

    for i in range(ATTACK):
        response = r"\boxed{" + HOSTILE[i % len(HOSTILE)] + "}"
        began = time.monotonic()
        outcome = outcome_of("5", response)
        if isinstance(outcome, Question):
            ask(outcome)
        else:
            seconds.append(time.monotonic() - began)
    return seconds, ATTACK


ORDINARY: dict[str, Callable[[GradingPool, int], bool | None]] = {
    "numbers": lambda pool, i: verdict_of(pool, str(i), f"3 of them cost {i} dollars."),
    "expressions": lambda pool, i: verdict_of(pool, f"x+{i}", rf"\boxed{{{i}+x}}"),
}


def throughput(pool: GradingPool, kind: str, seconds: float) -> float:
    """Ordinary grades per second, one after another. Raises RuntimeError if one is wrong."""
    began, count = time.monotonic(), 0
    while time.monotonic() - began < seconds:
        if ORDINARY[kind](pool, count) is not True:
            raise RuntimeError(f"an ordinary answer was graded as wrong: {kind} {count}")
        count += 1
    return count / (time.monotonic() - began)


def measure_attack(rounds: int) -> tuple[list[dict[str, Any]], list[float]]:
    """Per kind and round, grades a second with and without the attack; and the seconds of every hostile answer."""
    rows, latencies = [], []
    pool = GradingPool(PoolConfig())
    try:
        verdict_of(pool, "x+1", r"\boxed{1+x}")
        for i in range(rounds):
            for kind in ORDINARY:
                without = throughput(pool, kind, 2.0)
                seconds, count = attack(pool)
                during = throughput(pool, kind, 2.0)
                while len(seconds) < count:
                    time.sleep(0.01)
                time.sleep(1.0)  # the pool has its workers back
                latencies += seconds
                rows.append({"round": i, "kind": kind, "without": without, "during": during, "ratio": during / without})
                print(rows[-1], f"slowest hostile answer {max(seconds):.2f} s", flush=True)
    finally:
        pool.close()
    return rows, latencies


def measure_gsm8k(path: pathlib.Path) -> dict[str, Any]:
    """How many reference solutions grade as right, and how many as right against shuffled answers."""
    records = read_jsonl(path, SourceConfig("jsonl"))
    began = time.perf_counter()
    right = sum(outcome_of(r["answer"], r["solution"]) is True for r in records)
    seconds = time.perf_counter() - began
    shuffled = [r["answer"] for r in records]
    random.Random(0).shuffle(shuffled)
    accepted = [outcome_of(a, r["solution"]) is True for a, r in zip(shuffled, records, strict=True)]
    equal = [float(a) == float(r["answer"]) for a, r in zip(shuffled, records, strict=True)]
    return {
        "solutions": len(records),
        "graded as right": right,
        "right against shuffled answers": sum(accepted),
        "of these, truly equal": sum(a and e for a, e in zip(accepted, equal, strict=True)),
        "microseconds a grade": round(1e6 * seconds / len(records), 1),
    }


def main() -> None:
    cli = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cli.add_argument("--output", type=pathlib.Path, default=common.RESULTS / "grading")
    cli.add_argument("--rounds", type=int, default=5)
    cli.add_argument("--gsm8k", type=pathlib.Path, help="GSM8K's test problems in JSON lines; left out if not given")
    options = cli.parse_args()
    rows, latencies = measure_attack(options.rounds)
    common.write_csv(options.output / "runs.csv", rows)
    lines = []
    if options.gsm8k:
        lines += ["GSM8K's reference solutions:", "", common.markdown_table([measure_gsm8k(options.gsm8k)]), ""]
    for kind in ORDINARY:
        mine = [r for r in rows if r["kind"] == kind]
        low, high = min(r["ratio"] for r in mine), max(r["ratio"] for r in mine)
        lines.append(
            f"- {kind}: {statistics.median(r['without'] for r in mine):,.0f} grades/s without the attack, "
            f"{statistics.median(r['during'] for r in mine):,.0f} during it; ratio within a round "
            f"{statistics.median(r['ratio'] for r in mine):.2f} (least {low:.2f}, most {high:.2f})."
        )
    lines.append(
        f"- hostile answers, {ATTACK} at once, {len(latencies)} in all: from asking to verdict median "
        f"{statistics.median(latencies):.2f} s, slowest {max(latencies):.2f} s."
    )
    common.write_report(
        options.output, "Grading", "python -m experiments.grading --gsm8k test.jsonl.gz", "\n".join(lines)
    )


if __name__ == "__main__":
    main()
