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

    def close(self) -> None:
        self._file.close()
        self._events.close()


def read_metrics(workdir: pathlib.Path) -> list[Record]:
    """The records of a run; [] before its first."""
    path = workdir / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def truncate_metrics(workdir: pathlib.Path, version: int) -> None:
    """Takes out the steps and evaluations after `version`: a resumed run makes them again."""
    kept = [r for r in read_metrics(workdir) if r.get("version", 0) <= version]
    replace_text(workdir / "metrics.jsonl", "".join(json.dumps(r) + "\n" for r in kept))


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
