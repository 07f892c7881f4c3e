"""The `local` topology: a trainer and samplers as processes of this machine, supervised by their parent."""

from __future__ import annotations

import importlib.util
import os
import pathlib
import queue
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any

import ml_collections

from areal_jax.launch.processes import CORES, Child
from areal_jax.types import UserError

ACCELERATOR_PLUGINS = ("jax_cuda12_plugin", "jax_cuda13_plugin", "jax_rocm60_plugin", "jax_rocm7_plugin", "libtpu")


def accelerators() -> int:
    """How many accelerators jax sees here; 0 on a CPU. Asked in a process of its own: this one must not take them."""
    if not any(importlib.util.find_spec(name) for name in ACCELERATOR_PLUGINS):
        return 0
    if os.environ.get("JAX_PLATFORMS") == "cpu":
        return 0
    code = "import jax; print(0 if jax.default_backend() == 'cpu' else jax.local_device_count())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    return int(done.stdout.split()[-1])


def choose_kind(kind: str, devices: int) -> str:
    """'auto': one accelerator gives colocated; several, or a CPU, give local."""
    if kind != "auto":
        return kind
    return "colocated" if devices == 1 else "local"


def placements(config: ml_collections.ConfigDict, devices: int, cores: Sequence[int]) -> list[dict[str, str]]:
    """Environment variables of the trainer and of each sampler that give them devices or cores of their own.

    On a CPU each sampler gets a core of its own and the trainer may use all: what samplers leave while they wait is
    worth more to it than a core without them (measured: 8.3k to 8.9k trained tokens/s against 6.8k to 7.2k on two
    cores). Raises UserError if the devices do not suffice.
    """
    samplers = config.launch.samplers
    if devices == 0:
        if not config.launch.pin_cores or len(cores) <= samplers:
            return [{} for _ in range(1 + samplers)]
        groups: list[Sequence[int]] = [cores, *([c] for c in cores[len(cores) - samplers :])]
        return [{CORES: ",".join(map(str, group))} for group in groups]
    everything = [str(i) for i in range(devices)]
    allowed = [d for d in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if d] or everything
    trainer = [d for d in config.launch.trainer_devices.split(",") if d] or everything[: max(1, devices // 2)]
    others = [d for d in config.launch.sampler_devices.split(",") if d] or [d for d in everything if d not in trainer]
    if set(trainer) & set(others) or not set(trainer) | set(others) <= set(everything):
        raise UserError(
            f"launch.trainer_devices {','.join(trainer)} and launch.sampler_devices {','.join(others)} must be "
            f"disjoint and among the {devices} devices 0 to {devices - 1}"
        )
    if not others or len(others) % samplers:
        raise UserError(
            f"launch.samplers is {samplers} and there are {len(others)} device(s) for them: share them out evenly, or "
            "use launch.kind=colocated"
        )
    share = len(others) // samplers
    shares = [trainer, *(others[i * share : (i + 1) * share] for i in range(samplers))]
    named = [",".join(allowed[int(d)] for d in share) for share in shares]  # numbers count among those allowed here
    return [{"CUDA_VISIBLE_DEVICES": names, "TPU_VISIBLE_DEVICES": names} for names in named]


def run(
    config: ml_collections.ConfigDict,
    workdir: pathlib.Path,
    arguments: Sequence[str],
    devices: int,
    show: Callable[[dict[str, Any]], None],
) -> str:
    """Starts and supervises the processes until the run is done; returns its closing words.

    arguments: of `python -m areal_jax.main`, without the role. A sampler killed by a signal is started again; anything
    else that ends early ends the run: UserError with its message. No process is left, whatever happens.
    """
    placed = placements(config, devices, sorted(os.sched_getaffinity(0)))
    logs = workdir / "logs"
    logs.mkdir(exist_ok=True)
    (workdir / "endpoint.json").unlink(missing_ok=True)
    events: queue.Queue[tuple[str, dict[str, Any]]] = queue.Queue()

    def start(name: str, role: str, environment: dict[str, str]) -> Child:
        command = ["-m", "areal_jax.main", *arguments, f"--config.workdir={workdir}", *role.split()]
        return Child(name, command, environment, logs / f"{name}.log", events)

    def start_sampler(i: int) -> Child:
        return start(f"sampler-{i}", f"--role=sampler --sampler_index={i}", placed[1 + i])

    children: dict[str, Child] = {}
    restarts: dict[str, int] = {}
    closing = ""
    try:
        children["trainer"] = start("trainer", "--role=trainer", placed[0])
        for i in range(config.launch.samplers):
            children[f"sampler-{i}"] = start_sampler(i)
        while True:
            for name, record in _drain(events):
                if record["kind"] == "failure":
                    raise UserError(f"the {name} failed: {record['text']} (its log: {logs / name}.log)")
                if record["kind"] == "done":
                    closing = record["text"]
                show(record)
            for name, child in list(children.items()):
                code = child.poll()
                if code is None or not events.empty():
                    continue
                if name == "trainer" and code == 0:
                    return closing
                if name != "trainer" and (closing or code == 0):
                    continue
                if name != "trainer" and code < 0 and restarts.get(name, 0) < config.launch.max_restarts:
                    restarts[name] = restarts.get(name, 0) + 1
                    show({"kind": "warning", "text": f"{name} was killed by signal {-code}; starting it again"})
                    child.end()
                    children[name] = start_sampler(int(name.rpartition("-")[2]))
                    continue
                how = f"killed by signal {-code}" if code < 0 else f"exit code {code}"
                raise UserError(f"the {name} ended early ({how}); its log: {logs / name}.log")
    finally:
        for child in reversed(children.values()):
            child.end()


def _drain(events: queue.Queue[tuple[str, dict[str, Any]]]) -> list[tuple[str, dict[str, Any]]]:
    """All events that are there, after a short wait for the first."""
    drained = []
    try:
        drained.append(events.get(timeout=0.1))
        while True:
            drained.append(events.get_nowait())
    except queue.Empty:
        return drained
