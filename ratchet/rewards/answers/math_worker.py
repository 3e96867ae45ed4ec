"""The functions that workers of the reward `math` call: computer algebra on LaTeX by math-verify,
whose parser evaluates no Python.

Only its LaTeX grammar is used: the other way in which it reads expressions goes through `eval`.
"""

from __future__ import annotations

import logging

from math_verify import LatexExtractionConfig, parse, verify

# they report every answer that they can't read, and unused deadlines
for name in ("math_verify", "latex2sympy2_extended"):
    logging.getLogger(name).setLevel(logging.CRITICAL + 1)
LATEX = (LatexExtractionConfig(boxed_match_priority=0),)


def equal(answer: str, gold: str) -> bool:
    """Return True if two pieces of LaTeX are the same number, expression, set, interval, matrix or
    equation. Text that can't be read (or takes more memory than there is) equals nothing."""
    try:
        expected, given = read(gold), read(answer)
        return (
            bool(expected) and bool(given) and bool(verify(expected, given, timeout_seconds=None))
        )
    # a parser's bug on an answer is no reason to stop; what breaks every answer is caught below
    except Exception:
        return False


def read(latex: str) -> list:
    boxed = f"\\boxed{{{latex}}}"
    return parse(boxed, extraction_config=LATEX, fallback_mode="no_fallback", parsing_timeout=None)  # pyright: ignore


if not equal(r"\frac{2}{4}", "0.5") or equal("x+1", "x+2"):
    raise RuntimeError(
        "math-verify does not work here: it can't tell that 2/4 is 0.5 and x+1 is not x+2"
    )
