"""A regular expression of the user's matches the answer."""

from __future__ import annotations

from collections.abc import Awaitable

from ratchet.errors import DataError
from ratchet.rewards.base import AnswerReward
from ratchet.rewards.config import RegexConfig
from ratchet.rewards.process_pool.pool import OutOfTime, RewardWorkers
from ratchet.types import Task


class Regex(AnswerReward):
    """Matched in a process of its own: a pattern that backtracks without end on some answer fails
    that attempt alone."""

    name = "regex"
    bounds = (0.0, 1.0)

    def __init__(self, config: RegexConfig) -> None:
        self.config = config
        self._workers = RewardWorkers(
            "ratchet.rewards.answers.regex_worker:match", cpu_s=config.timeout_s
        )

    def grade(self, text: str, task: Task) -> Awaitable[float]:
        return self._grade(text, task)

    async def _grade(self, text: str, task: Task) -> float:
        """Raises DataError for a task without the answer that a group is compared with, and where
        matching takes too long."""
        group = self.config.group
        if group is not None and task.answer is None:
            raise DataError(f"task '{task.id}' has no answer to compare group {group!r} with")
        try:
            found = await self._workers.call(self.config.pattern, text, self.config.whole, group)
        except OutOfTime as error:
            pattern = self.config.pattern
            raise DataError(
                f"the pattern {pattern!r} backtracks too long on an answer of {len(text)} "
                f"characters: {error}"
            ) from None
        matched = found is not None and (group is None or found.strip() == str(task.answer).strip())
        return float(matched != self.config.invert)
