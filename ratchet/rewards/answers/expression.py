"""Compute the exact value of an arithmetic expression written by a model.

It may have whole numbers, + - * / and parentheses, nothing else. Because the text is untrusted, it
is parsed here without eval, and within bounds on length and depth. Unary signs and powers are
refused: in a puzzle with given numbers, they would make new ones.
"""

from __future__ import annotations

import operator
import re
from fractions import Fraction

MAX_CHARS = 400
MAX_DEPTH = 40

TOKEN = re.compile(r"[0-9]+|[-+*/()]")
SPELLINGS = str.maketrans("×·÷−", "**/-")
SUM_OPERATIONS = {"+": operator.add, "-": operator.sub}
PRODUCT_OPERATIONS = {"*": operator.mul, "/": operator.truediv}


class NotAnExpression(ValueError):
    """An error for a text that does not parse, divides by zero, or exceeds a bound."""


def evaluate(text: str) -> tuple[Fraction, list[int]]:
    """Return the value and the numbers used, in the order written. Raises NotAnExpression."""
    if len(text) > MAX_CHARS:
        raise NotAnExpression(f"longer than {MAX_CHARS} characters")
    text = text.translate(SPELLINGS)
    if unknown_text := TOKEN.sub("", text).strip():
        raise NotAnExpression(f"holds {unknown_text!r}")
    parser = _Parser(TOKEN.findall(text))
    value = parser.parse_sum()
    if parser.tokens:
        raise NotAnExpression(f"ends before {parser.tokens[-1]!r}")
    return value, parser.numbers


class _Parser:
    """A recursive-descent parser; `tokens` is a stack with the next token on top."""

    def __init__(self, tokens: list[str]) -> None:
        self.tokens = tokens[::-1]
        self.numbers: list[int] = []
        self.depth = 0

    def parse_sum(self) -> Fraction:
        value = self.parse_product()
        while self.tokens and self.tokens[-1] in SUM_OPERATIONS:
            value = SUM_OPERATIONS[self.tokens.pop()](value, self.parse_product())
        return value

    def parse_product(self) -> Fraction:
        value = self.parse_atom()
        while self.tokens and self.tokens[-1] in PRODUCT_OPERATIONS:
            sign, right = self.tokens.pop(), self.parse_atom()
            if sign == "/" and right == 0:
                raise NotAnExpression("divides by zero")
            value = PRODUCT_OPERATIONS[sign](value, right)
        return value

    def parse_atom(self) -> Fraction:
        token = self.tokens.pop() if self.tokens else "the end"
        if token.isdigit():
            self.numbers.append(int(token))
            return Fraction(token)
        if token != "(" or self.depth == MAX_DEPTH:
            raise NotAnExpression(
                f"a number was expected, not {token!r}, or parentheses nest deeper than {MAX_DEPTH}"
            )
        self.depth += 1
        value = self.parse_sum()
        if not self.tokens or self.tokens.pop() != ")":
            raise NotAnExpression("a parenthesis is not closed")
        self.depth -= 1
        return value
