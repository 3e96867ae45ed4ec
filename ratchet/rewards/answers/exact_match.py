"""The answer's text is the task's answer, character by character."""

from __future__ import annotations

from ratchet.errors import DataError
from ratchet.rewards.answers.final_answer import marked_answer
from ratchet.rewards.base import FinalAnswer
from ratchet.rewards.config import ExactMatchConfig
from ratchet.types import Task


class ExactMatch(FinalAnswer):
    name = "exact_match"
    bounds = (0.0, 1.0)

    def __init__(self, config: ExactMatchConfig) -> None:
        self.config = config

    def answer(self, text: str) -> str:
        marked = marked_answer(text) if self.config.marked else None
        return self._spelt(text if marked is None else marked)

    def grade(self, text: str, task: Task) -> float:
        if task.answer is None:
            raise DataError(f"task '{task.id}' has no answer to compare with")
        return float(self.answer(text) == self._spelt(str(task.answer)))

    def _spelt(self, answer: str) -> str:
        return answer.strip().rstrip(".").casefold() if self.config.ignore_case else answer.strip()
