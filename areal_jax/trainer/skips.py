"""Updates that the train step left out, since their loss or gradient was not finite."""

from __future__ import annotations

import dataclasses
import logging
import pathlib
from typing import Any

import jax
import numpy as np

from areal_jax import sharding
from areal_jax.types import Targets, TrainBatch, UserError

log = logging.getLogger(__name__)


class Skips:
    """Counts them, and ends the run when there are too many in a row."""

    def __init__(self, most: int, dumps: pathlib.Path | None):
        """most: in a row. dumps: the directory for the batch that ends the run."""
        self.total = 0
        self._most, self._dumps, self._in_row = most, dumps, 0

    def take(self, sums: dict[str, Any], batch: TrainBatch, targets: Targets, version: int) -> bool:
        """Whether the update that gave these sums, on the host, was made; takes 'skipped' out of them.

        Raises UserError for one too many that was not.
        """
        if not sums.pop("skipped"):
            self._in_row = 0
            return True
        self.total += 1
        self._in_row += 1
        told = f"step {version + 1}: the loss is {sums['objective'] / sums['denominator']} and the gradient norm "
        told += str(sums["max_grad_norm"])
        if "value_loss" in sums:
            told += f", the critic's loss {sums['value_loss']} and its gradient norm {sums['max_critic_grad_norm']}"
        log.warning("%s; this update is left out", told)
        if self._in_row <= self._most:
            return False
        where = f" The batch is in {self._dump(batch, targets, version)}." if self._dumps else ""
        raise UserError(
            f"{told}, in update {self._in_row} in a row (optimizer.max_skipped is {self._most}); the parameters are "
            f"those before them.{where} Lower optimizer.learning_rate or critic.learning_rate, and start from the last "
            "checkpoint"
        )

    def _dump(self, batch: TrainBatch, targets: Targets, version: int) -> pathlib.Path:
        """Writes the arrays by the names of the records' fields."""
        assert self._dumps is not None
        path = self._dumps / f"nonfinite-{version + 1}.npz"
        arrays: dict[str, Any] = {}
        for record in (batch, sharding.fetch(targets)):
            arrays |= {f.name: getattr(record, f.name) for f in dataclasses.fields(record)}
        if jax.process_index() == 0:
            np.savez(path, allow_pickle=False, **{name: x for name, x in arrays.items() if x is not None})
        return path
