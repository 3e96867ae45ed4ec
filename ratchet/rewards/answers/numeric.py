"""A reward that compares the answer's final number with the task's, as exact rationals.

Model output is untrusted: it is matched by linear-time patterns and never evaluated. A number
longer than MAX_DIGITS, or with an exponent beyond it, is unreadable.
"""

from __future__ import annotations

import re
import unicodedata
from collections import deque
from fractions import Fraction
from typing import ClassVar

from pydantic import Field

from ratchet.config.base import Section
from ratchet.errors import DataError
from ratchet.rewards.base import FinalAnswer
from ratchet.types import Task


class NumericAnswerConfig(Section):
    """A reward of 1 if the answer's final number equals the task's, else 0."""

    builds: ClassVar[str] = "ratchet.rewards.answers.numeric:NumericAnswer"

    require_marker: bool = False
    r"""True: only a number after "####" or in \boxed{} counts."""
    tolerance: float = Field(0.0, ge=0)
    """Largest difference that counts as equal: absolute if the task's number is within ±1, else
    relative to it."""


MAX_DIGITS = 400  # maximum characters of a number, and maximum size of an exponent

# (?>...) never gives back what it matched. With an ordinary group, 100 kB of digits could cost
# quadratic time.
WHOLE = r"(?>[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)"
DECIMAL = rf"(?>{WHOLE}(?:\.[0-9]+)?|(?<!\.)\.[0-9]+)"
# A currency between a minus and its number: -$5, -US$5, -USD 5.
CURRENCY = r"(?:(?:US|CA|AU|HK)?[$€£¥₹]|(?:USD|EUR|GBP|JPY|CNY|RMB|INR|CAD|AUD|CHF)[ ]?)"
SCALES = {"hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12}
SCALE = rf"(?i:{'|'.join(SCALES)})(?![A-Za-z])"
NUMBER = re.compile(
    # A sign after a word, digit or bracket is an operator. Digits inside a word (H2O) don't count.
    rf"""(?: (?<![\w)\]}}]) (?P<sign> [$€£¥₹]?[-+]{CURRENCY}? ) | (?<!\w) )
    (?: (?: (?P<mixed>{WHOLE})[ ] )? (?P<above>{DECIMAL}) / (?P<below>{DECIMAL})
      | (?P<plain>{DECIMAL}) (?: [eE] (?P<exponent>[-+]?[0-9]+) )? )
    (?P<scale> (?: [ ]?{SCALE} )* )""",
    re.VERBOSE,
)
# Text before or after a number that makes the number a part of an expression, or a bound.
EXPRESSION_BEFORE = re.compile(
    r"(?:\^|sqrt|√|[-−](?=\()|[≤≥±<]|[<>]="
    r"|\\(?:log|ln|exp|sin|cos|tan|[lg]eq?|neq?|pm|mp)(?![a-zA-Z]))[{( ]*$"
)
EXPRESSION_AFTER = re.compile(r"[ *]*(?:π|√|\\(?:pi|sqrt)\b|\^(?!\{?\\circ))")

# A minus that stands apart from its number: "- 5", "-€5", "-\text{5}". A minus after a word is a
# dash.
MINUS_BEFORE = re.compile(r"(?:^|[=:$({\[])\s*-(?:\\[a-zA-Z]+|[^\w+/=<>^-])*$")
# "It is minus 5", but not the operator of "8 minus 5". Also "x = - 5" and "<answer>- 5".
MINUS_WORD = re.compile(
    r"(?:(?:^|[=:>$({\[*]|(?<![\d)\]}])\s)(?i:minus|negative)\s*|[=>][ ]?-[ ])[$€£¥₹]?$"
)
MINUS_BEFORE_BOX = re.compile(r"(?:[=$({\[]\s*-\s*|(?:^|(?<![\d)}\]])\s)-)$")
MINUS_SIGNS = re.compile("[−–﹣－‐‑]|\\\\textminus(?![a-zA-Z])")

SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻", "0123456789+-")
# Powers and fractions that are characters of their own: 10⁴, 1½, 3⁄4.
SYMBOLS = re.compile("(?P<power>[⁺⁻]?[⁰¹²³⁴-⁹]+)|(?P<fraction>[¼-¾⅐-⅞↉])|⁄")

FRACTION = r"\\[dt]?frac\{([^{}]*)\}\{([^{}]*)\}"
LATEX_REPLACEMENTS = (
    (re.compile(r"<([-+$]?[0-9][0-9.,]*)>"), r"\1"),  # a placeholder's brackets
    (re.compile(r"(\\[dt]?frac) ?([0-9]) ?([0-9])"), r"\1{\2}{\3}"),
    (re.compile(rf"(?<=[0-9]) ?{FRACTION}"), r" \1/\2"),  # a mixed number
    (re.compile(FRACTION), r"\1/\2"),
    # The next two: thousands separators (1{,}000, 1,\!000, 1\,000). The second also turns \$ and \%
    # into $ and %.
    (re.compile(r"\{,\}"), ","),
    (re.compile(r"\\(?:[!,]|(?=[$%]))"), ""),
    (MINUS_SIGNS, "-"),
    (re.compile(rf"\\(?:text|mathrm)\{{ ?({SCALE})([^{{}}]*)\}}"), r" \1\2"),
    # the power of a unit: 5 cm^2, 5\text{ m}^2
    (
        re.compile(
            r"(\\(?:text|mathrm)\{[^{}0-9]*\}|(?<![A-Za-z\\])(?:[A-Za-z]{2,}|m|s))\^(?:\{-?[1-9]\}|[1-9])"
        ),
        r"\1",
    ),
)
# a heading (#### Step 2) is not a marker
HASHES = re.compile(
    rf"####[ \t]*(?=(?:[$€£¥₹+*_-]|(?<=[-$€£¥₹])[ ]|(?i:(?:minus|negative)[ ]))*{DECIMAL})([^\n]*)"
)
BOXED = "\\boxed{"


class NumericAnswer(FinalAnswer):
    name = "numeric_answer"
    bounds = (0.0, 1.0)

    def __init__(self, config: NumericAnswerConfig) -> None:
        self.config = config

    def answer(self, text: str) -> str | None:
        number = extract_final_number(text, require_marker=self.config.require_marker)
        return None if number is None else str(number)

    def grade(self, text: str, task: Task) -> float:
        """Return 1 if the numbers are equal, else 0. Raises DataError if the task has no number."""
        gold = read_number(str(task.answer))
        if gold is None:
            raise DataError(
                f"task '{task.id}': its answer '{str(task.answer)[:100]}' is not a number"
            )
        number = extract_final_number(text, require_marker=self.config.require_marker)
        tolerance = Fraction(self.config.tolerance) * max(1, abs(gold))
        return float(number is not None and abs(number - gold) <= tolerance)


def extract_final_number(text: str, *, require_marker: bool = False) -> Fraction | None:
    """Return the final number of `text`; None if there is none.

    It is the number after the last "####" or in the last \\boxed{}, whichever comes later. Without
    a mark it is the last number anywhere, or None with `require_marker`. A marked answer must hold
    exactly one number: "#### 4 or 5" is None.
    """
    text = _remove_latex(text)
    hashes = find_last_match(HASHES, text)
    boxed = text.rfind(BOXED)
    if hashes is not None and hashes.start() > boxed:
        return _read_single(hashes.group(1))
    if boxed >= 0:
        number = _read_single(_read_braces(text[boxed + len(BOXED) :]))
        return -number if number and has_minus_before_box(text, boxed) else number
    if require_marker:
        return None
    number = find_last_match(NUMBER, text)
    value = number and _evaluate(number)
    return -value if number and value and follows_minus_word(text, number) else value


def read_number(text: str) -> Fraction | None:
    """Return the only number in `text`; None if there is not exactly one.

    Signs, thousands commas, decimals, exponents, fractions (3/4, \\frac{3}{4}), mixed numbers
    (1 1/2) and words of scale (5 million) are read. Currency, units and per cent around it are
    ignored (50% is 50). A number longer than MAX_DIGITS, or in a power, a root, a logarithm, a
    multiple of pi or a bound (\\leq 5, <5; not >5, which may end a tag), is None.
    """
    return _read_single(_remove_latex(text))


def parse_bare_number(text: str) -> Fraction | None:
    """Return the value of a text that is one number and nothing else (no unit), else None."""
    match = NUMBER.fullmatch(_remove_latex(text).strip())
    return _evaluate(match) if match else None


def spell_symbols(text: str) -> str:
    """Return a text with powers and fractions that are single characters (², ½) as LaTeX."""
    return text if text.isascii() else SYMBOLS.sub(_spell_symbol, text)


def _spell_symbol(symbol: re.Match[str]) -> str:
    if symbol["power"]:
        return f"^{{{symbol['power'].translate(SUPERSCRIPTS)}}}"
    if symbol["fraction"]:
        above, below = unicodedata.normalize("NFKC", symbol["fraction"]).split("⁄")
        return f"\\frac{{{above}}}{{{below}}}"
    return "/"


def _remove_latex(text: str) -> str:
    text = spell_symbols(text)
    for pattern, replacement in LATEX_REPLACEMENTS:
        text = pattern.sub(replacement, text)
    return text


def find_last_match(pattern: re.Pattern[str], text: str) -> re.Match[str] | None:
    """Return the last match of a pattern in a text, if any."""
    last = deque(pattern.finditer(text), maxlen=1)
    return last[0] if last else None


def _read_single(text: str) -> Fraction | None:
    numbers = NUMBER.finditer(text)
    first = next(numbers, None)
    if first is None or next(numbers, None) is not None:
        return None
    value = _evaluate(first)
    start = first.start()
    has_minus = not first["sign"] and MINUS_BEFORE.search(text, max(0, start - 64), start)
    return -value if value and (has_minus or follows_minus_word(text, first)) else value


def follows_minus_word(text: str, number: re.Match[str]) -> bool:
    """True if "minus", or a minus that stands apart, is before a number without a sign."""
    start = number.start()
    return not number["sign"] and MINUS_WORD.search(text, max(0, start - 24), start) is not None


def has_minus_before_box(text: str, start: int) -> bool:
    """True if the box that starts at `start` is negated, as in "x = -\\boxed{5}".

    The minus of an item of a list and that of a subtraction don't count.
    """
    before = MINUS_SIGNS.sub("-", text[max(0, start - 16) : start])
    return MINUS_BEFORE_BOX.search(before) is not None


def _read_braces(text: str) -> str:
    """Return `text` up to the brace that closes it; "" if there is none.

    The opening brace stands just before `text`.
    """
    depth = 1
    for brace in re.finditer(r"[{}]", text):
        depth += 1 if brace.group() == "{" else -1
        if depth == 0:
            return text[: brace.start()]
    return ""


def _evaluate(match: re.Match[str]) -> Fraction | None:
    """Return the value of a match of NUMBER; None if it is too long or part of an expression."""
    start, end = match.span()
    context = match.string
    if (
        end - start > MAX_DIGITS
        or EXPRESSION_BEFORE.search(context[max(0, start - 16) : start])
        or EXPRESSION_AFTER.match(context, end)
    ):
        return None
    mixed, numerator, denominator, plain, exponent = (
        match[g] for g in ("mixed", "above", "below", "plain", "exponent")
    )
    is_negative = "-" in (match["sign"] or "")
    if plain is not None:
        if abs(int(exponent or 0)) > MAX_DIGITS:
            return None
        value = _parse_decimal(plain) * Fraction(10) ** int(exponent or 0)
    else:
        if not _parse_decimal(denominator):
            return None
        value = _parse_decimal(mixed or "0") + _parse_decimal(numerator) / _parse_decimal(
            denominator
        )
    for scale in re.findall(SCALE, match["scale"]):
        value *= 10 ** SCALES[scale.lower()]
    return -value if is_negative else value


def _parse_decimal(decimal: str) -> Fraction:
    return Fraction(decimal.replace(",", ""))
