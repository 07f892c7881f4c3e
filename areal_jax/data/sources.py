"""Where problems come from: every data set as a random-access sequence of records with the same three fields.

    prompt    the question
    answer    the reference answer that the reward compares with
    solution  the reference text that leads to it (few-shot examples show it); the answer where there is none

The embedded task's records carry `worked` and `direct` besides, for its warm start.
"""

from __future__ import annotations

import dataclasses
import gzip
import hashlib
import json
import logging
import pathlib
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from areal_jax.answers import final_answer
from areal_jax.data import arithmetic
from areal_jax.data.exclusive import exclusive
from areal_jax.types import UserError

log = logging.getLogger(__name__)

Record = dict[str, str]
Source = Sequence[Record]
BUCKETS = 1000  # of questions, for splits by hash


@dataclasses.dataclass(frozen=True)
class SourceConfig:
    """The keys of `config.data` that say which problems there are."""

    name: str
    """arithmetic | two_digit_addition | jsonl | tfds/NAME | reasoning_gym/TASK."""
    path: str = ""
    heldout_path: str = ""
    question_key: str = "question"
    answer_key: str = "answer"
    train_split: str = "train"
    validation_split: str = "validation"
    test_split: str = "test"
    test_fraction: float = 0.0
    validation_fraction: float = 0.0
    cache_dir: pathlib.Path = pathlib.Path()


def open_source(config: SourceConfig, split: str) -> Source:
    """The problems of 'train', 'validation' or 'test'. Raises UserError for what is not there or not readable."""
    kind = config.name.partition("/")[0]
    if kind not in SOURCES:
        raise UserError(f"data.name is {config.name!r}; expected one of {', '.join(FORMS)}")
    source = SOURCES[kind](config, split)
    if not len(source):
        raise UserError(f"data.name {config.name!r} has no problems in the split {split!r}")
    return source


@dataclasses.dataclass(frozen=True)
class Mapped(Sequence[Record]):
    """A source seen through a function of its records, from `start` on."""

    source: Sequence[Any]
    function: Callable[[Any], Record]
    start: int = 0

    def __len__(self) -> int:
        return max(0, len(self.source) - self.start)

    def __getitem__(self, index: Any) -> Any:
        if not 0 <= index < len(self):
            raise IndexError(index)
        return self.function(self.source[self.start + index])


def without_first(source: Source, count: int) -> Source:
    """The source without its first records (which serve as examples)."""
    return Mapped(source, dict, count) if count else source


# --- the kinds ---


def _embedded(config: SourceConfig, split: str) -> Source:
    def record(raw: dict[str, bytes]) -> Record:
        fields = {k: v.decode() for k, v in raw.items()}
        return fields | {"solution": fields["worked"]}

    return Mapped(arithmetic.load(split, config.cache_dir, config.name), record)


def _jsonl(config: SourceConfig, split: str) -> Source:
    if not config.path:
        raise UserError("data.name is 'jsonl' and data.path is empty: set it to a .jsonl or .jsonl.gz file")
    if split == "test" and config.heldout_path:
        return read_jsonl(pathlib.Path(config.heldout_path), config)
    test = 0.0 if config.heldout_path else config.test_fraction
    share = {"test": test, "validation": config.validation_fraction}
    if split != "train" and share[split] == 0.0:
        raise UserError(
            f"there is no {split} split: data.{split}_fraction is 0"
            + (" and data.heldout_path is empty: set one of them" if split == "test" else ": set it")
        )
    bounds = {"test": (0.0, test), "validation": (test, test + config.validation_fraction)}
    low, high = (BUCKETS * b for b in bounds.get(split, (test + config.validation_fraction, 1.0)))
    records = read_jsonl(pathlib.Path(config.path), config)
    chosen = [r for r in records if low <= _bucket(r["prompt"]) < high]
    if not config.heldout_path:
        return chosen
    held_out = {_bare(r["prompt"]) for r in read_jsonl(pathlib.Path(config.heldout_path), config)}
    left = [r for r in chosen if _bare(r["prompt"]) not in held_out]
    if len(left) < len(chosen):
        log.warning("%s: %d problems are in data.heldout_path too and left out", config.path, len(chosen) - len(left))
    return left


def _bare(question: str) -> str:
    """A question as far as it matters whether two are the same."""
    return " ".join(question.split()).lower()


def _bucket(question: str) -> int:
    """0 to BUCKETS - 1, by content: a question that occurs twice is in one split only."""
    return int.from_bytes(hashlib.blake2b(_bare(question).encode(), digest_size=8).digest()) % BUCKETS


def read_jsonl(path: pathlib.Path, config: SourceConfig) -> list[Record]:
    """All records of a JSON-lines file, gzipped if its name ends in .gz.

    Raises UserError naming the file and the line that is broken or lacks a key.
    """
    path = path.expanduser()
    records = []
    for number, line in _lines(path):
        try:
            raw = json.loads(line)
        except ValueError as error:
            raise UserError(f"{path}, line {number}: no JSON ({error}); mend or remove the line") from error
        if not isinstance(raw, dict):
            raise UserError(f"{path}, line {number}: {type(raw).__name__} where an object was expected")
        values = []
        for option, key in (("question_key", config.question_key), ("answer_key", config.answer_key)):
            value = raw.get(key)
            if isinstance(value, bool) or not isinstance(value, str | int | float) or value == "":
                raise UserError(
                    f"{path}, line {number}: {key!r} is {value!r}; expected text or a number. The keys there are "
                    f"{sorted(raw)}: see data.{option}"
                )
            values.append(str(value))
        record = _question(*values)
        if not record["answer"]:
            raise UserError(f"{path}, line {number}: the answer {values[1][-60:]!r} ends in an empty '####' or \\boxed")
        records.append(record)
    return records


def _lines(path: pathlib.Path) -> Iterator[tuple[int, str]]:
    """(number from 1, text) of the lines that are not blank."""
    number = 0
    try:
        with gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield number, line
    except (OSError, EOFError, UnicodeDecodeError, zlib.error) as error:
        raise UserError(f"{path} cannot be read after line {number}: {error}") from error


def _question(question: str, solution: str) -> Record:
    return {"prompt": question, "answer": final_answer(solution), "solution": solution}


def _tfds(config: SourceConfig, split: str) -> Source:
    import tensorflow_datasets as tfds
    import tensorflow_datasets.text  # registers the text data sets, GSM8K among them

    name = config.name.removeprefix("tfds/")
    wanted = {"train": config.train_split, "validation": config.validation_split, "test": config.test_split}[split]
    try:
        with exclusive(config.cache_dir / "tfds"):
            builder = tfds.builder(name, data_dir=str(config.cache_dir / "tfds"), file_format="array_record")
            builder.download_and_prepare()
        source = builder.as_data_source(split=wanted)
    except (tfds.core.registered.DatasetNotFoundError, ValueError, OSError, NotImplementedError) as error:
        reason = "no such data set" if isinstance(error, tfds.core.registered.DatasetNotFoundError) else str(error)
        raise UserError(
            f"tensorflow-datasets cannot give {name!r}, split {wanted!r} (data.{split}_split): {reason}"
        ) from error
    missing = [k for k in (config.question_key, config.answer_key) if k not in builder.info.features]
    if missing:
        raise UserError(
            f"the data set {name!r} has no {missing[0]!r}; it has {sorted(builder.info.features)}: set "
            "data.question_key and data.answer_key"
        )

    def text(value: Any) -> str:
        return value.decode() if isinstance(value, bytes) else str(value)

    return Mapped(source, lambda raw: _question(text(raw[config.question_key]), text(raw[config.answer_key])))


GENERATED = {"test": (1_000, 0), "validation": (500, 10**7), "train": (20_000, 2 * 10**7)}
"""Split of a reasoning-gym task -> (problems, seed). Item i is drawn with seed + i, so the seeds lie far apart; small
tasks repeat themselves all the same, and a split leaves out what those before it ask."""


def _reasoning_gym(config: SourceConfig, split: str) -> Source:
    task, names = config.name.removeprefix("reasoning_gym/"), list(GENERATED)
    earlier = {r["prompt"] for name in names[: names.index(split)] for r in _generated(task, name)}
    return [r for r in _generated(task, split) if r["prompt"] not in earlier]


def _generated(task: str, split: str) -> list[Record]:
    try:
        import reasoning_gym
    except ImportError as error:
        raise UserError(
            f"data.name is 'reasoning_gym/{task}' and reasoning-gym is not installed: pip install -r "
            "requirements-extra.txt"
        ) from error
    size, seed = GENERATED[split]
    try:
        made = reasoning_gym.create_dataset(task, size=size, seed=seed)
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"reasoning-gym has no task {task!r} that can be made: {error}") from error
    return [
        {"prompt": entry["question"], "answer": str(entry["answer"]), "solution": str(entry["answer"])}
        for entry in made
        if entry["answer"] is not None
    ]


SOURCES: dict[str, Callable[[SourceConfig, str], Source]] = {
    "arithmetic": _embedded,
    "two_digit_addition": _embedded,
    "jsonl": _jsonl,
    "tfds": _tfds,
    "reasoning_gym": _reasoning_gym,
}
"""kind -> (config, split) -> problems. The kind is data.name up to its first '/'."""

FORMS = ("arithmetic", "two_digit_addition", "jsonl", "tfds/NAME", "reasoning_gym/TASK")
