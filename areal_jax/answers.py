"""Where a worked solution keeps its answer; shared by the data sets and the rewards."""

from __future__ import annotations

import re

_BOX = re.compile(r"\\f?boxed\s*\{")


def last_box(text: str) -> str | None:
    r"""What is in the last `\boxed{...}` whose braces close; None if there is none."""
    for match in reversed(list(_BOX.finditer(text))):
        depth = 1
        for end in range(match.end(), len(text)):
            depth += {"{": 1, "}": -1}.get(text[end], 0)
            if depth == 0:
                return text[match.end() : end]
    return None


def final_answer(solution: str) -> str:
    r"""The answer of a reference solution: what follows GSM8K's last `####`, or is in the last `\boxed{}`, or all."""
    _, mark, after = solution.rpartition("####")
    if mark:
        return after.strip().replace(",", "")
    box = last_box(solution)
    return solution.strip() if box is None else box.strip()
