"""Reward any expression of the given numbers whose value is the target."""

from __future__ import annotations

from collections import Counter
from typing import ClassVar

from pydantic import Field

from ratchet.config.base import Section
from ratchet.rewards.base import AnswerReward
from ratchet.types import Task
from ratchet.utils.arithmetic import NotAnExpression, evaluate


class CountdownRewardConfig(Section):
    """A reward of 1 if an expression of the given numbers reaches the target."""

    builds: ClassVar[str] = "ratchet.rewards.answers.countdown:CountdownReward"

    partial: float = Field(0.0, ge=0, lt=1)
    """Reward of a legal expression that misses the target."""


class CountdownReward(AnswerReward):
    """A reward of 1 if the answer's expression has the target's value, else 0 or `partial`.

    The task's `meta` holds `numbers`, `target` and `use_all` (True: use each number exactly once;
    False: at most once).
    """

    name = "countdown"
    bounds = (0.0, 1.0)

    def __init__(self, config: CountdownRewardConfig) -> None:
        self.config = config

    def grade(self, text: str, task: Task) -> float:
        available, target = Counter(task.meta["numbers"]), task.meta["target"]
        try:
            # A puzzle's expression has only whole numbers, + - * / and parentheses.
            value, numbers = evaluate(extract_expression(text), is_puzzle=True)
        except NotAnExpression:
            return 0.0
        used_numbers = Counter(numbers)
        is_legal = used_numbers == available if task.meta["use_all"] else used_numbers <= available
        if not is_legal:
            return 0.0
        return 1.0 if value == target else self.config.partial


def extract_expression(text: str) -> str:
    """Return the last line of the last <answer>...</answer>, or of the text if it has none.

    A result that follows the expression ("= 22") is cut off.
    """
    answer = text.rpartition("<answer>")[2].partition("</answer>")[0]
    lines = answer.strip().splitlines()
    return lines[-1].partition("=")[0].strip() if lines else ""
