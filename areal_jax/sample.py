"""The sampler role: finds the trainer, then lease -> generate -> reward -> send until it is told to stop."""

from __future__ import annotations

import json
import logging
import pathlib
import time

import ml_collections

from areal_jax import build
from areal_jax.compiles import CompileCounter
from areal_jax.rollout.sampler import Sampler
from areal_jax.transport.trajectories import ZmqLink
from areal_jax.transport.weights import OrbaxChannel
from areal_jax.types import NO_VERSION, PolicySnapshot, UserError

IDLE_SECONDS = 0.003  # between two questions for work when there is none

log = logging.getLogger(__name__)


def run(config: ml_collections.ConfigDict, workdir: pathlib.Path, index: int) -> None:
    """Samples until the trainer says stop. Raises ConnectionError if it is gone, UserError for bad settings."""
    # ---------------------------------------------------------------- parts
    compiles = CompileCounter()
    policy = build.find_policy(config)
    model = build.make_model(config, "sampler", policy)
    program = build.make_sampling_program(config, model, policy)
    grader = build.make_grader(config, policy)
    channel = OrbaxChannel(workdir / "weights")

    # ---------------------------------------------------------------- warm up while the trainer does
    unpublished = PolicySnapshot(NO_VERSION, model.init_params(0))
    sampler = Sampler(f"sampler-{index}", program, channel, grader, config.seed)
    sampler.start(unpublished)
    log.info("compiled; waiting for the trainer")
    link = ZmqLink(_address(config, workdir), build.limits(config))
    sampler.connect(link)

    # ---------------------------------------------------------------- THE loop
    try:
        turns = 0
        while True:
            worked, stop = sampler.turn(compiles.after_warmup)
            if stop:
                break
            if not worked:
                time.sleep(IDLE_SECONDS)
            turns += 1
            if turns == 1:
                compiles.warm()
    finally:
        link.close()
        sampler.close()
        grader.close()


def _address(config: ml_collections.ConfigDict, workdir: pathlib.Path, timeout_seconds: float = 3600.0) -> str:
    """The trainer's address: configured, or read from the workdir once the trainer listens."""
    if config.transport.address:
        return str(config.transport.address)
    endpoint = workdir / "endpoint.json"
    deadline = time.monotonic() + timeout_seconds
    while time.monotonic() < deadline:
        if endpoint.exists():
            return str(json.loads(endpoint.read_text())["address"])
        time.sleep(0.05)
    raise UserError(
        f"no trainer has written {endpoint} within {timeout_seconds:.0f} s: start one with --role=trainer and the same "
        "config.workdir, or set transport.address"
    )
