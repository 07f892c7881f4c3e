"""Reward functions of (prompt, response text, finish reason).

A reward is a number, or a verdict: True or False, or a Question that this module cannot decide and `pool.py` can.
"""

from __future__ import annotations

import dataclasses
import re
import unicodedata
from collections.abc import Callable
from fractions import Fraction

from areal_jax.answers import last_box
from areal_jax.types import FinishReason, Prompt

INTEGER = re.compile(r"[0-9]{1,100}")
TAIL = 2000  # characters of a response that are looked at: the answer comes last


@dataclasses.dataclass(frozen=True)
class Question:
    """Whether an expression equals the reference: for the pool's symbolic grader."""

    reference: str
    answer: str
    """What is in the last box; or, when `boxed` is false, the end of the response."""
    boxed: bool


Outcome = float | bool | Question
RewardFunction = Callable[[Prompt, str, FinishReason], Outcome]


def exact_answer(prompt: Prompt, response: str, finish_reason: FinishReason) -> bool:
    """True if the response ends by itself, has exactly one '#', and what follows it is the reference integer."""
    _, mark, answer = response.partition("#")
    right = bool(mark) and INTEGER.fullmatch(answer) is not None and int(answer) == int(prompt.answer)
    return right and finish_reason == "stop"


def math_answer(prompt: Prompt, response: str, finish_reason: FinishReason) -> bool | Question:
    r"""Whether the response's final answer equals the reference.

    The final answer is what is in the last \boxed{} that closes; else what follows the last `####`; else the last
    number. Numbers are compared exactly (thousands separators, fractions, percent, units, full-width digits, signs);
    anything else is left to the symbolic grader.
    """
    del finish_reason  # whether a truncated answer may count is the configuration's to say
    text = fold(response[-TAIL:])
    reference = fold(prompt.answer)
    wanted = parse_number(reference)
    box = last_box(text)
    if box is not None:
        return _compare(wanted, reference, box) if box.strip() else False
    _, mark, after = text.rpartition("####")
    if mark and after.strip():
        line = after.strip().splitlines()[0]
        if wanted is None or parse_number(line) is not None:
            return _compare(wanted, reference, line)
    if wanted is not None:
        found = last_number(text)
        return found is not None and _equal(wanted, found)
    return Question(reference, text, boxed=False) if text.strip() else False


REWARDS: dict[str, RewardFunction] = {"exact_answer": exact_answer, "math": math_answer}


# --- reading numbers ---


@dataclasses.dataclass(frozen=True)
class Number:
    """An exact value; with `percent` it was written with a percent sign, which is not yet applied."""

    value: Fraction
    percent: bool = False


_PLAIN = r"\d{1,3}(?:,\d{3})+(?:\.\d*)?|\d+(?:\.\d*)?|\.\d+"
_FRAC = r"\\[dt]?frac\s*(?:\{\s*(-?\d+)\s*\}\s*\{\s*(-?\d+)\s*\}|(\d)\s*(\d))"
_WHOLE = re.compile(
    rf"([+-]?)\s*(?:(?P<whole>\d+)\s+(?P<num>\d+)\s*/\s*(?P<den>\d+)"
    rf"|(?P<a>{_PLAIN})(?:\s*/\s*(?P<b>{_PLAIN}))?|(?P<frac>{_FRAC}))"
)
_LAST = re.compile(
    rf"(?:(?<![\w)\]}}])[+-]\s?)?(?:{_FRAC}|\d+\s+\d+\s*/\s*\d+|(?:{_PLAIN})(?:\s*/\s*(?:{_PLAIN}))?)\s*%?"
)
_UNIT = re.compile(
    r"(?<=[\d}])\s*(?:\s[a-z]{2,}|°|\^\s*\{?\s*\\circ\s*\}?|[a-z]{2,})[a-z\s]*(?:\^\s*\{?[23]\}?)?$", re.I
)
_NO_UNITS = re.compile(
    r"\b(?:pi|tau|phi|theta|alpha|beta|gamma|sqrt|log|ln|exp|sin|cos|tan|mod|and|or|to|e|i|x|y)\b", re.I
)
_MONEY = re.compile(r"\\?[$€£¥]")
_TEXT = re.compile(r"\\(?:text|mathrm|textbf|mbox)\s*\{[^{}]*\}(?:\s*\^\s*\{?[23]\}?)?")
MAX_CHARACTERS = 200  # of a number with its unit


def fold(text: str) -> str:
    """Full-width digits and signs, no-break spaces and typographic minuses as plain ones."""
    return unicodedata.normalize("NFKC", text).translate({0x2212: "-", 0x2013: "-", 0x066B: ".", 0x2044: "/"})


def parse_number(text: str) -> Number | None:
    r"""The number that a text is, apart from units, money signs, and a leading `x =`; None if it is anything else.

    `1,234.50`, `\frac{3}{4}`, `3/4`, `1 1/2`, `$18`, `25\%`, `-7 \text{ cm}`, `x = 5`.
    """
    text = text.strip()
    if len(text) > MAX_CHARACTERS:
        return None
    text = _MONEY.sub("", text)
    text = re.sub(r"\\[!,;: ]|~|\\left|\\right|\{,\}", lambda m: "," if m[0] == "{,}" else " ", text).strip()
    text = re.sub(r"^[a-z]\s*=\s*", "", text, flags=re.I)
    text = _TEXT.sub(" ", text).strip().rstrip(".").strip()
    percent = text.endswith("%")
    if percent:
        text = text.rstrip("%").rstrip("\\").strip()
    if not _NO_UNITS.search(text):
        text = _UNIT.sub("", text).strip()
    match = _WHOLE.fullmatch(text)
    if match is None:
        return None
    try:
        return Number(_sign(match[1]) * _magnitude(match), percent)
    except ZeroDivisionError:
        return None


def last_number(text: str) -> Number | None:
    """The last number in a text."""
    found = [match[0] for match in _LAST.finditer(text)]
    return parse_number(re.sub(r"^([+-])\s+", r"\1", found[-1].strip())) if found else None


def _sign(text: str) -> int:
    return -1 if text == "-" else 1


def _magnitude(match: re.Match[str]) -> Fraction:
    if match["whole"]:
        return int(match["whole"]) + Fraction(int(match["num"]), int(match["den"]))
    if match["a"]:
        return _decimal(match["a"]) / (_decimal(match["b"]) if match["b"] else 1)
    numerator, denominator = [g for g in match.groups()[match.re.groupindex["frac"] :] if g is not None]
    return Fraction(int(numerator), int(denominator))


def _decimal(text: str) -> Fraction:
    return Fraction(text.replace(",", "").rstrip(".") or "0")


def _compare(wanted: Number | None, reference: str, answer: str) -> bool | Question:
    found = parse_number(answer)
    if wanted is not None and found is not None:
        return _equal(wanted, found)
    if _bare(reference) == _bare(answer):
        return True
    return Question(reference, answer, boxed=True)


def _equal(wanted: Number, found: Number) -> bool:
    """A percent sign on one side only may mean the number or its hundredth: 25% is 25 or 0.25."""
    if wanted.value == found.value:
        return True
    if wanted.percent == found.percent:
        return False
    written, other = (wanted, found) if wanted.percent else (found, wanted)
    return written.value / 100 == other.value


def _bare(text: str) -> str:
    """Without what does not change the meaning: spaces, display sizes, a final full stop."""
    return re.sub(r"\\left|\\right|\\[!,;: ]|(?<=\\)[dt](?=frac)|\s|\$", "", text).rstrip(".")
