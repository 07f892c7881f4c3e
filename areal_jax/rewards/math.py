"""Reward functions of (prompt, response text, finish reason)."""

from __future__ import annotations

import re
from collections.abc import Callable

from areal_jax.types import FinishReason, Prompt

INTEGER = re.compile(r"[0-9]+")


def exact_answer(prompt: Prompt, response: str, finish_reason: FinishReason) -> float:
    """1.0 if the response ends by itself, has exactly one '#', and what follows it is the reference integer."""
    _, mark, answer = response.partition("#")
    right = bool(mark) and INTEGER.fullmatch(answer) is not None and int(answer) == int(prompt.answer)
    return float(right and finish_reason == "stop")


REWARDS: dict[str, Callable[[Prompt, str, FinishReason], float]] = {"exact_answer": exact_answer}
