"""Checkpoints of the trainer: parameters, optimizer state and the books, committed as one by Orbax."""

from __future__ import annotations

import pathlib
import shutil
from typing import Any

import jax
import orbax.checkpoint as ocp

from areal_jax.trainer.train_step import TrainState

KEEP = 2


class Checkpoints:
    """`<directory>/<version>/`; the newest two are kept. A write killed in the middle is never listed."""

    def __init__(self, directory: pathlib.Path):
        self._directory = directory.absolute()
        handler = ocp.CompositeCheckpointHandler(state=ocp.PyTreeCheckpointHandler(), books=ocp.JsonCheckpointHandler())
        self._checkpointer = ocp.Checkpointer(handler)

    def versions(self) -> list[int]:
        """Complete checkpoints, oldest first."""
        if not self._directory.is_dir():
            return []
        return sorted(int(p.name) for p in self._directory.iterdir() if p.name.isdigit())

    def save(self, version: int, state: TrainState, books: dict[str, Any]) -> pathlib.Path:
        path = self._directory / str(version)
        args = ocp.args.Composite(state=ocp.args.PyTreeSave(_as_dict(state)), books=ocp.args.JsonSave(books))
        self._checkpointer.save(path, args=args, force=True)
        for old in self.versions()[:-KEEP]:
            shutil.rmtree(self._directory / str(old))
        return path

    def restore(self, version: int, like: TrainState) -> tuple[TrainState, dict[str, Any]]:
        """State with the shapes, dtypes and shardings of `like`, and the books."""
        wanted = _as_dict(like)
        restore_args = ocp.checkpoint_utils.construct_restore_args(wanted)
        restored = self._checkpointer.restore(
            self._directory / str(version),
            args=ocp.args.Composite(
                state=ocp.args.PyTreeRestore(item=wanted, restore_args=restore_args), books=ocp.args.JsonRestore()
            ),
        )
        leaves = [restored["state"]["optimizer"][f"{i:05d}"] for i in range(len(wanted["optimizer"]))]
        opt_state = jax.tree.unflatten(jax.tree.structure(like.opt_state), leaves)
        return TrainState(restored["state"]["params"], opt_state), restored["books"]


def _as_dict(state: TrainState) -> dict[str, Any]:
    """Plain dicts: the optimizer's state is a tree of its library's own types, saved as its leaves in order."""
    leaves = jax.tree.leaves(state.opt_state)
    return {"params": state.params, "optimizer": {f"{i:05d}": leaf for i, leaf in enumerate(leaves)}}
