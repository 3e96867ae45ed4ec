"""Countdown: reach a target from given numbers with + - * /: "3 5 7:22=" -> "5*3+7".

Every expression with the right value is correct. A task's answer is one of them, used as the
demonstration. The reward reads `meta`: numbers (ascending), target, use_all.
"""

from __future__ import annotations

import random
from typing import ClassVar, NamedTuple

from pydantic import Field, field_validator

from ratchet.config.sections import EnvironmentConfig
from ratchet.environments.single_turn import Problem, Procedural
from ratchet.environments.toy.arithmetic import Operators


class CountdownConfig(EnvironmentConfig):
    """Reach a target with given numbers: "3 5 7:22=" -> "5*3+7"."""

    builds: ClassVar[str] = "ratchet.environments.toy.countdown:Countdown"
    default_reward: ClassVar[str] = "countdown"

    numbers: int = Field(4, ge=2, le=6)
    """Number of given numbers."""
    max_number: int = Field(20, ge=2, le=10_000)
    """Largest given number; the smallest is 1."""
    max_target: int = Field(100, ge=2, le=1_000_000)
    """Largest target; the smallest is 1."""
    operators: Operators = ("+", "-", "*")
    """Operators of the sample solutions."""
    use_all: bool = True
    """True: each number must be used exactly once. False: at most once."""
    template: str = "{numbers}:{target}="
    """Template of the prompt, with {numbers} and {target}."""

    @field_validator("template")
    @classmethod
    def _require_placeholders(cls, template: str) -> str:
        for placeholder in ("{numbers}", "{target}"):
            if placeholder not in template:
                raise ValueError(
                    f"template lacks {placeholder}: the problem can't be solved without it"
                )
        return template


ATOM = 3  # precedence of a number, above that of all operators
PRECEDENCE = {"+": 1, "-": 1, "*": 2, "/": 2}


class Term(NamedTuple):
    """A partial expression with its value and the precedence of its outermost operator."""

    value: int
    text: str
    precedence: int = ATOM


class Countdown(Procedural):
    """An environment of countdown problems, each with at least one solution."""

    name = "countdown"

    def __init__(self, config: CountdownConfig) -> None:
        self.config = config

    def sample(self, rng: random.Random) -> Problem | None:
        numbers = [rng.randint(1, self.config.max_number) for _ in range(self.config.numbers)]
        solution = self._combine(rng, numbers)
        if solution is None or solution.value > self.config.max_target or solution.value in numbers:
            return None  # a target among the numbers would make the problem trivial
        # Numbers are sorted, so that no reordered training problem is in the test split.
        numbers.sort()
        number_text = " ".join(map(str, numbers))
        prompt = self.config.template.replace("{numbers}", number_text).replace(
            "{target}", str(solution.value)
        )
        meta = {"numbers": numbers, "target": solution.value, "use_all": self.config.use_all}
        return Problem(prompt, solution.text, meta)

    def _combine(self, rng: random.Random, numbers: list[int]) -> Term | None:
        """Join random pairs of terms until a single one remains.

        Return None if a step does not give a positive whole number.
        """
        terms = [Term(n, str(n)) for n in numbers]
        while len(terms) > 1:
            left, right = (terms.pop(rng.randrange(len(terms))) for _ in range(2))
            joined = _join(left, rng.choice(self.config.operators), right)
            if joined is None:
                return None
            terms.append(joined)
        return terms[0]


def _join(left: Term, symbol: str, right: Term) -> Term | None:
    """Return the terms joined by an operator; None unless the value is a positive integer."""
    value = _compute(left.value, symbol, right.value)
    if value is None or value < 1:
        return None
    precedence = PRECEDENCE[symbol]
    left_text = left.text if left.precedence >= precedence else f"({left.text})"
    # "-" and "/" associate to the left, so a-(b-c) keeps its parentheses.
    right_text = (
        right.text
        if right.precedence > precedence or (right.precedence == precedence and symbol == "+")
        else f"({right.text})"
    )
    return Term(value, f"{left_text}{symbol}{right_text}", precedence)


def _compute(left: int, symbol: str, right: int) -> int | None:
    if symbol == "/":
        return left // right if left % right == 0 else None
    return {"+": left + right, "-": left - right, "*": left * right}[symbol]
