"""Turns what happens in the training loop into records, transcripts and the summary."""

from __future__ import annotations

import json
import pathlib
import time
from collections.abc import Sequence
from typing import Any

import ml_collections
import numpy as np

from areal_jax import report
from areal_jax.evaluate import accuracy, mean_length
from areal_jax.metrics import Emit, Record, read_metrics
from areal_jax.rl import diagnostics
from areal_jax.rollout.coordinator import Coordinator
from areal_jax.rollout.evaluation import Evaluation
from areal_jax.rollout.leases import BusySpan
from areal_jax.transport.messages import SamplerStats
from areal_jax.types import Prompt, Trajectory

EXAMPLES = 3  # held-out problems shown with their answers
TRANSCRIPTS = 2  # samples of each batch that go into samples.jsonl
PRESSED_STEPS = 10  # steps in a row with a full or an empty queue before a warning


class Recorder:
    """Follows one run. `begin` starts the clock of RL."""

    def __init__(
        self,
        config: ml_collections.ConfigDict,
        workdir: pathlib.Path,
        tokenizer: Any,
        held_out: Sequence[Prompt],
        coordinator: Coordinator,
        emit: Emit,
    ):
        self._workdir, self._tokenizer, self._held_out = workdir, tokenizer, held_out
        self._coordinator, self._emit = coordinator, emit
        self._steps, self._temperature = config.trainer.steps, config.evaluation.temperature
        self._watch = _QueueWatch(config.rollout.queue_capacity, config.rollout.max_staleness == 0)
        self._launched = time.monotonic()
        self._previous: dict[str, SamplerStats] = {}
        self._samples, self._timeline = (
            open(workdir / name, "a", buffering=1)  # noqa: SIM115 - live as long as the run
            for name in ("samples.jsonl", "timeline.jsonl")
        )
        earlier = [r["seconds"] for r in read_metrics(workdir) if "seconds" in r]
        self._offset = max(earlier, default=0.0)  # of a resumed run

    def begin(self) -> None:
        self._began = self._last = time.monotonic()
        self._waited = self._waited_total = 0.0
        self._done = 0

    def seconds(self) -> float:
        """Of RL so far, earlier parts of a resumed run included."""
        return self._offset + time.monotonic() - self._began

    def has_evaluated(self, version: int) -> bool:
        """Whether the version's measurement is recorded (by an earlier part of a resumed run)."""
        return any(r["kind"] == "evaluation" and r["version"] == version for r in read_metrics(self._workdir))

    def waiting(self) -> None:
        """The trainer has nothing left to do but wait for a batch."""
        self._waiting_from = time.monotonic()

    def batch_arrived(self) -> None:
        """The trainer stops waiting."""
        self._waited = time.monotonic() - self._waiting_from
        self._waited_total += self._waited

    def step(self, version: int, batch: Sequence[Trajectory], named: dict[str, Any]) -> None:
        """One training step is done and published."""
        now = time.monotonic()
        took = now - self._last
        occupancy = self._coordinator.occupancy()
        spans, started_ahead = self._coordinator.activity()
        self._done += 1
        record: Record = {
            "kind": "step",
            "version": version,
            "steps": self._steps,
            "seconds": self.seconds(),
            "seconds_left": (now - self._began) / self._done * (self._steps - version),
            **named,
            **diagnostics.batch_metrics(batch),
            "staleness/started_ahead": started_ahead,
            "reward/timeouts": sum(s.grading_timeouts for s in self._coordinator.sampler_stats().values()),
            "queue/occupancy": occupancy,
            "queue/capacity": self._watch.capacity,
            "queue/duplicates": self._coordinator.duplicates,
            "busy/trainer": 1.0 - self._waited / took,
            **self._sampler_metrics(),
            "throughput/trained_tokens_per_second": named["tokens/trained"] / took,
            **{f"ledger/{k}": v for k, v in self._coordinator.counts().items()},
        }
        self._emit(record)
        if text := self._watch.step(occupancy, self._waited / took):
            self._emit({"kind": "warning", "text": text})
        for t in batch[:TRANSCRIPTS]:
            self._transcript(version, t)
        self._write_timeline(version, [BusySpan("trainer", self._waiting_from + self._waited, now), *spans])
        self.collect_evaluations()
        self._last = now

    def _write_timeline(self, version: int, spans: Sequence[BusySpan]) -> None:
        """When each role worked since the last step."""
        zero = self._began - self._offset
        for s in spans:
            line = {"version": version, "role": s.role, "start": s.start - zero, "end": s.end - zero}
            self._timeline.write(json.dumps(line) + "\n")

    def end(self) -> None:
        """Training is over: the shares and rates of the summary are of the time until here."""
        self._seconds = time.monotonic() - self._began
        self._stats = self._coordinator.sampler_stats()

    def collect_evaluations(self) -> None:
        for evaluation in self._coordinator.evaluations():
            self._emit(self._evaluation_record(evaluation))

    def finish(self, skill_accuracy: float, seconds_warm_start: float, compiles_after_warmup: int) -> dict[str, Any]:
        """Writes the summary and the learning curve; returns the summary with the closing words."""
        self._samples.close()
        self._timeline.close()
        records = read_metrics(self._workdir)
        steps = [r for r in records if r["kind"] == "step"]
        evaluations = [r for r in records if r["kind"] == "evaluation"]
        first, last = evaluations[0], evaluations[-1]
        stats = list(self._stats.values())
        tokens = np.array([r["tokens/trained"] for r in steps])
        weights = tokens if tokens.any() else None  # a run may have had nothing to train on
        summary: dict[str, Any] = {
            "heldout_before": first["heldout/sampled_accuracy"],
            "heldout_after": last["heldout/sampled_accuracy"],
            "heldout_before_standard_error": first["heldout/sampled_standard_error"],
            "heldout_after_standard_error": last["heldout/sampled_standard_error"],
            "heldout_greedy_before": first["heldout/greedy_accuracy"],
            "heldout_greedy_after": last["heldout/greedy_accuracy"],
            "heldout_problems": len(self._held_out),
            "warm_start_skill_accuracy": skill_accuracy,
            "response_length_before": first["heldout/length_mean"],
            "response_length_after": last["heldout/length_mean"],
            "steps": steps[-1]["version"],
            "seconds_total": time.monotonic() - self._launched + seconds_warm_start + self._offset,
            "seconds_warm_start": seconds_warm_start,
            "seconds_rl": self._seconds,
            "trained_tokens_per_second": float(tokens.sum() / steps[-1]["seconds"]),
            "generated_tokens_per_second": sum(s.generated_tokens for s in stats) / self._seconds,
            "slots_useful": sum(s.generated_tokens for s in stats) / max(1, sum(s.decoded_slot_steps for s in stats)),
            "trainer_busy": 1.0 - self._waited_total / self._seconds,
            "sampler_busy": float(np.mean([s.busy_seconds / s.wall_seconds for s in stats])),
            "swap_pause_seconds_mean": sum(s.swap_seconds for s in stats) / max(1, sum(s.swaps for s in stats)),
            "staleness_mean": float(np.average([r["staleness/token_mean"] for r in steps], weights=weights)),
            "staleness_max": max(r["staleness/token_max"] for r in steps),
            "ledger": self._coordinator.counts(),
            "compiles_after_warmup": compiles_after_warmup + sum(s.compiles_after_warmup for s in stats),
        }
        report.write_summary(self._workdir, summary)
        reference = skill_accuracy or None
        report.plot_learning_curve(self._workdir / "learning_curve.png", records, reference)
        examples = [
            {"prompt": b["prompt"], "before": b["response"], "after": a["response"]}
            for b, a in zip(first["examples"], last["examples"], strict=True)
        ]
        return summary | {"closing": report.closing_words(summary, examples, self._workdir)}

    def _sampler_metrics(self) -> dict[str, float]:
        """Of the samplers since the last step: means of their busy shares, and of the pauses at their swaps."""
        stats = self._coordinator.sampler_stats()
        shares, swaps, pauses = [], 0, 0.0
        for name, s in stats.items():
            before = self._previous.get(name, SamplerStats())
            wall = s.wall_seconds - before.wall_seconds
            if wall > 0:  # it has reported since
                shares.append((s.busy_seconds - before.busy_seconds) / wall)
            swaps, pauses = swaps + s.swaps - before.swaps, pauses + s.swap_seconds - before.swap_seconds
        self._previous = stats
        return {
            "busy/sampler": float(np.mean(shares)) if shares else 0.0,
            "rollout/swap_pause_seconds": pauses / max(1, swaps),
        }

    def _evaluation_record(self, evaluation: Evaluation) -> Record:
        sampled, greedy = evaluation.samples[self._temperature], evaluation.samples[0.0]
        record: Record = {"kind": "evaluation", "version": evaluation.version, "seconds": self.seconds()}
        for name, trajectories in (("sampled", sampled), ("greedy", greedy)):
            record[f"heldout/{name}_accuracy"], record[f"heldout/{name}_standard_error"] = accuracy(trajectories)
        record["heldout/length_mean"] = mean_length(sampled)
        record["examples"] = [
            {"prompt": p.text, "response": self._text(t)} for p, t in zip(self._held_out, sampled, strict=True)
        ][:EXAMPLES]
        return record

    def _transcript(self, version: int, t: Trajectory) -> None:
        drawn = t.policy_versions[t.prompt_length :]
        line = {
            "trained_at": version - 1,
            "sample_id": t.sample_id,
            "prompt": self._tokenizer.decode(t.tokens[: t.prompt_length]),
            "response": self._text(t),
            "reward": t.reward,
            "finish_reason": t.finish_reason,
            "versions": [int(drawn.min()), int(drawn.max())],
        }
        self._samples.write(json.dumps(line) + "\n")

    def _text(self, t: Trajectory) -> str:
        return str(self._tokenizer.decode(t.response_tokens, skip_special_tokens=True))


class _QueueWatch:
    """Notices when the queue stays full or the trainer keeps waiting."""

    def __init__(self, capacity: int, synchronous: bool):
        self.capacity, self._synchronous = capacity, synchronous
        self._full = self._empty = 0

    def step(self, occupancy: int, waiting: float) -> str:
        """A warning with the remedy, or ''. waiting: the share of the step in which the trainer waited."""
        self._full = self._full + 1 if occupancy >= self.capacity else 0
        self._empty = self._empty + 1 if waiting > 0.5 and not self._synchronous else 0
        if self._full == PRESSED_STEPS:
            return (
                f"the queue has been full ({occupancy} samples) for {PRESSED_STEPS} steps: samplers wait for the "
                "trainer. Give the trainer more devices and launch fewer samplers, or lower rollout.max_staleness"
            )
        if self._empty == PRESSED_STEPS:
            return (
                f"the trainer has waited for samples most of the time for {PRESSED_STEPS} steps. Raise "
                "launch.samplers, rollout.slots or rollout.max_staleness"
            )
        return ""
