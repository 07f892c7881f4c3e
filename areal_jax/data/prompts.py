"""Grain pipelines: an endless, seeded, resumable stream of records, and the prompts made of them."""

from __future__ import annotations

import pathlib
from collections.abc import Sequence
from typing import Any

import grain
import numpy as np

from areal_jax.data import arithmetic
from areal_jax.types import Prompt, UserError

DATASETS = {"arithmetic": arithmetic.load}
"""name -> load(split, cache_dir): a random-access source of records with 'prompt' and 'answer' (text as bytes)."""


class RecordStream:
    """Records of a source, shuffled anew each epoch, for ever; its state is a small JSON-able dict."""

    def __init__(self, source: Sequence[dict[str, Any]], seed: int):
        dataset = grain.MapDataset.source(source).shuffle(seed=seed).repeat()
        options = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
        self._iterator = iter(dataset.to_iter_dataset(options))

    def __next__(self) -> dict[str, str]:
        return _as_text(next(self._iterator))

    def get_state(self) -> dict[str, Any]:
        return dict(self._iterator.get_state())

    def set_state(self, state: dict[str, Any]) -> None:
        self._iterator.set_state(state)


def open_source(name: str, split: str, cache_dir: pathlib.Path) -> Sequence[dict[str, Any]]:
    """A split of a data set named in DATASETS. Raises UserError for an unknown name."""
    if name not in DATASETS:
        raise UserError(f"data.name is {name!r}; known data sets: {', '.join(sorted(DATASETS))}")
    return DATASETS[name](split, cache_dir)


def make_prompt(record: dict[str, str], prompt_id: int, tokenizer: Any, max_length: int) -> Prompt:
    """Tokenises a record's prompt. Raises UserError when it is longer than max_length tokens."""
    tokens = np.asarray(tokenizer.encode(record["prompt"], add_special_tokens=False), np.int32)
    if not 0 < len(tokens) <= max_length:
        raise UserError(
            f"prompt {prompt_id} has {len(tokens)} tokens; expected 1 to rollout.max_prompt_length = {max_length}: "
            "raise it or shorten the prompt"
        )
    return Prompt(prompt_id, tokens, record["prompt"], record["answer"])


def fixed_prompts(
    source: Sequence[dict[str, Any]], count: int, tokenizer: Any, max_length: int, first_id: int = 0
) -> list[Prompt]:
    """The first `count` prompts of a held-out split, in file order (all of them if there are fewer)."""
    records = (_as_text(source[i]) for i in range(min(count, len(source))))
    return [make_prompt(record, first_id + i, tokenizer, max_length) for i, record in enumerate(records)]


def _as_text(record: dict[str, Any]) -> dict[str, str]:
    return {k: v.decode() if isinstance(v, bytes) else v for k, v in record.items()}
