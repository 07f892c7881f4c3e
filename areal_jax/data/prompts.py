"""Grain pipelines: an endless, seeded, resumable stream of records, and the prompts made of them."""

from __future__ import annotations

from typing import Any

import grain

from areal_jax.data.sources import Record, Source
from areal_jax.data.templates import OverlongPrompt, Template
from areal_jax.types import Prompt, UserError


class RecordStream:
    """Records of a source, shuffled anew each epoch, for ever; its state is a small JSON-able dict."""

    def __init__(self, source: Source, seed: int):
        dataset = grain.MapDataset.source(source).shuffle(seed=seed).repeat()
        options = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
        self._iterator = iter(dataset.to_iter_dataset(options))
        self.epoch_length = len(source)

    def __next__(self) -> Record:
        record: Record = next(self._iterator)
        return record

    def get_state(self) -> dict[str, Any]:
        return dict(self._iterator.get_state())

    def set_state(self, state: dict[str, Any]) -> None:
        self._iterator.set_state(state)


class PromptStream:
    """Numbered prompts of a stream; what is longer than `max_length` tokens is refused, or skipped and counted."""

    def __init__(self, stream: RecordStream, template: Template, max_length: int, skip_overlong: bool):
        self._stream, self._template = stream, template
        self._max_length, self._skip = max_length, skip_overlong
        self._next_id = 0
        self.skipped = 0
        """Overlong prompts so far."""

    def __call__(self) -> tuple[Prompt, dict[str, Any]]:
        """The next prompt, and the state after it. Raises OverlongPrompt; with skip, UserError if none fits."""
        for _ in range(self._stream.epoch_length):
            try:
                prompt = self._template.prompt(next(self._stream), self._next_id, self._max_length)
            except OverlongPrompt:
                if not self._skip:
                    raise
                self.skipped += 1
                continue
            self._next_id += 1
            state = {"next_id": self._next_id, "skipped": self.skipped, "grain": self._stream.get_state()}
            return prompt, state
        raise UserError(
            f"all {self._stream.epoch_length} training prompts have more tokens than rollout.max_prompt_length = "
            f"{self._max_length}: raise it"
        )

    def set_state(self, state: dict[str, Any]) -> None:
        """Goes on from a state that came with a prompt."""
        self._next_id, self.skipped = state["next_id"], state["skipped"]
        self._stream.set_state(state["grain"])


def fixed_prompts(source: Source, count: int, template: Template, max_length: int, skip_overlong: bool) -> list[Prompt]:
    """The first `count` prompts of a held-out split that fit, in file order (all of them if there are fewer).

    Raises OverlongPrompt for one that does not, unless they are to be skipped; UserError if none is left.
    """
    prompts: list[Prompt] = []
    for index in range(len(source)):
        if len(prompts) == count:
            break
        try:
            prompts.append(template.prompt(source[index], len(prompts), max_length))
        except OverlongPrompt:
            if not skip_overlong:
                raise
    if not prompts:
        raise UserError(f"no held-out prompt has at most rollout.max_prompt_length = {max_length} tokens: raise it")
    return prompts
