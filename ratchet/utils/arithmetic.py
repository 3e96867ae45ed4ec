"""Compute the exact value of an arithmetic expression written by a model.

Because the text is untrusted, it is parsed here without eval, and within bounds on its length, its
depth and the size of each value.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from fractions import Fraction

MAX_CHARS = 1000
MAX_DEPTH = 50
MAX_BITS = 4096  # size of the numerator and denominator of each intermediate value
EXPONENT = r"(?:[eE][+-]?[0-9]{1,3})?"
TOKEN = re.compile(rf"\s*([0-9]+(?:\.[0-9]*)?{EXPONENT}|\.[0-9]+{EXPONENT}|\*\*|//|[-+*/%()])")
SPELLINGS = str.maketrans({"×": "*", "·": "*", "÷": "/", "−": "-", "^": "**"})
OPERATIONS: dict[str, Callable[[Fraction, Fraction], Fraction]] = {
    "+": lambda a, b: a + b,
    "-": lambda a, b: a - b,
    "*": lambda a, b: a * b,
    "/": lambda a, b: a / b,
    "//": lambda a, b: Fraction(a // b),
    "%": lambda a, b: a % b,
}


class NotAnExpression(ValueError):
    """An error for a text that does not parse, divides by zero, or exceeds a bound."""


def evaluate(text: str, *, is_puzzle: bool = False) -> tuple[Fraction, list[Fraction]]:
    """Return the value and the numbers used, in the order written. Raises NotAnExpression.

    The text may have decimal numbers, + - * / // % ** and parentheses.

    Args:
        is_puzzle: True allows only whole numbers, + - * / and parentheses. In a puzzle with given
            numbers, signs and the other operators would make new numbers.
    """
    if len(text) > MAX_CHARS:
        raise NotAnExpression(f"the expression has {len(text)} characters, {MAX_CHARS} are allowed")
    parser = _Parser(_tokenize(text.translate(SPELLINGS)), is_puzzle)
    value = parser.parse_sum(0)
    if parser.next_token is not None:
        raise NotAnExpression(f"'{parser.next_token}' can't stand there")
    return value, parser.numbers


def _tokenize(text: str) -> list[str]:
    tokens: list[str] = []
    position, end = 0, len(text.rstrip())
    while position < end:
        match = TOKEN.match(text, position)
        if match is None:
            unknown = text[position:].strip()[:1]
            raise NotAnExpression(f"'{unknown}' is no number, operator or parenthesis")
        tokens.append(match[1])
        position = match.end()
    if not tokens:
        raise NotAnExpression("the expression is empty")
    return tokens


class _Parser:
    """A recursive-descent parser with Python's precedence: sum, product, sign, power.

    Each method parses and evaluates one level of precedence.
    """

    def __init__(self, tokens: list[str], is_puzzle: bool) -> None:
        self._tokens, self._position = tokens, 0
        self._is_puzzle = is_puzzle
        self.numbers: list[Fraction] = []

    @property
    def next_token(self) -> str | None:
        return self._tokens[self._position] if self._position < len(self._tokens) else None

    def _take(self, *accepted: str) -> str | None:
        token = self.next_token
        if token is None or token not in accepted:
            return None
        self._position += 1
        return token

    def parse_sum(self, depth: int) -> Fraction:
        value = self._parse_product(depth)
        while operator := self._take("+", "-"):
            value = _apply(operator, value, self._parse_product(depth))
        return value

    def _parse_product(self, depth: int) -> Fraction:
        operators = ("*", "/") if self._is_puzzle else ("*", "/", "//", "%")
        value = self._parse_signed(depth)
        while operator := self._take(*operators):
            value = _apply(operator, value, self._parse_signed(depth))
        return value

    def _parse_signed(self, depth: int) -> Fraction:
        if depth > MAX_DEPTH:
            raise NotAnExpression(f"the expression is nested more than {MAX_DEPTH} deep")
        if self._is_puzzle:
            return self._parse_atom(depth)
        if operator := self._take("+", "-"):
            value = self._parse_signed(depth + 1)
            return -value if operator == "-" else value
        base = self._parse_atom(depth)
        return _raise_to_power(base, self._parse_signed(depth + 1)) if self._take("**") else base

    def _parse_atom(self, depth: int) -> Fraction:
        if self._take("("):
            value = self.parse_sum(depth + 1)
            if not self._take(")"):
                raise NotAnExpression("a ')' is missing")
            return value
        token = self.next_token
        if token is None:
            raise NotAnExpression("the expression ends too early")
        is_number = token.isdigit() if self._is_puzzle else token[0].isdigit() or token[0] == "."
        if not is_number:
            raise NotAnExpression(f"'{token}' can't stand there")
        self._position += 1
        value = _check_size(Fraction(token))
        self.numbers.append(value)
        return value


def _apply(operator: str, a: Fraction, b: Fraction) -> Fraction:
    if operator in ("/", "//", "%") and b == 0:
        raise NotAnExpression("division by zero")
    return _check_size(OPERATIONS[operator](a, b))


def _raise_to_power(base: Fraction, exponent: Fraction) -> Fraction:
    if exponent.denominator != 1:
        raise NotAnExpression("only whole exponents are allowed")
    if base == 0 and exponent < 0:
        raise NotAnExpression("division by zero")
    bits = max(base.numerator.bit_length(), base.denominator.bit_length())
    if bits > 1 and bits * abs(exponent) > MAX_BITS:
        raise NotAnExpression("the result is too large")
    # 1 bit at most: the base is 0, 1 or -1, so only the parity of a large exponent matters.
    return base ** int(exponent % 2 if bits <= 1 and exponent > 1 else exponent)


def _check_size(value: Fraction) -> Fraction:
    """Return the value. Raises NotAnExpression if it is too large."""
    if max(value.numerator.bit_length(), value.denominator.bit_length()) > MAX_BITS:
        raise NotAnExpression("the result is too large")
    return value
