"""The run's directory: made, or taken up again if it holds the same run unfinished."""

from __future__ import annotations

import fcntl
import importlib.metadata
import json
import pathlib
import platform
import time
from typing import IO, Any

import ml_collections

from areal_jax.config import flatten
from areal_jax.metrics import replace_text
from areal_jax.types import UserError

PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "transformers", "tensorflow-datasets", "grain")
FREE = ("workdir", "launch.", "transport.", "model.attention", "model.decode_attention")
"""How keys begin that may differ when a run is taken up again: they say where and how it runs, not what it computes."""


def choose(config: ml_collections.ConfigDict) -> pathlib.Path:
    """`config.workdir`, or a new directory under runs/."""
    stamp = time.strftime("%Y%m%d-%H%M%S")
    return pathlib.Path(config.workdir or f"runs/{config.preset}-{stamp}").expanduser().absolute()


def lock(workdir: pathlib.Path) -> IO[str]:
    """Holds the directory for this process, as long as the returned file is open. UserError if it is held."""
    file = open(workdir / "lock", "w")  # noqa: SIM115 - stays open
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise UserError(f"a run is under way in {workdir}: wait for it, or choose another config.workdir") from error
    return file


def difference(mine: dict[str, Any], theirs: dict[str, Any]) -> str:
    """What two configs, flattened, compute differently: '' or the first key with both values."""
    key = differing_key(mine, theirs, FREE)
    return "" if key is None else f"config.{key} is {theirs.get(key)!r} there and {mine.get(key)!r} here"


def differing_key(mine: dict[str, Any], theirs: dict[str, Any], free: tuple[str, ...] = ()) -> str | None:
    """The first key, of those that do not begin with one of `free`, whose values differ in two flattened configs."""
    keys = (k for k in sorted(mine.keys() | theirs.keys()) if not k.startswith(free))
    return next((k for k in keys if mine.get(k) != theirs.get(k)), None)


def recorded(workdir: pathlib.Path) -> dict[str, Any]:
    """The config, flattened, of the run in a workdir."""
    return dict(json.loads((workdir / "config.json").read_text())["config"])


def prepare(workdir: pathlib.Path, config: ml_collections.ConfigDict, overrides: dict[str, Any]) -> None:
    """Writes config.json into a new workdir; lets an unfinished run of the same config go on.

    Raises UserError for a directory that holds a finished run, another run, or something else.
    """
    mine = json.loads(json.dumps(flatten(config)))
    path = workdir / "config.json"
    if path.exists():
        if other := difference(mine, recorded(workdir)):
            raise UserError(
                f"{workdir} holds another run: {other}. Choose another config.workdir, or the same config to go on "
                "with that run"
            )
        if (workdir / "summary.json").exists():
            raise UserError(f"{workdir} holds a finished run: choose another config.workdir, or delete it")
        return
    if workdir.exists() and any(workdir.iterdir()):
        raise UserError(f"{workdir} is not empty and holds no run (no config.json): choose another config.workdir")
    workdir.mkdir(parents=True, exist_ok=True)
    versions = {"python": platform.python_version()} | {p: importlib.metadata.version(p) for p in PACKAGES}
    record = {"config": mine, "overrides": overrides, "versions": versions}
    replace_text(path, json.dumps(record, indent=1) + "\n")
