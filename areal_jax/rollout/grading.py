"""From a completion to a trajectory with its reward; a symbolic grade may take its time without holding anything up."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import math
from typing import Any

import numpy as np

from areal_jax.environments.single_turn import Environment
from areal_jax.rewards.math import Question
from areal_jax.rewards.pool import GradingPool, PoolConfig
from areal_jax.rollout.engine import Completion
from areal_jax.types import Prompt, Trajectory


@dataclasses.dataclass(frozen=True)
class GradingConfig:
    """The keys of `config.reward` that turn a verdict into a reward."""

    correct: float = 1.0
    incorrect: float = 0.0
    grade_truncated: bool = False
    """False: a verdict on a response that was cut at its limit is always 'incorrect'."""
    pool: PoolConfig = dataclasses.field(default_factory=PoolConfig)


@dataclasses.dataclass(frozen=True)
class Grading:
    """A trajectory whose reward is known, or being worked out in the pool."""

    _trajectory: Trajectory
    _config: GradingConfig
    _verdict: concurrent.futures.Future[bool | None] | None

    def done(self) -> bool:
        return self._verdict is None or self._verdict.done()

    def result(self) -> tuple[Trajectory, bool]:
        """The trajectory, and whether its grade timed out. Waits; raises what the pool failed with."""
        if self._verdict is None:
            return self._trajectory, False
        verdict = self._verdict.result()
        reward = self._config.correct if verdict else self._config.incorrect
        return dataclasses.replace(self._trajectory, reward=reward), verdict is None

    def wait(self, seconds: float | None) -> None:
        """Until it is done, or for so long if that is given."""
        if self._verdict is not None:
            concurrent.futures.wait([self._verdict], timeout=seconds)


class Grader:
    """Decodes a response, asks the environment for its outcome, and the pool where that cannot say."""

    def __init__(self, environment: Environment, tokenizer: Any, config: GradingConfig | None = None):
        self._environment, self._tokenizer = environment, tokenizer
        self._config = config or GradingConfig()
        self._pool = GradingPool(self._config.pool)

    def __call__(self, prompt: Prompt, completion: Completion, evaluation: bool) -> Grading:
        """Raises ValueError for a reward that is not finite."""
        response = completion.tokens[len(completion.request.prompt) :]
        text = self._tokenizer.decode(response, skip_special_tokens=True)
        outcome = self._environment.step(prompt, text, completion.finish_reason)
        verdict = None
        if isinstance(outcome, bool | Question):
            if completion.finish_reason == "length" and not self._config.grade_truncated:
                outcome = False
            if isinstance(outcome, Question):
                verdict, outcome = self._pool.ask(outcome), False
            outcome = self._config.correct if outcome else self._config.incorrect
        reward = float(outcome)
        if not math.isfinite(reward):
            raise ValueError(
                f"the reward of {text!r} for the prompt {prompt.text!r} is {reward}; expected a finite number"
            )
        trajectory = Trajectory(
            sample_id=completion.request.sample_id,
            prompt_id=prompt.prompt_id,
            tokens=completion.tokens,
            behaviour_logprobs=completion.behaviour_logprobs,
            policy_versions=completion.policy_versions,
            loss_mask=(completion.policy_versions >= 0).astype(np.float32),
            finish_reason=completion.finish_reason,
            reward=reward,
            evaluation=evaluation,
        )
        return Grading(trajectory, self._config, verdict)

    def close(self) -> None:
        """Ends the pool's processes."""
        self._pool.close()
