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


def text_answer(prompt: Prompt, response: str, finish_reason: FinishReason) -> bool:
    """True if the final answer (see `math_answer`), else the last line, is the reference letter by letter; only runs of
    spaces count as one."""
    del finish_reason
    lines = response.strip().splitlines()
    marked = _marked(response[-TAIL:])
    answer = marked if marked is not None else lines[-1] if lines else ""
    return answer.split() == prompt.answer.split()


def math_answer(prompt: Prompt, response: str, finish_reason: FinishReason) -> bool | Question:
    r"""Whether the response's final answer equals the reference.

    The final answer is what is in the last \boxed{} that closes; else what follows the last `####`; else the last
    number. Numbers are compared exactly (thousands separators, fractions, percent, units, full-width digits, signs) and
    words letter by letter; anything else is left to the symbolic grader.
    """
    del finish_reason  # whether a truncated answer may count is the configuration's to say
    text = fold(response[-TAIL:])
    reference = fold(prompt.answer)
    wanted = parse_number(reference)
    marked = _marked(text)
    if marked is not None and (wanted is None or last_box(text) is not None or parse_number(marked) is not None):
        return _compare(wanted, reference, marked) if marked.strip() else False
    if wanted is not None:
        found = last_number(text)
        return found is not None and _equal(wanted, found)
    if _WORDS.fullmatch(reference):
        lines = text.strip().splitlines()
        return bool(lines) and _bare(lines[-1]).endswith(_bare(reference))
    return Question(reference, text, boxed=False) if text.strip() else False


REWARDS: dict[str, RewardFunction] = {"exact_answer": exact_answer, "math": math_answer, "text": text_answer}


# --- reading numbers ---


@dataclasses.dataclass(frozen=True)
class Number:
    """An exact value; with `percent` it was written with a percent sign, which is not yet applied."""

    value: Fraction
    percent: bool = False


_UNITS = (
    "dollars? cents? euros? pounds? usd hours? hrs? minutes? mins? seconds? secs? days? weeks? months? years? old "
    "inches inch feet foot ft yards? miles? mph km cm mm m meters? metres? centimeters? kilometers? kilometres? "
    "grams? kg g mg ounces? oz lbs? tons? liters? litres? ml l gallons? quarts? cups? degrees? units? square sq cubic "
    "percent points? times people students? children girls boys eggs? books? apples? per in of a an the each total "
    "more less left"
)
_UNIT = rf"(?:{'|'.join(_UNITS.split())})"
_PLAIN = r"\d{1,3}(?:,\d{3})+(?:\.\d*)?|\d+(?:\.\d*)?|\.\d+"
_FRAC = r"\\[dt]?frac\s*(?:\{\s*(-?\d+)\s*\}\s*\{\s*(-?\d+)\s*\}|(\d)\s*(\d))"
_WHOLE = re.compile(
    rf"([+-]?)\s*(?:(?P<whole>\d+)\s+(?P<num>\d+)\s*/\s*(?P<den>\d+)"
    rf"|(?P<a>{_PLAIN})(?:\s*/\s*(?P<b>{_PLAIN}))?|(?P<frac>{_FRAC}))"
)
_SIGN = r"(?:(?<![\w)\]}.])[+-]|(?<==\s)[+-]\s)?"
_LAST = re.compile(
    rf"{_SIGN}(?:{_FRAC}|(?<![\w^.])\d+\s+\d+\s*/\s*\d+|(?<![\w^])(?:{_PLAIN})(?:\s*/\s*(?:{_PLAIN}))?)\s*%?"
)
_TRAILING_UNIT = re.compile(
    rf"(?<=[\d}}])(?:\s+(?:{_UNIT}\b[\s./]*)+|\s*(?:km|cm|mm|kg|ml|mph|ft|lbs?)|\s*(?:°|\^\s*\{{?\s*\\circ\s*\}}?)\s*[CF]?)"
    r"(?:\^\s*\{?[23]\}?)?$",
    re.I,
)
_TEXT = re.compile(r"\\(?:text|mathrm|textbf|mbox)\s*\{\s*([^{}]*?)\s*\}")
_SCALES = {"dozen": 12, "hundred": 100, "thousand": 10**3, "million": 10**6, "billion": 10**9}
_SCALED = re.compile(rf"(?<=\d)\s*(?:\\text\s*\{{\s*)?({'|'.join(_SCALES)})\b", re.I)
_CHANGED = re.compile(r"half|quarter|third|factorial|squared|cubed|root", re.I)
"""Words that make another number of the one before them."""
_UNIT_TEXT = re.compile(r"(?<=\d)\s*\\(?:text|mathrm|textbf|mbox)\s*\{[^{}]*\}(?:\s*\^\s*\{?[23]\}?)?$")
_LIST_MARK = re.compile(r"^\s*[-*\u2022]\s+", re.M)
_WORDS = re.compile(r"(?=.*[A-Za-z]{2})[A-Za-z][A-Za-z0-9 ,.'-]*|\d+(?::\d+)+.*")
MAX_CHARACTERS = 200  # of a number with its unit
_SUPERSCRIPTS = dict(zip("⁰¹²³⁴⁵⁶⁷⁸⁹", "0123456789", strict=True))
_DASHES = {ord(c): "-" for c in "\u2010\u2011\u2012\u2013\u2212\uff0d\ufe63"}


def fold(text: str) -> str:
    """Full-width digits and signs, no-break spaces and typographic minuses as plain ones; superscripts as powers, and
    vulgar fractions apart from the number before them."""
    text = re.sub("[⁰¹²³⁴⁵⁶⁷⁸⁹]+", lambda m: "^" + "".join(_SUPERSCRIPTS[c] for c in m[0]), text)
    text = re.sub(r"(?<=\d)(?=[¼-¾⅐-⅞])", " ", text)
    return unicodedata.normalize("NFKC", text.translate(_DASHES)).translate({0x066B: ".", 0x2044: "/"})


def parse_number(text: str) -> Number | None:
    r"""The number that a text is, apart from units, money signs, and a leading `x =`; None if it is anything else.

    `1,234.50`, `\frac{3}{4}`, `3/4`, `1 1/2`, `$18`, `25\%`, `-7 \text{ cm}`, `x = 5`, `18 dollars`.
    """
    text = text.strip()
    if len(text) > MAX_CHARACTERS or _CHANGED.search(text):
        return None
    scale = _SCALED.search(text)
    if scale:
        text = text[: scale.start()] + text[scale.end() :].lstrip(" }")
    text = _tidy(text)
    text = re.sub(r"^[a-z]\s*=\s*", "", text, flags=re.I).rstrip(".").strip()
    percent = text.endswith("%")
    if percent:
        text = text.rstrip("%").rstrip("\\").strip()
    text = _TRAILING_UNIT.sub("", _UNIT_TEXT.sub("", text)).strip()
    match = _WHOLE.fullmatch(_TEXT.sub(r"\1", text))
    if match is None:
        return None
    try:
        value = (-1 if match[1] == "-" else 1) * _magnitude(match)
    except ZeroDivisionError:
        return None
    return Number(value * (_SCALES[scale[1].lower()] if scale else 1), percent)


def last_number(text: str) -> Number | None:
    """The last number in a text; a dash before a list's item, and an exponent of a unit, are none."""
    text = _tidy(_LIST_MARK.sub("", re.sub(r"\s[-]\s", " : ", text) if "=" not in text else text))
    found = [match[0] for match in _LAST.finditer(text)]
    return parse_number(re.sub(r"^([+-])\s+", r"\1", found[-1].strip())) if found else None


def _tidy(text: str) -> str:
    r"""Without money signs, `\left` and `\right`; `{,}` as a comma, and a small space between digits as none."""
    text = re.sub(r"\\?[$€£¥]", "", text)
    text = re.sub(r"(?<=\d)(?:\\[!,;:]|\{,\}|\{\\,\})(?=\d{3})", ",", text)
    text = re.sub(r"(?<![\d.])(\d{1,3})((?: \d{3})+)(?![\d])", lambda m: m[0].replace(" ", ","), text)
    return re.sub(r"\\[!,;: ]|~|\\left|\\right", " ", text).strip()


def _marked(text: str) -> str | None:
    """What is in the last box, else on the line after the last `####`; None if there is neither."""
    box = last_box(text)
    if box is not None:
        return box
    _, mark, after = text.rpartition("####")
    return after.strip().splitlines()[0] if mark and after.strip() else None


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
    if _CHANGED.search(answer) and wanted is not None:
        return False  # the symbolic grader drops words
    if _WORDS.fullmatch(_TEXT.sub(r"\1", reference)):
        return False  # the symbolic grader would take letters for symbols, and cat for act
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
    """Without what does not change the meaning: spaces (not between digits or words), display sizes, a full stop."""
    text = _TEXT.sub(r"\1", text)
    text = re.sub(r"\\left|\\right|\\[!,;: ]|(?<=\\)[dt](?=frac)|\$", "", text)
    return re.sub(r"(?<!\w)\s+|\s+(?!\w)", "", text).strip().rstrip(".").lower()
