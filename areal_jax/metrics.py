"""Records of a run and where they go: `metrics.jsonl`, TensorBoard, the terminal.

A record is a flat dict with a "kind": stage, progress, step, evaluation, warning, done, failure. Names of measurements
are `area/name`.
"""

from __future__ import annotations

import json
import pathlib
from collections.abc import Callable, Iterable
from typing import Any

Record = dict[str, Any]
Emit = Callable[[Record], None]

STORED = ("progress", "step", "evaluation", "warning")
"""Kinds that go into metrics.jsonl."""


class MetricsFile:
    """Appends records to `metrics.jsonl` and their numbers to TensorBoard events under `tensorboard/`."""

    def __init__(self, workdir: pathlib.Path):
        from tensorboardX import SummaryWriter

        self._file = open(workdir / "metrics.jsonl", "a", buffering=1)  # noqa: SIM115 - lives as long as the run
        self._events = SummaryWriter(str(workdir / "tensorboard"), flush_secs=10)

    def write(self, record: Record) -> None:
        if record["kind"] not in STORED:
            return
        self._file.write(json.dumps(record) + "\n")
        if record["kind"] in ("step", "evaluation"):
            for name, value in record.items():
                if "/" in name and isinstance(value, int | float):
                    self._events.add_scalar(name, value, record["version"])
                if isinstance(value, list) and name.endswith("/hist"):
                    self._write_histogram(name, value, record["version"])

    def _write_histogram(self, name: str, counts: list[int], version: int) -> None:
        """counts: how many of 0, 1, 2, ..."""
        numbers = range(len(counts))
        self._events.add_histogram_raw(
            name,
            min=min((i for i in numbers if counts[i]), default=0),
            max=max((i for i in numbers if counts[i]), default=0),
            num=sum(counts),
            sum=sum(i * c for i, c in enumerate(counts)),
            sum_squares=sum(i * i * c for i, c in enumerate(counts)),
            bucket_limits=[i + 0.5 for i in numbers],
            bucket_counts=counts,
            global_step=version,
        )

    def close(self) -> None:
        self._file.close()
        self._events.close()


def read_metrics(workdir: pathlib.Path) -> list[Record]:
    """The records of a run; [] before its first."""
    return read_lines(workdir / "metrics.jsonl")


def read_lines(path: pathlib.Path) -> list[Record]:
    """The records of a JSON-lines file; one cut short by a crash, which can only be the last, is left out."""
    records: list[Record] = []
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return records


def clear_metrics(workdir: pathlib.Path) -> None:
    """For a run from the beginning."""
    for name in ("metrics.jsonl", "samples.jsonl", "timeline.jsonl"):
        replace_text(workdir / name, "")


def truncate_metrics(workdir: pathlib.Path, version: int) -> None:
    """Takes out the steps, evaluations and transcripts after `version`: a resumed run makes them again."""
    for name, key, last in (
        ("metrics.jsonl", "version", version),
        ("timeline.jsonl", "version", version),
        ("samples.jsonl", "trained_at", version - 1),
    ):
        kept = [r for r in read_lines(workdir / name) if r.get(key, 0) <= last]
        replace_text(workdir / name, "".join(json.dumps(r) + "\n" for r in kept))


def replace_text(path: pathlib.Path, text: str) -> None:
    """Writes a file whole or not at all."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(text)
    temporary.replace(path)


def fan_out(sinks: Iterable[Emit]) -> Emit:
    """One emit that calls all."""
    listed = list(sinks)

    def emit(record: Record) -> None:
        for sink in listed:
            sink(record)

    return emit
