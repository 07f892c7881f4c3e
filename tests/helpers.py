"""Small models, trajectories and whole runs for the tests."""

from __future__ import annotations

import atexit
import functools
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import time

import jax
import numpy as np

from areal_jax import sharding
from areal_jax.models.transformer import Model, TransformerConfig, build_model
from areal_jax.types import PROMPT_VERSION, Trajectory

ROOT = pathlib.Path(__file__).parent.parent
TINY = TransformerConfig(vocab_size=17, layers=2, d_model=16, heads=4, kv_heads=2, head_dim=8, d_ff=32)


def one_device_mesh():
    return sharding.make_mesh({"data": 1, "fsdp": 1, "tensor": 1}, jax.devices()[:1])


def tiny_model(config: TransformerConfig = TINY, mesh=None) -> Model:
    return build_model(config, mesh or one_device_mesh())


def trajectory(sample_id, prompt: int, response: int, rng: np.random.Generator, **changes) -> Trajectory:
    """Random tokens: `prompt` of them, then `response` drawn by version 0."""
    n = prompt + response
    drawn = np.arange(n) >= prompt
    fields = {
        "sample_id": sample_id,
        "prompt_id": sample_id // 4 if isinstance(sample_id, int) else 0,
        "tokens": rng.integers(3, 17, n).astype(np.int32),
        "behaviour_logprobs": np.where(drawn, -rng.random(n), 0).astype(np.float32),
        "policy_versions": np.where(drawn, 0, PROMPT_VERSION).astype(np.int32),
        "loss_mask": drawn.astype(np.float32),
        "finish_reason": "stop",
        "reward": float(rng.integers(2)),
    }
    return Trajectory(**(fields | changes))


class Graded:
    """A grader whose grades are there at once, and all 1."""

    def __init__(self, lease_prompt, completion, evaluation):
        fields = {"tokens": completion.tokens, "policy_versions": completion.policy_versions, "evaluation": evaluation}
        fields |= {"behaviour_logprobs": completion.behaviour_logprobs, "reward": 1.0}
        rng = np.random.default_rng(0)
        self._trajectory = trajectory(completion.request.sample_id, 1, len(completion.tokens) - 1, rng, **fields)

    def done(self):
        return True

    def wait(self, timeout):
        pass

    def result(self):
        return self._trajectory, False


def main_command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "areal_jax.main", *arguments]


@functools.cache
def _compiled() -> str:
    """A directory where the runs of a test session share what they compile, which is most of a short run's time."""
    directory = tempfile.mkdtemp(prefix="areal_jax_compiled")
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    return directory


def environment(**extra: str) -> dict[str, str]:
    """As a user's: one CPU device."""
    kept = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "AREAL_JAX_SUPERVISED")}
    shared = {"JAX_COMPILATION_CACHE_DIR": _compiled(), "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.1"}
    return {**kept, "JAX_PLATFORMS": "cpu", **shared, **extra}


def run_main(*arguments: str, timeout: float = 180, **extra: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        main_command(*arguments), cwd=ROOT, env=environment(**extra), capture_output=True, text=True, timeout=timeout
    )


def wait_until(condition, seconds=60.0):
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.1)
    return False
