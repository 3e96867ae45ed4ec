"""The calculator tool."""

from __future__ import annotations

from decimal import Decimal
from fractions import Fraction
from typing import ClassVar

from ratchet.environments.tool_use.base import ToolConfig, ToolError
from ratchet.utils.arithmetic import NotAnExpression, evaluate


class CalculatorConfig(ToolConfig):
    """A calculator tool for exact arithmetic: + - * / // % ** and parentheses."""

    builds: ClassVar[str] = "ratchet.environments.tool_use.calculator:Calculator"


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
    try:
        return evaluate(expression)[0]
    except NotAnExpression as error:
        raise ToolError(str(error)) from None


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
