"""Accuracy on held-out problems: of samples already drawn, or of a policy that is at hand in this process."""

from __future__ import annotations

import math
from collections.abc import Sequence

from areal_jax.rollout.engine import Engine
from areal_jax.rollout.grading import Grader, Grading
from areal_jax.rollout.programs import Program
from areal_jax.rollout.schedule import Request
from areal_jax.types import PolicySnapshot, Prompt, Trajectory


def accuracy(trajectories: Sequence[Trajectory]) -> tuple[float, float]:
    """(fraction with reward > 0, its binomial standard error)."""
    n = len(trajectories)
    p = sum(t.reward > 0 for t in trajectories) / n
    return p, math.sqrt(p * (1 - p) / n)


def mean_length(trajectories: Sequence[Trajectory]) -> float:
    """Mean response length in tokens."""
    return sum(t.response_length for t in trajectories) / len(trajectories)


def answer(
    program: Program,
    snapshot: PolicySnapshot,
    prompts: Sequence[Prompt],
    grader: Grader,
    temperature: float,
    max_new_tokens: int,
    seed: int,
) -> list[Trajectory]:
    """One graded sample per prompt, drawn in this process, in the prompts' order."""
    engine = Engine(program, snapshot, seed)
    engine.submit([Request(i, p.tokens, max_new_tokens, temperature) for i, p in enumerate(prompts)])
    done: dict[int, Grading] = {}
    while engine.unfinished:
        for c in engine.step():
            done[c.request.sample_id] = grader(prompts[c.request.sample_id], c, True)
    return [done[i].result()[0] for i in range(len(prompts))]
