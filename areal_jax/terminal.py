"""What a person sees while a run goes on: a live table in a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from typing import Any

from areal_jax.metrics import Record


class PlainView:
    """One line per event."""

    def __init__(self) -> None:
        self._started = time.monotonic()

    def __call__(self, record: Record) -> None:
        line = describe(record)
        if line:
            print(f"[{time.monotonic() - self._started:6.1f} s] {line}", flush=True)

    def close(self) -> None:
        pass


class LiveView:
    """A table that is drawn anew in place, with the last events above it."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.live import Live

        self._stage = "starting"
        self._step: Record = {}
        self._evaluation: Record = {}
        self._live = Live(self._table(), console=Console(), refresh_per_second=4, transient=True)
        self._live.start()

    def __call__(self, record: Record) -> None:
        kind = record["kind"]
        if kind == "stage":
            self._stage = record["text"]
        elif kind == "progress":
            self._stage = describe(record)
        elif kind == "step":
            self._stage, self._step = "RL", record
        elif kind == "evaluation":
            self._evaluation = record
        if kind in ("evaluation", "warning", "stage"):
            self._live.console.print(describe(record), highlight=False)
        self._live.update(self._table())

    def close(self) -> None:
        self._live.stop()

    def _table(self) -> Any:
        from rich.table import Table

        table = Table(title="areal_jax", show_header=False, min_width=64)
        table.add_row("stage", self._stage)
        s, e = self._step, self._evaluation
        if e:
            table.add_row("held-out accuracy", _evaluation_line(e))
        if s:
            table.add_row("step", f"{s['version']} / {s['steps']}, about {_clock(s['seconds_left'])} left")
            table.add_row("reward", f"{s['reward/mean']:.3f}")
            table.add_row("response length", f"{s['length/mean']:.1f} tokens")
            table.add_row("staleness", f"mean {s['staleness/token_mean']:.2f}, max {s['staleness/token_max']:.0f}")
            table.add_row("queue", f"{s['queue/occupancy']} of {s['queue/capacity']} samples")
            table.add_row("trained tokens/s", f"{s['throughput/trained_tokens_per_second']:,.0f}")
            table.add_row("busy", f"trainer {s['busy/trainer']:.0%}, samplers {s['busy/sampler']:.0%}")
        return table


def make_view() -> PlainView | LiveView:
    return LiveView() if sys.stdout.isatty() else PlainView()


def describe(r: Record) -> str:
    """A record in one line; '' for kinds that are not shown."""
    kind = r["kind"]
    if kind == "stage":
        return str(r["text"])
    if kind == "progress":
        extra = f", validation accuracy {r['validation_accuracy']:.2f}" if "validation_accuracy" in r else ""
        return f"warm start, {r['stage']}: {r['done']} of at most {r['total']} updates, loss {r['loss']:.3f}{extra}"
    if kind == "step":
        return (
            f"step {r['version']}/{r['steps']}  reward {r['reward/mean']:.3f}  length {r['length/mean']:.1f}  "
            f"staleness {r['staleness/token_mean']:.2f} (max {r['staleness/token_max']:.0f})  "
            f"queue {r['queue/occupancy']}/{r['queue/capacity']}  "
            f"{r['throughput/trained_tokens_per_second']:,.0f} tok/s  "
            f"busy {r['busy/trainer']:.0%}/{r['busy/sampler']:.0%}  left {_clock(r['seconds_left'])}"
        )
    if kind == "evaluation":
        return f"held-out accuracy at version {r['version']}: {_evaluation_line(r)}"
    if kind == "warning":
        return f"warning: {r['text']}"
    return ""


def _evaluation_line(r: Record) -> str:
    return (
        f"{r['heldout/sampled_accuracy']:.3f} ± {r['heldout/sampled_standard_error']:.3f} sampled, "
        f"{r['heldout/greedy_accuracy']:.3f} greedy (version {r['version']})"
    )


def _clock(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"
