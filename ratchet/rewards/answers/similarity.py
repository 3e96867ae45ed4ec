"""The similarity of an answer to the task's: common subsequence, or words in any order."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Hashable, Sequence
from typing import ClassVar, Literal

from pydantic import Field

from ratchet.config.base import Section
from ratchet.errors import DataError
from ratchet.rewards.base import AnswerReward
from ratchet.types import Task


class SimilarityConfig(Section):
    """The similarity of the answer to the task's, from 0 to 1."""

    builds: ClassVar[str] = "ratchet.rewards.answers.similarity:Similarity"

    measure: Literal["characters", "words", "bag"] = Field(
        "characters",
        description="Common subsequence of characters, or of words (ROUGE-L); or words in any "
        "order (F1).",
    )
    ignore_case: bool = Field(False, description="Upper and lower case are the same.")
    threshold: float | None = Field(
        None, gt=0, le=1, description="1 from this similarity on, 0 below; null: the similarity."
    )


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
