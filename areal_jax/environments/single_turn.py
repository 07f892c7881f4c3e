"""Environments: what turns a prompt and a response into a reward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from areal_jax.rewards.math import Outcome, RewardFunction
from areal_jax.types import FinishReason, Prompt


class Environment(Protocol):
    """Grades a response. A multi-turn environment may answer with more tokens before it gives its reward."""

    def step(self, prompt: Prompt, response: str, finish_reason: FinishReason) -> Outcome:
        """The outcome of the response, which ends the episode: a reward, a verdict or a question for the pool."""


class SingleTurn:
    """One prompt, one response, one reward."""

    def __init__(self, reward: RewardFunction):
        self._reward = reward

    def step(self, prompt: Prompt, response: str, finish_reason: FinishReason) -> Outcome:
        return self._reward(prompt, response, finish_reason)


ENVIRONMENTS: dict[str, Callable[[RewardFunction], Environment]] = {"single_turn": SingleTurn}
