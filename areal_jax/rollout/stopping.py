"""Stop strings: where, in tokens, a response's text first contains one."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

Decode = Callable[[Sequence[int]], str]
"""Token ids -> text, special tokens included."""


class StopStrings:
    """Matches on text, whatever tokens it is spelt with; the tokens up to and including the match are kept."""

    def __init__(self, strings: Sequence[str], decode: Decode):
        if not strings or not all(strings):
            raise ValueError(f"stop strings {list(strings)!r}: expected at least one, none of them empty")
        self._strings, self._decode = tuple(strings), decode
        # a token is at least one byte of text, save special ones; doubled for those
        self.window = 2 * max(len(s.encode()) for s in self._strings)
        """Tokens before the newest ones that a match may begin in."""

    def first_match(self, tokens: np.ndarray, new: int) -> int | None:
        """How many of `tokens` to keep, up to the end of the first match that ends in the `new` last ones.

        tokens: int [n], the end of a response; what lies before its last `new` tokens has been searched already.
        """
        searched = len(tokens) - new
        before = self._decode(tokens[:searched].tolist())
        if not self._more(self._decode(tokens.tolist()), before):
            return None
        for kept in range(searched + 1, len(tokens) + 1):
            if self._more(self._decode(tokens[:kept].tolist()), before):
                return kept
        return None

    def _more(self, text: str, before: str) -> bool:
        return any(text.count(s) > before.count(s) for s in self._strings)
