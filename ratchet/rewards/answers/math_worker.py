"""Compare LaTeX answers by computer algebra, in the workers of the reward `math`.

Only the LaTeX grammar of math-verify is used, which evaluates no Python. Its parser of plain
expressions calls `eval`.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from typing import Any

from latex2sympy2_extended.logic import And as Chain
from latex2sympy2_extended.sets import FiniteSet
from math_verify import LatexExtractionConfig, parse, verify
from math_verify.grader import sort_key, unwrap_eq
from sympy import And, Eq, Float, I, Interval, MatrixBase, Rational, Symbol, Tuple, Union
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
# Inequalities of which one must hold, which math-verify takes for a set of inequalities.
ALTERNATIVES = re.compile(r"\bor\b|\\(?:lor|vee)(?![a-zA-Z])")
JOINED = re.compile(r"\band\b|\\(?:land|wedge)(?![a-zA-Z])|,")
# The set of the real numbers that satisfy a condition: \{x \mid 1 < x\}.
SET_BUILDER = re.compile(
    r"\s*\\\{\s*([A-Za-z])\s*(?:\\in\s*\\(?:mathbb|mathbf)\s*\{?R\}?\s*)?"
    r"(?:\||:|\\(?:mid|vert|colon)(?![a-zA-Z]))((?:[^{}|:]|\\text\{[^{}]*\})*)\\\}\s*"
)
# Spellings that math-verify can't parse.
REPLACEMENTS = (
    (r"\log_e", r"\ln "),
    (r"\lg ", r"\log_{10} "),
    (r"\langle", "("),
    (r"\rangle", ")"),
    (r"\leqslant", r"\leq "),
    (r"\geqslant", r"\geq "),
)
# A fraction or a root without braces, which math-verify can't parse.
BARE_FRACTION = re.compile(r"(\\[dt]?frac)\s*(\\pi)\s*([0-9])")
BARE_ROOT = re.compile(r"\\sqrt\s*(\\[dt]?frac\s*(?:[0-9]\s*[0-9]|\{[^{}]*\}\s*\{[^{}]*\}))")
# An angle in degrees, of which math-verify takes the sine as if it were in radians.
DEGREES = re.compile(
    r"(\\(?:sin|cos|tan|cot|sec|csc)(?![a-zA-Z])(?:\^\{?[0-9]\}?)?)\s*([({]?)\s*"
    r"(-?[0-9]+(?:\.[0-9]+)?)\s*(?:\^\s*\{?\s*\\circ\s*\}?|\\degree|°)\s*([)}]?)"
)
# A formula with one sign of two values inside of braces.
PLUS_MINUS = re.compile(r"[^,]*\{[^,]*\\(pm|mp)(?![a-zA-Z])[^,]*")
# Decimal places to which numbers must agree. A difference below 10^-100 counts as 0.
PRECISION = 100
# Variables at the end of an answer, which math-verify takes for units and leaves out.
VARIABLES = re.compile(r"(?<![A-Za-z\\])(?:[cdghlmost]s?|ab|bc|by|cc|dm|gm|lt|mt|rs|st)$")
COMMAND = re.compile(r"\\[A-Za-z]+")
TEXT = r"\\(?:text|mathrm|textbf|operatorname)\{[^{}]{2,}\}"
NO_VARIABLES = re.compile(rf"{TEXT}|\\[A-Za-z]+|[0-9][eE]")
COMMAND_OR_CAPITAL = re.compile(rf"{TEXT}|\\[A-Za-z]+|[A-Z]")
PRIMES = re.compile(r"(?<=[A-Za-z])(?:('+)|\^\{?\s?\\prime\s?\}?)")
EXPONENT = re.compile(r"([-+]?[0-9]+(?:\.[0-9]+)?)[eE]([-+]?[0-9]{1,3})")


def equal(answer: str, gold: str) -> bool:
    """True if two LaTeX texts are the same number, expression, set, interval, matrix or equation.

    Text that can't be parsed, or needs too much memory, equals nothing.
    """
    try:
        gold, answer = _rename_capitals(gold, answer)
        parsed_gold, parsed_answer = parse_latex(gold), parse_latex(answer)
        if not parsed_gold or not parsed_answer:
            return False
        is_list = "\\{" not in answer + gold
        x, y = _make_vectors(make_exact(parsed_gold[0]), make_exact(parsed_answer[0]))
        return are_equal(x, y, is_list) or (
            _is_complex(x)
            and _is_complex(y)
            and are_equal(_rewrite(x, _make_imaginary), _rewrite(y, _make_imaginary), is_list)
        )
    # A parser's bug on one answer must not stop the run. The check at the end of this module
    # catches a parser that fails on every answer.
    except Exception:
        return False


def _rename_capitals(*answers: str) -> list[str]:
    """Return the answers with X renamed where x occurs too, since math-verify ignores the case."""
    letters = set(NO_VARIABLES.sub("", "".join(answers)))
    unused = [letter for letter in "kpqnuvwxyzabfghjrst" if not letters & {letter, letter.upper()}]
    capitals = sorted(x for x in letters if x.isupper() and x.lower() in letters)
    names = dict(zip(capitals, unused, strict=False))
    return [
        COMMAND_OR_CAPITAL.sub(lambda x: names.get(x[0], x[0]), answer) if names else answer
        for answer in answers
    ]


def are_equal(gold: Any, answer: Any, is_list: bool) -> bool:
    """True if two parsed answers are equal, and as often repeat their elements if `is_list`."""
    return (
        verify(
            gold,
            answer,
            numeric_precision=PRECISION,
            timeout_seconds=None,
            allow_set_relation_comp=is_solved(answer),
        )
        and not _are_different_rationals(gold, answer)
        and (not is_list or repeat_equally(gold, answer))
    )


def make_exact(parsed: Any) -> Any:
    """Return a parsed answer with each decimal as the fraction that it states.

    math-verify rounds decimals to six places, so that 10^-8 would equal 0.0.
    """
    return _rewrite(parsed, lambda x: Rational(str(x)) if isinstance(x, Float) else x)


def _make_imaginary(x: Any) -> Any:
    return I if isinstance(x, Symbol) and x.name == "i" else x


def _is_complex(parsed: Any) -> bool:
    has_symbol = any(symbol.name == "i" for symbol in parsed.free_symbols)
    return has_symbol or parsed.doit().has(I)


def _rewrite(parsed: Any, replace: Callable[[Any], Any]) -> Any:
    """Return a parsed answer with each of its parts replaced; lists keep their order."""
    if isinstance(parsed, MatrixBase):
        return parsed.applyfunc(lambda x: _rewrite(x, replace))
    ordered: Any = parsed if isinstance(parsed, FiniteSet | Chain) else None
    parts = parsed.args if ordered is None else ordered._unsorted_args
    replaced = [_rewrite(part, replace) for part in parts]
    if all(a is b for a, b in zip(parts, replaced, strict=True)):
        return replace(parsed)
    return replace(parsed.func(*replaced))


def _make_vectors(gold: Any, answer: Any) -> list[Any]:
    """Return both answers; a column or row beside a tuple becomes a tuple."""
    is_beside_tuple = any(isinstance(x, Tuple | Interval) for x in (gold, answer))
    return [
        Tuple(*x) if is_beside_tuple and isinstance(x, MatrixBase) and 1 in x.shape else x
        for x in (gold, answer)
    ]


def _are_different_rationals(gold: Any, answer: Any) -> bool:
    """True if both answers are rational numbers that differ, perhaps by less than 10^-100."""
    a, b = (unwrap_eq(x).doit() for x in (gold, answer))
    return isinstance(a, Rational) and isinstance(b, Rational) and a != b


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
    condition = SET_BUILDER.fullmatch(latex)
    latex = condition[2] if condition else latex
    is_either = ALTERNATIVES.search(latex) is not None and not JOINED.search(latex)
    latex = EXPONENT.sub(_spell_exponent, latex) if EXPONENT.fullmatch(latex.strip()) else latex
    for spelling, replacement in REPLACEMENTS:
        latex = latex.replace(spelling, replacement)
    latex = BARE_ROOT.sub(r"\\sqrt{\1}", BARE_FRACTION.sub(r"\1{\2}{\3}", latex))
    latex = _split_signs(DEGREES.sub(_spell_degrees, latex))
    latex = _keep_variables(PRIMES.sub(_spell_primes, latex))
    latex = CONNECTIVE.sub(r"\\text{ or }", REPEATING.sub(_make_fraction, _spell_ratio(latex)))
    parsed = parse(
        f"\\boxed{{{latex}}}",
        extraction_config=LATEX,  # pyright: ignore
        fallback_mode="no_fallback",
        extraction_mode="any_match" if is_sentence else "first_match",
        parsing_timeout=None,  # pyright: ignore
    )
    return [_unite(x) for x in parsed] if is_either else parsed


def _unite(parsed: Any) -> Any:
    """Return the numbers that satisfy one of several bounds of a variable, as x < 1 or x > 2."""
    is_region = isinstance(parsed, FiniteSet) and all(
        not isinstance(x, Eq) and is_solved(x) for x in parsed.args
    )
    if not is_region or len(parsed.free_symbols) != 1:
        return parsed
    bounds: Any = parsed.args
    return Union(*(bound.as_set() for bound in bounds))


def _split_signs(latex: str) -> str:
    """Return the two values of a formula with one \\pm inside, as a list."""
    sign = PLUS_MINUS.fullmatch(latex)
    if sign is None or len(re.findall(r"\\(?:pm|mp)(?![a-zA-Z])", latex)) > 1:
        return latex
    before, after = latex[: sign.start(1) - 1], latex[sign.end(1) :]
    return f"{before}+{after}, {before}-{after}"


def _spell_degrees(angle: re.Match[str]) -> str:
    if bool(angle[2]) != bool(angle[4]):
        return angle[0]
    return f"{angle[1]}\\left(\\frac{{{angle[3]}\\pi}}{{180}}\\right)"


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
