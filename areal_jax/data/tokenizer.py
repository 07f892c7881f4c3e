"""The character tokenizer of the embedded task: an ordinary transformers tokenizer, saved and loaded like any other."""

from __future__ import annotations

import contextlib
import io
import logging
from typing import Any

PAD, EOS, UNKNOWN = "<pad>", "<eos>", "<unk>"


def build_character_tokenizer(alphabet: str) -> Any:
    """One token per character of `alphabet`; ids 0, 1, 2 are pad, end of sequence and unknown."""
    transformers = _transformers()
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    vocabulary = {token: i for i, token in enumerate([PAD, EOS, UNKNOWN, *alphabet])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=PAD, eos_token=EOS, unk_token=UNKNOWN
    )


def _transformers() -> Any:
    """transformers, imported late (it is slow) and without its notice that torch is absent, which is intended here."""
    with contextlib.redirect_stderr(io.StringIO()):
        logging.getLogger("transformers").setLevel(logging.ERROR)
        import transformers
    return transformers
