"""The similarity of an answer to the task's: common subsequence, or words in any order."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Hashable, Sequence

from ratchet.errors import DataError
from ratchet.rewards.base import AnswerReward
from ratchet.rewards.config import SimilarityConfig
from ratchet.types import Task

# characters or words that are compared: about 30 ms; what goes beyond counts as different
MAX_UNITS = 10_000


class Similarity(AnswerReward):
    name = "similarity"
    bounds = (0.0, 1.0)

    def __init__(self, config: SimilarityConfig) -> None:
        self.config = config

    def grade(self, text: str, task: Task) -> float:
        if task.answer is None:
            raise DataError(f"task '{task.id}' has no answer to compare with")
        one, other = self._units(text), self._units(str(task.answer))
        if self.config.measure == "bag":
            common = (Counter(one) & Counter(other)).total()
        else:
            common = common_subsequence(one[:MAX_UNITS], other[:MAX_UNITS])
        similarity = 2 * common / (len(one) + len(other)) if one or other else 1.0
        return (
            similarity
            if self.config.threshold is None
            else float(similarity >= self.config.threshold)
        )

    def _units(self, text: str) -> Sequence[Hashable]:
        text = text.strip()
        if self.config.ignore_case:
            text = text.casefold()
        return text if self.config.measure == "characters" else re.findall(r"\w+", text)


def common_subsequence(one: Sequence[Hashable], other: Sequence[Hashable]) -> int:
    """Length of the longest common subsequence, a row of the table at a time as the bits of one
    integer (Hyyrö 2004)."""
    where: dict[Hashable, int] = {}
    for index, unit in enumerate(one):
        where[unit] = where.get(unit, 0) | 1 << index
    full = (1 << len(one)) - 1
    row = full
    for unit in other:
        matches = row & where.get(unit, 0)
        row = ((row + matches) | (row - matches)) & full
    return len(one) - row.bit_count()
