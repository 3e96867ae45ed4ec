"""A reward for answers that equal the task's answer, character by character."""

from __future__ import annotations

from typing import ClassVar

from ratchet.config.base import Section
from ratchet.rewards.answers.final_answer import extract_marked_answer, make_no_answer_error
from ratchet.rewards.base import FinalAnswer
from ratchet.types import Task


class ExactMatchConfig(Section):
    """Reward 1 if the answer's text, stripped, equals the task's answer, else 0."""

    builds: ClassVar[str] = "ratchet.rewards.answers.exact_match:ExactMatch"

    marked: bool = False
    r"""True: if the text has a mark ("####", <answer> or \boxed{}), only the marked part is the
    answer."""
    ignore_case: bool = False
    """True to ignore upper and lower case, and a full stop at the end."""


class ExactMatch(FinalAnswer):
    name = "exact_match"
    bounds = (0.0, 1.0)

    def __init__(self, config: ExactMatchConfig) -> None:
        self.config = config

    def answer(self, text: str) -> str:
        marked = extract_marked_answer(text) if self.config.marked else None
        return self._normalize(text if marked is None else marked)

    def grade(self, text: str, task: Task) -> float:
        if task.answer is None:
            raise make_no_answer_error(task)
        return float(self.answer(text) == self._normalize(str(task.answer)))

    def _normalize(self, answer: str) -> str:
        answer = answer.strip()
        if not self.config.ignore_case:
            return answer
        # An answer of full stops alone stays as it is, so that it does not equal an empty text.
        return answer.rstrip(".").casefold() or answer
