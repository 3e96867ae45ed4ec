"""The calculator tool, with its own parser of arithmetic.

The policy's text is never executed as Python, and every expression is computed quickly.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from typing import ClassVar

from ratchet.environments.tool_use.base import ToolConfig, ToolError


class CalculatorConfig(ToolConfig):
    """A calculator tool for exact arithmetic: + - * / // % ** and parentheses."""

    builds: ClassVar[str] = "ratchet.environments.tool_use.calculator:Calculator"


MAX_CHARS = 1000
MAX_DEPTH = 50
MAX_BITS = 4096  # size of the numerator and denominator of each intermediate value
TOKEN = re.compile(
    r"\s*(\d+(?:\.\d*)?(?:[eE][+-]?\d{1,3})?|\.\d+(?:[eE][+-]?\d{1,3})?|\*\*|//|[-+*/%()])"
)
SIGNS = {"×": "*", "·": "*", "÷": "/", "−": "-", "^": "**"}


class Calculator:
    """A tool that computes an arithmetic expression exactly."""

    name = "calculator"
    description = "Works out an arithmetic expression with + - * / // % ** and parentheses."

    def __init__(self, config: CalculatorConfig) -> None:
        self.config = config
        self.parameters = {
            "type": "object",
            "properties": {"expression": {"type": "string", "description": "such as (3 + 4) * 12"}},
            "required": ["expression"],
        }

    async def call(self, expression: str) -> str:
        return format_value(calculate(expression))


def calculate(expression: str) -> Fraction:
    """Return the exact value of an expression, or raise ToolError."""
    if len(expression) > MAX_CHARS:
        raise ToolError(f"the expression has {len(expression)} characters, {MAX_CHARS} are allowed")
    for sign, operator in SIGNS.items():
        expression = expression.replace(sign, operator)
    parser = _Parser(_tokenize(expression))
    value = parser.parse_sum(0)
    if parser.next_token is not None:
        raise ToolError(f"'{parser.next_token}' can't stand there")
    return value


def format_value(value: Fraction) -> str:
    """Return the value as a whole number, a short exact decimal, or 12 significant digits."""
    if value.denominator == 1:
        return str(value.numerator)
    # A decimal is exact if 2 and 5 are the only prime factors of the denominator.
    cofactor = value.denominator
    for prime in (2, 5):
        while cofactor % prime == 0:
            cofactor //= prime
    decimal = Decimal(value.numerator) / Decimal(value.denominator)
    if cofactor == 1 and len(f"{decimal:f}") <= 20:
        return f"{decimal.normalize():f}"
    return f"{decimal:.12g}"


def _tokenize(expression: str) -> list[str]:
    tokens: list[str] = []
    position, end = 0, len(expression.rstrip())
    while position < end:
        match = TOKEN.match(expression, position)
        if match is None:
            raise ToolError(
                f"'{expression[position:].strip()[:1]}' is no number, operator or parenthesis"
            )
        tokens.append(match[1])
        position = match.end()
    if not tokens:
        raise ToolError("the expression is empty")
    return tokens


class _Parser:
    """A recursive-descent parser with Python's precedence: sum, product, sign, power.

    Each method parses and evaluates one level of precedence.
    """

    def __init__(self, tokens: list[str]) -> None:
        self._tokens, self._position = tokens, 0

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
            value = _check_size(_apply(operator, value, self._parse_product(depth)))
        return value

    def _parse_product(self, depth: int) -> Fraction:
        value = self._parse_signed(depth)
        while operator := self._take("*", "/", "//", "%"):
            value = _check_size(_apply(operator, value, self._parse_signed(depth)))
        return value

    def _parse_signed(self, depth: int) -> Fraction:
        if depth > MAX_DEPTH:
            raise ToolError(f"the expression is nested more than {MAX_DEPTH} deep")
        if operator := self._take("+", "-"):
            value = self._parse_signed(depth + 1)
            return -value if operator == "-" else value
        base = self._parse_atom(depth)
        return _raise_to_power(base, self._parse_signed(depth + 1)) if self._take("**") else base

    def _parse_atom(self, depth: int) -> Fraction:
        if self._take("("):
            value = self.parse_sum(depth + 1)
            if not self._take(")"):
                raise ToolError("a ')' is missing")
            return value
        token = self.next_token
        if token is None:
            raise ToolError("the expression ends too early")
        if not (token[0].isdigit() or token[0] == "."):
            raise ToolError(f"'{token}' can't stand there")
        self._position += 1
        return _check_size(Fraction(token))


OPERATIONS: dict[str, Callable[[Fraction, Fraction], Fraction]] = {
    "+": lambda a, b: a + b,
    "-": lambda a, b: a - b,
    "*": lambda a, b: a * b,
    "/": lambda a, b: a / b,
    "//": lambda a, b: Fraction(a // b),
    "%": lambda a, b: a % b,
}


def _apply(operator: str, a: Fraction, b: Fraction) -> Fraction:
    if operator in ("/", "//", "%") and b == 0:
        raise ToolError("division by zero")
    return OPERATIONS[operator](a, b)


def _raise_to_power(base: Fraction, exponent: Fraction) -> Fraction:
    if exponent.denominator != 1:
        raise ToolError("only whole exponents are allowed")
    if base == 0 and exponent < 0:
        raise ToolError("division by zero")
    bits = max(base.numerator.bit_length(), base.denominator.bit_length())
    if bits > 1 and bits * abs(exponent) > MAX_BITS:
        raise ToolError("the result is too large")
    return base ** int(exponent % 2 if bits <= 1 and exponent > 1 else exponent)


def _check_size(value: Fraction) -> Fraction:
    """Return the value. Raises ToolError if it is too large."""
    if max(value.numerator.bit_length(), value.denominator.bit_length()) > MAX_BITS:
        raise ToolError("the result is too large")
    return value
