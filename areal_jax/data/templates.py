"""From a question to the tokens of a prompt: plain text, examples before it, or the model's chat template."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from areal_jax.data.sources import Record
from areal_jax.types import Prompt, UserError


@dataclasses.dataclass(frozen=True)
class TemplateConfig:
    """The keys of `config.data` that shape a prompt."""

    kind: str = "plain"
    """plain | few_shot | chat."""
    question_format: str = "{question}"
    """The text of one problem."""
    shot_format: str = " {answer}\n\n"
    """What follows an example's question: {answer} and {solution} stand for the record's."""
    system_prompt: str = ""


class OverlongPrompt(UserError):
    """A prompt has more tokens than rollout.max_prompt_length."""


class Template:
    """Renders and tokenises prompts. The examples of `few_shot` and `chat` are fixed when it is made."""

    def __init__(self, config: TemplateConfig, tokenizer: Any, shots: Sequence[Record] = (), vocab_size: int = 0):
        """vocab_size: rows of the model's embedding; 0 takes the tokenizer's size.

        Raises UserError when kind is 'chat' and the tokenizer has no chat template.
        """
        self.config, self._tokenizer, self._shots = config, tokenizer, tuple(shots)
        self._vocab_size = vocab_size or len(tokenizer)
        if config.kind == "chat" and not tokenizer.chat_template:
            raise UserError(
                "data.template is 'chat' and the tokenizer has no chat template; expected an instruction-tuned model, "
                "or data.template='plain' or 'few_shot'"
            )

    def render(self, question: str) -> str:
        """The whole prompt as text."""
        c = self.config
        asked = self._question(question)
        if c.kind != "chat":
            examples = "".join(self._question(s["prompt"]) + _filled(c.shot_format, s) for s in self._shots)
            return (c.system_prompt + "\n\n" if c.system_prompt else "") + examples + asked
        messages = [{"role": "system", "content": c.system_prompt}] if c.system_prompt else []
        for shot in self._shots:
            messages += [
                {"role": "user", "content": self._question(shot["prompt"])},
                {"role": "assistant", "content": _filled(c.shot_format, shot).strip()},
            ]
        messages.append({"role": "user", "content": asked})
        return str(self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))

    def encode(self, text: str) -> np.ndarray:
        """int32 [P]. Plain text gets what the tokenizer puts before a text (Llama's and Gemma's BOS); a chat template
        brings its own. An end-of-sequence token that a tokenizer adds is taken off: the prompt goes on."""
        bare = self._tokenizer.encode(text, add_special_tokens=False)
        ids = bare if self.config.kind == "chat" else self._tokenizer.encode(text, add_special_tokens=True)
        if len(ids) > len(bare) and ids[-1] == self._tokenizer.eos_token_id:
            ids = ids[:-1]
        if ids and max(ids) >= self._vocab_size:
            token = self._tokenizer.convert_ids_to_tokens(max(ids))
            raise UserError(
                f"the token {token!r} of the prompt has id {max(ids)}, and the model's vocabulary ends at "
                f"{self._vocab_size - 1}: the tokenizer has tokens that the model does not know"
            )
        return np.asarray(ids, np.int32)

    def prompt(self, record: Record, prompt_id: int, max_length: int) -> Prompt:
        """Raises OverlongPrompt, or UserError for one without tokens."""
        text = self.render(record["prompt"])
        tokens = self.encode(text)
        if len(tokens) > max_length:
            raise OverlongPrompt(
                f"prompt {prompt_id} has {len(tokens)} tokens; rollout.max_prompt_length is {max_length}: raise it or "
                f"set data.overlong='skip'. It begins {text[:80]!r}"
            )
        if len(tokens) == 0:
            raise UserError(f"prompt {prompt_id} has no tokens: its text is {text!r}")
        return Prompt(prompt_id, tokens, text, record["answer"])

    def _question(self, question: str) -> str:
        return self.config.question_format.replace("{question}", question)


def _filled(text: str, record: Record) -> str:
    """Plain replacement: solutions are full of braces."""
    return text.replace("{answer}", record["answer"]).replace("{solution}", record["solution"])
