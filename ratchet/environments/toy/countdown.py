"""Countdown: reach a target from given numbers with + - * /: "3 5 7:22=" -> "5*3+7".

Any expression of the right value is right, so the answer that a task carries is one solution, for
demonstrations; the reward judges by `meta`: numbers (ascending), target, use_all.
"""

from __future__ import annotations

import random
from typing import NamedTuple

from ratchet.environments.config import CountdownConfig
from ratchet.environments.single_turn import Problem, Procedural

ATOM = 3
PRECEDENCE = {"+": 1, "-": 1, "*": 2, "/": 2}


class Term(NamedTuple):
    value: int
    text: str
    precedence: int = ATOM


class Countdown(Procedural):
    name = "countdown"

    def __init__(self, config: CountdownConfig) -> None:
        self.config = config

    def sample(self, rng: random.Random) -> Problem | None:
        numbers = [rng.randint(1, self.config.max_number) for _ in range(self.config.numbers)]
        solution = self._combine(rng, numbers)
        if solution is None or solution.value > self.config.max_target or solution.value in numbers:
            return None  # a target among the numbers would be solved by naming it
        numbers.sort()  # a problem has one prompt, so that a reordered copy can't cross the split
        shown = " ".join(map(str, numbers))
        prompt = self.config.template.replace("{numbers}", shown).replace(
            "{target}", str(solution.value)
        )
        meta = {"numbers": numbers, "target": solution.value, "use_all": self.config.use_all}
        return Problem(prompt, solution.text, meta)

    def _combine(self, rng: random.Random, numbers: list[int]) -> Term | None:
        """Joins random pairs until one term is left; None where a step leaves the positive whole
        numbers."""
        terms = [Term(n, str(n)) for n in numbers]
        while len(terms) > 1:
            first, right = (terms.pop(rng.randrange(len(terms))) for _ in range(2))
            joined = _join(first, rng.choice(self.config.operators), right)
            if joined is None:
                return None
            terms.append(joined)
        return terms[0]


def _join(left: Term, sign: str, right: Term) -> Term | None:
    value = _value(left.value, sign, right.value)
    if value is None or value < 1:
        return None
    rank = PRECEDENCE[sign]
    first = left.text if left.precedence >= rank else f"({left.text})"
    # "-" and "/" bind to the left: a-(b-c) keeps its parentheses
    second = (
        right.text
        if right.precedence > rank or (right.precedence == rank and sign == "+")
        else f"({right.text})"
    )
    return Term(value, f"{first}{sign}{second}", rank)


def _value(left: int, sign: str, right: int) -> int | None:
    if sign == "/":
        return left // right if left % right == 0 else None
    return {"+": left + right, "-": left - right, "*": left * right}[sign]
