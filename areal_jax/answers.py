"""Where a worked solution keeps its answer; shared by the data sets and the rewards."""

from __future__ import annotations

import re

_BOX = re.compile(r"\\(?:boxed|fbox)\s*(?:\{|(?P<bare>[^\s{$.,;]))")


def last_box(text: str) -> str | None:
    r"""What is in the last `\boxed{...}` (or `\fbox{...}`) whose braces close, or the sign after `\boxed 5`; None if
    there is none."""
    for match in reversed(list(_BOX.finditer(text))[-20:]):
        if match["bare"]:
            return match["bare"]
        depth = 1
        for end in range(match.end(), len(text)):
            depth += {"{": 1, "}": -1}.get(text[end], 0)
            if depth == 0:
                return text[match.end() : end]
    return None


def final_answer(solution: str) -> str:
    r"""The answer of a reference solution: what follows GSM8K's last `####`, or is in the last `\boxed{}`, or all.

    Thousands separators are taken out of a number. Empty when there is none.
    """
    _, mark, after = solution.rpartition("####")
    box = last_box(solution)
    answer = after if mark else solution if box is None else box
    return re.sub(r"(?<=\d),(?=\d{3}(?:\D|$))", "", answer.strip())
