"""A reward for answers that match a user's regular expression."""

from __future__ import annotations

import re
from collections.abc import Awaitable
from typing import Annotated, ClassVar

from pydantic import AfterValidator, Field

from ratchet.config.base import Section
from ratchet.errors import DataError
from ratchet.rewards.base import AnswerReward
from ratchet.rewards.process_pool.pool import ProcessorTimeExceeded, RewardWorkers
from ratchet.types import Task


def _check_pattern(pattern: str) -> str:
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(f"is not a regular expression of Python: {error}") from None
    return pattern


class RegexConfig(Section):
    """The reward is 1 if a regular expression matches the answer, else 0."""

    builds: ClassVar[str] = "ratchet.rewards.answers.regex:Regex"

    pattern: Annotated[str, AfterValidator(_check_pattern)]
    """Regular expression of Python's re; (?i) at its start ignores case."""
    whole: bool = False
    """True if the whole answer must match, not just a part of it."""
    group: int | str | None = None
    """Group of the last match that must equal the task's answer; null: any match counts."""
    invert: bool = False
    """True to reward answers that the pattern does not match."""
    timeout_s: float = Field(2.0, gt=0)
    """Processor time limit of one answer, in seconds; beyond it the attempt fails."""

    def check_keys(self) -> None:
        compiled = re.compile(self.pattern)
        if isinstance(self.group, str):
            is_known = self.group in compiled.groupindex
        else:
            is_known = self.group is None or 0 <= self.group <= compiled.groups
        if not is_known:
            raise ValueError(
                f"group={self.group!r} is not in the pattern: it has groups 0 to "
                f"{compiled.groups}, named "
                f"{[*compiled.groupindex]}"
            )


class Regex(AnswerReward):
    """A reward that matches a pattern in a worker process.

    A pattern that backtracks without end on an answer fails only that attempt.
    """

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
        """Return 1 for a match and 0 otherwise, or the reverse with `invert`.

        Raise DataError if the task has no answer to compare a group with, or if matching takes too
        long.
        """
        group = self.config.group
        if group is not None and task.answer is None:
            raise DataError(f"task '{task.id}' has no answer to compare group {group!r} with")
        try:
            matched_text = await self._workers.call(
                self.config.pattern, text, self.config.whole, group
            )
        except ProcessorTimeExceeded as error:
            pattern = self.config.pattern
            raise DataError(
                f"the pattern {pattern!r} backtracks too long on an answer of {len(text)} "
                f"characters: {error}"
            ) from None
        is_match = matched_text is not None and (
            group is None or matched_text.strip() == str(task.answer).strip()
        )
        return float(is_match != self.config.invert)
