r"""The reward `boxed`: the content of the last \boxed{} is the task's answer."""

from __future__ import annotations

from typing import ClassVar

from ratchet.config.base import Section
from ratchet.rewards.answers.final_answer import (
    canonicalize,
    extract_boxed,
    is_same_answer,
    make_no_answer_error,
)
from ratchet.rewards.base import FinalAnswer
from ratchet.types import Task


class BoxedConfig(Section):
    """A reward of 1 if the content of the last \\boxed{} is the task's answer."""

    builds: ClassVar[str] = "ratchet.rewards.answers.boxed:Boxed"

    normalise: bool = True
    """True: equal numbers, and spellings of the same LaTeX, are the same answer."""


class Boxed(FinalAnswer):
    """The reward `boxed`. The task's answer may itself be boxed, as in the solutions of MATH."""

    name = "boxed"
    bounds = (0.0, 1.0)

    def __init__(self, config: BoxedConfig) -> None:
        self.config = config

    def answer(self, text: str) -> str | None:
        answer = extract_boxed(text)
        return canonicalize(answer) if answer and self.config.normalise else answer

    def grade(self, text: str, task: Task) -> float:
        gold = get_gold_answer(task)
        answer = extract_boxed(text)
        if answer is None:
            return 0.0
        return float(is_same_answer(answer, gold) if self.config.normalise else answer == gold)


def get_gold_answer(task: Task) -> str:
    """Return the task's answer, unboxed. Raise DataError if there is none."""
    gold = "" if task.answer is None else str(task.answer).strip()
    boxed = extract_boxed(gold)
    gold = gold if boxed is None else boxed
    if not gold:
        raise make_no_answer_error(task)
    return gold
