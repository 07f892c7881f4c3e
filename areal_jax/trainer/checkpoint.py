"""Checkpoints of the trainer: parameters, optimizer state and the books, committed as one by Orbax."""

from __future__ import annotations

import pathlib
import shutil
from typing import Any

import jax
import orbax.checkpoint as ocp

from areal_jax.trainer.train_step import CriticState, TrainState
from areal_jax.types import Params

KEEP = 2
REFERENCE = "reference"


class Checkpoints:
    """`<directory>/<version>/`; the newest two are kept. A write killed in the middle is never listed.

    All processes of a trainer save and restore together; the books are process 0's.
    """

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
        if jax.process_index() == 0:
            for old in self.versions()[:-KEEP]:
                shutil.rmtree(self._directory / str(old))
        return path

    def restore(self, version: int, like: TrainState) -> tuple[TrainState, dict[str, Any]]:
        """State with the shapes, dtypes and shardings of `like`, and what it has frozen; and the books."""
        wanted = _as_dict(like)
        restore_args = ocp.checkpoint_utils.construct_restore_args(wanted)
        restored = self._checkpointer.restore(
            self._directory / str(version),
            args=ocp.args.Composite(
                state=ocp.args.PyTreeRestore(item=wanted, restore_args=restore_args), books=ocp.args.JsonRestore()
            ),
        )
        found = restored["state"]
        critic = None
        if like.critic is not None:
            critic = CriticState(found["critic"], _from_leaves(found["critic_optimizer"], like.critic.opt_state))
        state = TrainState(
            found["params"], _from_leaves(found["optimizer"], like.opt_state), critic, frozen=like.frozen
        )
        return state, restored["books"]

    def save_reference(self, params: Params) -> None:
        """Keeps the parameters that RL starts from: a KL is to them, and adapters are of them."""
        ocp.PyTreeCheckpointer().save(self._directory / REFERENCE, args=ocp.args.PyTreeSave(params), force=True)

    def restore_reference(self, abstract: Params) -> Params:
        args = ocp.checkpoint_utils.construct_restore_args(abstract)
        restored = ocp.PyTreeCheckpointer().restore(
            self._directory / REFERENCE, args=ocp.args.PyTreeRestore(item=abstract, restore_args=args)
        )
        return dict(restored)


def _as_dict(state: TrainState) -> dict[str, Any]:
    """Plain dicts: the optimizer's state is a tree of its library's own types, saved as its leaves in order."""
    saved = {"params": state.params, "optimizer": _leaves(state.opt_state)}
    if state.critic is not None:
        saved |= {"critic": state.critic.params, "critic_optimizer": _leaves(state.critic.opt_state)}
    return saved


def _leaves(tree: Any) -> dict[str, Any]:
    return {f"{i:05d}": leaf for i, leaf in enumerate(jax.tree.leaves(tree))}


def _from_leaves(leaves: dict[str, Any], like: Any) -> Any:
    return jax.tree.unflatten(jax.tree.structure(like), [leaves[name] for name in sorted(leaves)])
