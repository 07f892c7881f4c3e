"""The embedded task: column addition of two n-digit numbers, generated, with no download.

A problem `347+586=` has a worked solution, one step per column from the right (digit + digit + carry = sum; the last
column written with two digits), and a short direct answer:

    worked   7+6+0=13;4+8+1=13;3+5+1=09#933
    direct   #933

n follows a truncated geometric law from 2 to 6, so that lengths have a tail. A second, smaller task is for models that
can already read: all sums of two two-digit numbers, as `34 + 58`, with the same splits.

Which split a problem belongs to is a function of its unordered pair of operands: train, validation and test are
disjoint by construction, `a+b` and `b+a` included.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow_datasets as tfds

from areal_jax.data.exclusive import exclusive
from areal_jax.types import UserError

MIN_DIGITS, MAX_DIGITS, GEOMETRIC_P = 2, 6, 0.2
SPLIT_SIZES = {"train": 20_000, "validation": 400, "test": 600}
TASKS = ("arithmetic", "two_digit_addition")
ALPHABET = "0123456789+=;#"
DATASET_SEED = 20_250_524  # of the generator; a run's seed only orders the problems
VERSION = "1.0.0"


def worked_solution(a: int, b: int) -> str:
    """The steps and the answer, e.g. (347, 586) -> '7+6+0=13;4+8+1=13;3+5+1=09#933'."""
    carry, steps = 0, []
    for x, y in zip(str(a)[::-1], str(b)[::-1], strict=True):
        total = int(x) + int(y) + carry
        steps.append(f"{x}+{y}+{carry}={total:02d}")
        carry = total // 10
    return ";".join(steps) + direct_answer(a, b)


def direct_answer(a: int, b: int) -> str:
    """The answer alone, e.g. (347, 586) -> '#933'."""
    return f"#{a + b}"


def split_of(a: int, b: int) -> str:
    """The one split that may contain a + b: about 80 % train, 10 % validation, 10 % test."""
    low, high = min(a, b), max(a, b)
    bucket = hashlib.blake2b(f"{low}+{high}".encode(), digest_size=4).digest()[0] % 10
    return {0: "test", 1: "validation"}.get(bucket, "train")


def draw_problem(rng: np.random.Generator) -> tuple[int, int]:
    """Two numbers of n digits each; P(n) proportional to (1 - p)^(n - 2) for n = 2 ... 6."""
    digits = np.arange(MIN_DIGITS, MAX_DIGITS + 1)
    weights = (1 - GEOMETRIC_P) ** (digits - MIN_DIGITS)
    n = int(rng.choice(digits, p=weights / weights.sum()))
    a, b = rng.integers(10 ** (n - 1), 10**n, size=2)
    return int(a), int(b)


def generate(split: str) -> Iterator[dict[str, Any]]:
    """The problems of a split, always the same ones; no two with the same operands."""
    rng = np.random.default_rng([DATASET_SEED, sorted(SPLIT_SIZES).index(split)])
    seen: set[tuple[int, int]] = set()
    while len(seen) < SPLIT_SIZES[split]:
        a, b = draw_problem(rng)
        if split_of(a, b) != split or (a, b) in seen or (b, a) in seen:
            # two-digit train problems run out after 3,276 pairs: repeats are dropped, not the draw's law bent
            continue
        seen.add((a, b))
        yield {
            "prompt": f"{a}+{b}=",
            "worked": worked_solution(a, b),
            "direct": direct_answer(a, b),
            "answer": str(a + b),
        }


def two_digit_sums(split: str) -> Iterator[dict[str, Any]]:
    """Every unordered pair of two-digit numbers of the split, once, shuffled."""
    pairs = [(a, b) for a in range(10, 100) for b in range(a, 100) if split_of(a, b) == split]
    rng = np.random.default_rng([DATASET_SEED, sorted(SPLIT_SIZES).index(split), 2])
    for index in rng.permutation(len(pairs)):
        a, b = pairs[index][:: 1 if rng.random() < 0.5 else -1]
        answer = str(a + b)
        yield {"prompt": f"{a} + {b}", "worked": worked_solution(a, b), "direct": answer, "answer": answer}


class ArealArithmetic(tfds.core.GeneratorBasedBuilder):
    """Both tasks (see the module's docstring)."""

    VERSION = tfds.core.Version(VERSION)
    BUILDER_CONFIGS = [tfds.core.BuilderConfig(name=name) for name in TASKS]  # noqa: RUF012 - the library's form

    def _info(self) -> tfds.core.DatasetInfo:
        fields = dict.fromkeys(("prompt", "worked", "direct", "answer"), tfds.features.Text())
        return tfds.core.DatasetInfo(builder=self, features=tfds.features.FeaturesDict(fields))

    def _split_generators(self, dl_manager: Any) -> dict[str, Any]:
        return {split: self._generate_examples(split) for split in SPLIT_SIZES}

    def _generate_examples(self, split: str) -> Iterator[tuple[int, dict[str, Any]]]:
        problems = generate if self.builder_config.name == "arithmetic" else two_digit_sums
        yield from enumerate(problems(split))


def load(split: str, cache_dir: pathlib.Path, task: str = "arithmetic") -> Sequence[dict[str, Any]]:
    """The split of a task of TASKS as a random-access source over array_record files, written on first use.

    Raises UserError when the files are damaged, naming the directory to delete.
    """
    directory = cache_dir / "tfds"
    tfds.disable_progress_bar()
    try:
        # it prints that it downloads, which it does not; a builder knows what is there when it is made
        with exclusive(directory), contextlib.redirect_stdout(io.StringIO()):
            builder = ArealArithmetic(config=task, data_dir=str(directory), file_format="array_record")
            builder.download_and_prepare()
        source = builder.as_data_source(split=split)
        written = builder.info.splits[split].num_examples
        if len(source) != written:
            raise ValueError(f"{len(source)} records where {written} were written")
        for index in (0, len(source) - 1):
            source[index]
    except (ValueError, RuntimeError, IndexError, OSError) as error:
        raise UserError(
            f"the dataset under {directory} cannot be read ({error}); delete that directory and it will be "
            "generated again"
        ) from error
    return source
