"""Arithmetic: compute one operation on two numbers of fixed width.

"37+48=" -> "85", or "580" with `reverse`.
"""

from __future__ import annotations

import operator
import random
from typing import Annotated, ClassVar, Literal

from pydantic import AfterValidator, Field

from ratchet.config.sections import ALL_SOURCES, EnvironmentConfig
from ratchet.environments.single_turn import Problem, Procedural
from ratchet.environments.wrong_answers import SingleAnswer


def _check_distinct(operators: tuple[str, ...]) -> tuple[str, ...]:
    if len(set(operators)) < len(operators):
        raise ValueError(f"operators={' '.join(operators)} has one twice: list each once")
    return operators


Operators = Annotated[
    tuple[Literal["+", "-", "*", "/"], ...], Field(min_length=1), AfterValidator(_check_distinct)
]

# Division is left out, so that results are integers.
IntegerOperators = Annotated[
    tuple[Literal["+", "-", "*"], ...], Field(min_length=1), AfterValidator(_check_distinct)
]


class ArithmeticConfig(EnvironmentConfig):
    """One operation on two numbers: "37+48=" -> "85"."""

    builds: ClassVar[str] = "ratchet.environments.toy.arithmetic:Arithmetic"
    default_reward: ClassVar[str] = "exact_match"
    data_kinds: ClassVar[frozenset[str]] = ALL_SOURCES

    digits: int = Field(2, ge=1, le=100)
    """Number of digits of each operand, padded with zeros."""
    operators: IntegerOperators = ("+",)
    """Operators, drawn with equal probabilities."""
    reverse: bool = False
    """Write the answer with its least significant digit first, padded to the maximum width: 37+48=
    -> 580."""


OPERATIONS = {"+": operator.add, "-": operator.sub, "*": operator.mul}


class Arithmetic(SingleAnswer, Procedural):
    """An environment of problems with one operation on two numbers."""

    name = "arithmetic"

    def __init__(self, config: ArithmeticConfig) -> None:
        self.config = config

    def sample(self, rng: random.Random) -> Problem:
        digits = self.config.digits
        symbol = rng.choice(self.config.operators)
        x, y = rng.randrange(10**digits), rng.randrange(10**digits)
        value = OPERATIONS[symbol](x, y)
        answer = self._reverse_answer(value, symbol) if self.config.reverse else str(value)
        return Problem(f"{x:0{digits}d}{symbol}{y:0{digits}d}=", answer)

    def _reverse_answer(self, value: int, symbol: str) -> str:
        """Return the answer with its least significant digit first, padded to a fixed width.

        Carries then follow the order of writing, and the length of the answer is fixed. A minus
        sign counts as one character of the width and comes last.
        """
        width = 2 * self.config.digits if symbol == "*" else self.config.digits + 1
        return f"{value:0{width}d}"[::-1]
