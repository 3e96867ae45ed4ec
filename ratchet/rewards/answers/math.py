"""Reward answers that are mathematically equal to the task's."""

from __future__ import annotations

import logging
import re
from collections.abc import Awaitable
from fractions import Fraction
from importlib.util import find_spec
from typing import ClassVar, Literal

from pydantic import Field

from ratchet.config.base import Section
from ratchet.errors import MissingDependency, suggest_install
from ratchet.rewards.answers.boxed import get_gold_answer
from ratchet.rewards.answers.final_answer import (
    MAX_ANSWER_CHARS,
    UNITS,
    canonicalize,
    end_with_different_suffixes,
    extract_marked_answer,
    is_same_answer,
    name_different_variables,
    normalize_spelling,
    spell_latex,
)
from ratchet.rewards.answers.numeric import (
    MINUS_SIGNS,
    NUMBER,
    find_last_match,
    follows_minus_word,
    parse_bare_number,
)
from ratchet.rewards.base import FinalAnswer
from ratchet.rewards.process_pool.pool import ProcessorTimeExceeded, RewardWorkers
from ratchet.types import Task
from ratchet.utils.arithmetic import NotAnExpression, evaluate


class MathConfig(Section):
    """A reward of 1 for an answer that is mathematically equal to the task's.

    Answers may be LaTeX, numbers, sets, intervals, matrices or equations.
    """

    builds: ClassVar[str] = "ratchet.rewards.answers.math:Math"

    symbolic: Literal["auto", "required", "never"] = "auto"
    """Use of computer algebra (math-verify). auto: if it is installed; without it, only spellings
    and numbers are compared. required: an error without it."""
    require_marker: bool = False
    r"""True: only an answer after "####", in <answer> or \boxed{} counts."""
    timeout_s: float = Field(3.0, gt=0)
    """Processor time limit of one answer, in seconds; an answer that takes longer earns 0."""


log = logging.getLogger(__name__)
FORMULA = re.compile(r"\$\$?(?P<a>[^$]+)\$\$?|\\\((?P<b>(?>(?:[^\\]+|\\(?![()]))*))\\\)")
PACKAGE = "math_verify"
MAX_ALGEBRA_CHARS = 500  # a longer text is not a final answer, and takes seconds to parse
WORD = re.compile(r"[A-Za-z]{3,}")
# The words before a formula without dollar signs: "The answer is \\frac{1}{2}."
LEADING_WORDS = re.compile(
    r"^(?:(?!(?:sin|cos|tan|log|ln|exp|max|min|gcd|lcm|pi)\b)"
    r"[*]{0,2}[A-Za-z][A-Za-z'’]+[:,]?[*]{0,2}[:,]?\s+)+"
)
DECIMALS = re.compile(r"\.[0-9]*[1-9]")
ROMAN_NUMERAL = re.compile(r"[IVXLCDM]{2,}")
# A modulus that stands apart: 7 \\pmod{10} and 7 (\\text{mod }10).
MODULUS = re.compile(
    r"(?<!\s)(?:\s|\\[,;: ]|\\q?quad)*+"
    r"(?:\\pmod\s*\{?|\((?:\\b?mod(?![a-z])|\\text\{\s*mod\s*\}|mod\b))"
    r"\s*([^{}()]{1,50}?)\s*[})]?\s*$"
)
WITH_BASE = re.compile(r"[0-9A-Z]+_\{?([0-9]+)\}?")
# A set, and a tuple or an open interval, without others inside, perhaps after "x in".
SET = re.compile(r"(?:[^\\]{1,8}\\in)?\\\{[^()\[\],]*,[^()\[\]]*\\\}")
TUPLE = re.compile(r"(?:[^\\]{1,8}\\in)?\([^()\[\],]*,[^()\[\]]*\)")
# Matches answers to several parts, "(a) 5 (b) 6", which math-verify multiplies.
PARTS = re.compile(r"\((?:a|i|1)\)\s*[^()\s].*\((?:b|ii|2)\)\s*[^()\s]", re.DOTALL)
SPACES = r"(?:\s|~|\\[,;: ])*"
# Matches "5 6", which math-verify adds up to 11, but not "\\log_2 8"; and "2\\text{ hours }30", of
# which it takes the first number.
SIDE_BY_SIDE = re.compile(
    r"(?<![_0-9])[0-9]+(?:\s|\\(?:[,;: ]|q?quad))+[0-9]"
    rf"|[0-9]{SPACES}\\(?:text|mathrm)\{{\s*(?:{'|'.join(UNITS)})\b[^{{}}]*\}}{SPACES}[0-9]"
)
CAPITAL = re.compile(r"\W*[A-Z]\W*")
# Matches what math-verify misreads: it subtracts or divides the numbers of a date, joins those of
# 5'6'', multiplies the points of an angle or a triangle, and leaves out dots.
MISREAD = re.compile(
    r"(?<![0-9])[0-9]{4}([-/])[0-9]{1,2}\1[0-9]{1,2}(?![0-9])"
    r"|(?<![0-9])[0-9]{1,2}([-/])[0-9]{1,2}\2[0-9]{4}(?![0-9])"
    r"|[0-9]\s*(?:'|\^?\{?\\prime)"
    r"|\\(?:angle|triangle)(?![a-zA-Z])[^=]*$"
    r"|\\[lc]?dots[bcm]?(?![a-zA-Z])|\.\.\.|…"
)


class Math(FinalAnswer):
    """A reward that compares spellings, then numbers, then uses computer algebra (math-verify).

    Algebra runs in processes that can be killed: an answer that exceeds the time limit earns 0.
    """

    name = "math"
    bounds = (0.0, 1.0)

    def __init__(self, config: MathConfig) -> None:
        self.config = config
        self._workers = None
        if config.symbolic == "never":
            return
        if find_spec(PACKAGE) is not None:
            self._workers = RewardWorkers(
                "ratchet.rewards.answers.math_worker:equal", cpu_s=config.timeout_s
            )
        elif config.symbolic == "required":
            raise MissingDependency(
                "math-verify", extra="rewards", needed_for="reward math with symbolic=required"
            )
        else:
            log.warning(
                "reward math compares spellings and numbers only: for algebra, %s",
                suggest_install("rewards"),
            )

    def answer(self, text: str) -> str | None:
        """Return the answer in a canonical spelling; None if the text has none.

        Answers that only algebra finds equal count as different.
        """
        answer = self._extract_answer(text)
        return canonicalize(answer) if answer else None

    def _extract_answer(self, text: str) -> str | None:
        marked = extract_marked_answer(text)
        return (
            extract_formula(text) if marked is None and not self.config.require_marker else marked
        )

    def grade(self, text: str, task: Task) -> Awaitable[float]:
        return self._grade(text, get_gold_answer(task))

    async def _grade(self, text: str, gold: str) -> float:
        answer, modulus = _split_modulus(self._extract_answer(text) or "")
        gold, gold_modulus = _split_modulus(gold)
        if (
            not answer
            or (modulus and gold_modulus and modulus != gold_modulus)
            or name_different_variables(answer, gold)
            or end_with_different_suffixes(answer, gold)
            or _is_false_equation(answer)
        ):
            return 0.0
        if is_same_answer(answer, gold):
            return 1.0
        if _is_word(gold):
            return float(_spell_word(answer) == _spell_word(gold))
        if (
            self._workers is None
            or len(answer) > MAX_ALGEBRA_CHARS
            or any(SIDE_BY_SIDE.search(text) or MISREAD.search(text) for text in (answer, gold))
            or PARTS.search(answer)
            or _are_plain_numbers(answer, gold)
            or _has_different_base(answer, gold)
            or _are_set_and_tuple(answer, gold)
        ):
            return 0.0
        if CAPITAL.fullmatch(normalize_spelling(gold)):  # perhaps a choice
            answer, gold = _spell_word(answer), _spell_word(gold)
        try:
            return float(await self._workers.call(spell_latex(answer), spell_latex(gold)))
        except ProcessorTimeExceeded:
            return 0.0


def extract_formula(text: str) -> str | None:
    """Return the last $...$ or \\(...\\) of a text, or its last number if that comes later.

    A text without a formula or number is itself the formula if it is one short line.
    """
    text = MINUS_SIGNS.sub("-", text)
    formula = find_last_match(FORMULA, text)
    number = find_last_match(NUMBER, text)
    if number is not None and (formula is None or number.end() > formula.end()):
        is_only_number = not re.search(r"[^\W\d_]{2}|\n", text.strip()) or "\\" in text
        if formula is None and is_only_number and len(text) < 200:
            return LEADING_WORDS.sub("", text.strip(" \t\n*")).strip(" *")
        sign = "-" if follows_minus_word(text, number) else ""
        return f"{sign}{number.group()}"
    if formula is not None:
        return (formula["a"] or formula["b"])[:MAX_ANSWER_CHARS]
    return text.strip() if len(text) < 200 and "\n" not in text.strip() else None


def _is_false_equation(answer: str) -> bool:
    """True if an answer equates different numbers, as "5=6" and "2+3=6".

    Algebra takes its last side. A side with decimals may be rounded, as in "1/3=0.33".
    """
    if "=" not in answer or "%" in answer or DECIMALS.search(answer):  # 1 = 100 %
        return False
    sides = normalize_spelling(answer).split("=")
    try:
        return len({_evaluate_side(side) for side in sides}) > 1
    except NotAnExpression:
        return False


def _evaluate_side(side: str) -> Fraction:
    """Return the value of a number or of arithmetic. Raises NotAnExpression for other text."""
    number = parse_bare_number(side)
    return evaluate(side)[0] if number is None else number


def _is_word(gold: str) -> bool:
    """True if an answer is a word, of which algebra makes a product: "seat" would equal "east".

    So is a Roman numeral. Letters in alphabetical order, as abc and xyz, are taken for a product.
    """
    letters = normalize_spelling(gold)
    is_product = list(letters) == sorted(letters)
    is_word = WORD.fullmatch(letters) is not None and not is_product
    return is_word or ROMAN_NUMERAL.fullmatch(letters) is not None


def _spell_word(answer: str) -> str:
    return normalize_spelling(answer).casefold()


def _split_modulus(answer: str) -> tuple[str, str]:
    """Return an answer without its modulus, and the modulus; "" if it has none."""
    modulus = MODULUS.search(answer)
    if modulus is None:
        return answer, ""
    return answer[: modulus.start()].replace("\\equiv", "=").strip(), modulus[1].strip()


def _has_different_base(answer: str, gold: str) -> bool:
    """True if an answer is a numeral with a base, such as 101_2, and the gold answer has another.

    Algebra ignores the base. A gold answer without a base is decimal.
    """
    answer_base, gold_base = (WITH_BASE.fullmatch(normalize_spelling(x)) for x in (answer, gold))
    return answer_base is not None and answer_base[1] != (gold_base[1] if gold_base else "10")


def _are_set_and_tuple(a: str, b: str) -> bool:
    """True if one answer is a set and the other a tuple or open interval, as {1,2} and (1,2).

    Algebra takes both for a list.
    """
    a, b = normalize_spelling(a), normalize_spelling(b)
    return any(SET.fullmatch(x) and TUPLE.fullmatch(y) for x, y in ((a, b), (b, a)))


def _are_plain_numbers(a: str, b: str) -> bool:
    """True if both answers are plain numbers, which computer algebra need not compare.

    Percentages are left to algebra, as 50 % may equal 0.5.
    """
    if "%" in a + b:
        return False
    return all(parse_bare_number(normalize_spelling(text)) is not None for text in (a, b))
