"""Compare LaTeX answers by computer algebra, in the workers of the reward `math`.

Only the LaTeX grammar of math-verify is used, which evaluates no Python. Its parser of plain
expressions calls `eval`.
"""

from __future__ import annotations

import logging
import re
from typing import Any

from latex2sympy2_extended.sets import FiniteSet
from math_verify import LatexExtractionConfig, parse, verify
from math_verify.grader import sort_key
from sympy import And, Tuple
from sympy.core.relational import Relational

from ratchet.rewards.answers.final_answer import SUM, UNITS

# These loggers warn about every answer that can't be parsed, and that timeouts are disabled.
for name in ("math_verify", "latex2sympy2_extended"):
    logging.getLogger(name).setLevel(logging.CRITICAL + 1)
LATEX = (LatexExtractionConfig(boxed_match_priority=0),)
# A repeating decimal such as 0.1\overline{6}, which math-verify can't parse.
REPEATING = re.compile(r"([0-9]*)\.([0-9]*)\\(?:overline|bar)\s*\{([0-9]+)\}(?!\s*_)")
# A formula inside a sentence.
FORMULA = re.compile(r"\$[^$]+\$|\\\(.*?\\\)|\\\[.*?\\\]", re.DOTALL)
# math-verify reads only the last equation of "x=1 \lor x=2".
CONNECTIVE = re.compile(r"\\(?:lor|vee|land|wedge)(?![a-zA-Z])")
# Spellings that math-verify can't parse.
REPLACEMENTS = ((r"\log_e", r"\ln "), (r"\langle", "("), (r"\rangle", ")"))
# Variables at the end of an answer, which math-verify takes for units and leaves out.
VARIABLES = re.compile(r"(?<![A-Za-z\\])(?:[cdghlmost]s?|ab|bc|by|cc|dm|gm|lt|mt|rs|st)$")
COMMAND = re.compile(r"\\[A-Za-z]+")
PRIMES = re.compile(r"(?<=[A-Za-z])(?:('+)|\^\{?\s?\\prime\s?\}?)")
EXPONENT = re.compile(r"([-+]?[0-9]+(?:\.[0-9]+)?)[eE]([-+]?[0-9]{1,3})")


def equal(answer: str, gold: str) -> bool:
    """True if two LaTeX texts are the same number, expression, set, interval, matrix or equation.

    Text that can't be parsed, or needs too much memory, equals nothing.
    """
    try:
        parsed_gold, parsed_answer = parse_latex(gold), parse_latex(answer)
        return (
            bool(parsed_gold)
            and bool(parsed_answer)
            and verify(
                parsed_gold,
                parsed_answer,
                timeout_seconds=None,
                allow_set_relation_comp=is_solved(parsed_answer[0]),
            )
            and ("\\{" in answer + gold or repeat_equally(parsed_gold[0], parsed_answer[0]))
        )
    # A parser's bug on one answer must not stop the run. The check at the end of this module
    # catches a parser that fails on every answer.
    except Exception:
        return False


def repeat_equally(gold: Any, answer: Any) -> bool:
    """False if a list repeats other elements than the other: 1,1,2 is not 1,2,2, nor 1,2.

    math-verify compares lists as sets.
    """
    sets: list[Any] = [x for x in (gold, answer) if isinstance(x, FiniteSet)]
    if all(len(x._unsorted_args) == len(x.args) for x in sets):
        return True
    lists = [x._unsorted_args if x in sets else [x] for x in (gold, answer)]
    gold_elements, elements = (Tuple(*sorted(elements, key=sort_key)) for elements in lists)
    return verify(gold_elements, elements, timeout_seconds=None)


def is_solved(parsed: object) -> bool:
    """True for bounds of a variable by numbers, as x >= 1 and 1 < x < 2, which are intervals.

    Any inequality equals the set of its solutions, but an answer must not repeat the question.
    """
    bounds = parsed.args if isinstance(parsed, And) else (parsed,)
    return all(
        isinstance(bound, Relational)
        and any(side.is_Symbol for side in bound.args)
        and any(not side.free_symbols for side in bound.args)
        for bound in bounds
    )


def parse_latex(latex: str) -> list:
    """Return what the text means as a whole, or what the one formula of a sentence means.

    math-verify would otherwise take the last fraction or formula of a text that it can't parse for
    the whole: "1/2" for "x \\mapsto \\frac{1}{2}".
    """
    is_sentence = len(FORMULA.findall(latex)) == 1
    latex = EXPONENT.sub(_spell_exponent, latex) if EXPONENT.fullmatch(latex.strip()) else latex
    for spelling, replacement in REPLACEMENTS:
        latex = latex.replace(spelling, replacement)
    latex = _keep_variables(PRIMES.sub(_spell_primes, latex))
    latex = CONNECTIVE.sub(r"\\text{ or }", REPEATING.sub(_make_fraction, _spell_ratio(latex)))
    return parse(
        f"\\boxed{{{latex}}}",
        extraction_config=LATEX,  # pyright: ignore
        fallback_mode="no_fallback",
        extraction_mode="any_match" if is_sentence else "first_match",
        parsing_timeout=None,  # pyright: ignore
    )


def _spell_primes(primes: re.Match[str]) -> str:
    """Return primes as an index, since math-verify takes f' for f."""
    return f"_{{{'p' * len(primes[1] or 'p')}}}"


def _keep_variables(latex: str) -> str:
    """Return an answer that ends with a variable, as 2+3t, with this in braces, which protect it.

    The letter of "5 m" is a unit, and so is that of "1+2 m", but not that of "1+2m" and "n+2 m".
    """
    latex = latex.rstrip()
    variables = VARIABLES.search(latex)
    if variables is None:
        return latex
    name, before = variables[0], latex[: variables.start()]
    value = COMMAND.sub("", before.rpartition("=")[2])
    is_number = not any(letter.isalpha() for letter in value)
    is_unit = is_number and (before[-1:].isspace() or not SUM.search(value))
    return latex if name in UNITS and is_unit else f"{before}{{{name}}}"


def _spell_ratio(latex: str) -> str:
    """Return a ratio such as 1:2:3 as a tuple of fractions, (2/1, 3/1).

    math-verify divides, so that 1:2:3 and 1:3:2 are both 1/6.
    """
    first, *others = latex.rpartition("=")[2].split(":")
    if len(others) < 2:
        return latex
    fractions = ",".join(f"\\frac{{{part}}}{{{first}}}" for part in others)
    return f"({fractions})"


def _spell_exponent(number: re.Match[str]) -> str:
    return f"{number[1]}\\times 10^{{{int(number[2])}}}"


def _make_fraction(decimal: re.Match[str]) -> str:
    """Return a repeating decimal as a fraction."""
    whole, fixed, period = decimal.groups()
    numerator = int(whole + fixed + period) - int(whole + fixed or "0")
    return f"\\frac{{{numerator}}}{{{10 ** len(fixed) * (10 ** len(period) - 1)}}}"


if not equal(r"\frac{2}{4}", "0.5") or equal("x+1", "x+2"):
    raise RuntimeError(
        "math-verify does not work here: it can't tell that 2/4 is 0.5 and x+1 is not x+2"
    )
# The first use of each part of computer algebra takes up to half a second of processor time. It is
# spent here, so that the time limit of an answer doesn't depend on whether its worker is new.
for first_use in (
    (r"(x+1)^2", "x^2+2x+1"),
    (r"\sin^2 x+\cos^2 x", "1"),
    (r"\log_2 8", "3"),
    (r"\int_0^1 x dx", "0.5"),
    ("[1,2)", r"x \ge 1"),
    (r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}", r"\begin{pmatrix} 1 \\ 3 \end{pmatrix}"),
):
    equal(*first_use)
