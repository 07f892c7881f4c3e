"""The sampler role: finds the trainer, then lease -> generate -> reward -> send until it is told to stop.

A sampler may have several processes, which share one mesh: all run this, and process 0 alone talks to the trainer and
grades (`transport/broadcast.py`).
"""

from __future__ import annotations

import functools
import json
import logging
import pathlib
import time

import jax
import ml_collections

from areal_jax import build
from areal_jax.compiles import CompileCounter
from areal_jax.rollout.sampler import Sampler
from areal_jax.trainer.checkpoint import REFERENCE
from areal_jax.transport.broadcast import Broadcast, FollowingLink, LeadingLink
from areal_jax.transport.trajectories import Link, ZmqLink
from areal_jax.transport.weights import OrbaxChannel, read_alone
from areal_jax.types import NO_VERSION, PolicySnapshot, UserError

IDLE_SECONDS = 0.003  # between two questions for work when there is none

log = logging.getLogger(__name__)


def run(config: ml_collections.ConfigDict, workdir: pathlib.Path, index: int, host: str = "") -> None:
    """Samples until the trainer says stop. Raises ConnectionError if it is gone, UserError for bad settings.

    host: of process 0, for a sampler with several processes (jax.distributed is set up already).
    """
    # ---------------------------------------------------------------- parts
    compiles = CompileCounter()
    broadcast = Broadcast(host) if jax.process_count() > 1 else None
    build.require_same(broadcast, config)
    leads = broadcast is None or broadcast.leads
    policy = build.find_policy(config)
    model = build.make_model(config, "sampler", policy)
    program = build.make_sampling_program(config, model, policy)
    grader = build.make_grader(config, policy) if leads else None
    channel = build.weight_channel(
        model,
        OrbaxChannel(workdir / "weights", publishes=False),
        functools.partial(read_alone, workdir / "checkpoints" / REFERENCE),
    )

    # ---------------------------------------------------------------- warm up while the trainer does
    sampler = Sampler(f"sampler-{index}", program, channel, grader, config.seed, broadcast=broadcast)
    sampler.start(PolicySnapshot(NO_VERSION, model.init_params(0)))  # any weights will do to compile with
    log.info("compiled; waiting for the trainer")
    link = _link(config, workdir, broadcast)
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
        if grader is not None:
            grader.close()
        if broadcast is not None:
            broadcast.close()


def _link(config: ml_collections.ConfigDict, workdir: pathlib.Path, broadcast: Broadcast | None) -> Link:
    limits = build.limits(config)
    if broadcast is not None and not broadcast.leads:
        return FollowingLink(broadcast, limits)
    link = ZmqLink(_address(config, workdir), limits)
    return link if broadcast is None else LeadingLink(link, broadcast)


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
