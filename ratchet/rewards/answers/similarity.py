"""Reward an answer's similarity to the reference: common subsequence, or words in any order."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Hashable, Sequence
from typing import ClassVar, Literal

from pydantic import Field

from ratchet.config.base import Section
from ratchet.errors import DataError
from ratchet.rewards.answers.final_answer import make_no_answer_error
from ratchet.rewards.base import AnswerReward
from ratchet.types import Task


class SimilarityConfig(Section):
    """The similarity, from 0 to 1, of an answer to the task's answer."""

    builds: ClassVar[str] = "ratchet.rewards.answers.similarity:Similarity"

    measure: Literal["characters", "words", "bag"] = "characters"
    """characters, words: the longest common subsequence of these (ROUGE-L); bag: the common words
    in any order (F1)."""
    ignore_case: bool = False
    """True to ignore upper and lower case."""
    threshold: float | None = Field(None, gt=0, le=1)
    """The reward is 1 if the similarity is at least this, else 0; null: the reward is the
    similarity."""


# Maximum number of characters or words that are compared, which takes about 30 ms. Further
# characters or words count as different.
MAX_UNITS = 10_000


class Similarity(AnswerReward):
    name = "similarity"
    bounds = (0.0, 1.0)

    def __init__(self, config: SimilarityConfig) -> None:
        self.config = config

    def grade(self, text: str, task: Task) -> float:
        """Return the similarity.

        Raises DataError if the task has no answer, or one without a word where words are compared:
        every text without words would equal it.
        """
        if task.answer is None:
            raise make_no_answer_error(task)
        units = self._split_units(text)
        answer = str(task.answer).strip()
        reference = self._split_units(answer)
        if answer and not reference:
            raise DataError(
                f"task '{task.id}': its answer {answer[:100]!r} has no words to compare: set "
                "measure to characters"
            )
        if self.config.measure == "bag":
            n_common = (Counter(units) & Counter(reference)).total()
        else:
            n_common = compute_common_subsequence_length(units[:MAX_UNITS], reference[:MAX_UNITS])
        # F1: the harmonic mean of precision and recall.
        length = len(units) + len(reference)
        similarity = 2 * n_common / length if length else float(not text.strip())
        return (
            similarity
            if self.config.threshold is None
            else float(similarity >= self.config.threshold)
        )

    def _split_units(self, text: str) -> Sequence[Hashable]:
        text = text.strip()
        if self.config.ignore_case:
            text = text.casefold()
        return text if self.config.measure == "characters" else re.findall(r"\w+", text)


def compute_common_subsequence_length(a: Sequence[Hashable], b: Sequence[Hashable]) -> int:
    """Return the length of the longest common subsequence.

    Each row of the dynamic program's table is held in the bits of one integer (Hyyrö 2004).
    """
    # For each unit, the positions in `a` that hold it, as a bit mask.
    position_bits: dict[Hashable, int] = {}
    for index, unit in enumerate(a):
        position_bits[unit] = position_bits.get(unit, 0) | 1 << index
    all_bits = (1 << len(a)) - 1
    # A 0 bit marks a position at which the common subsequence grows by one.
    row = all_bits
    for unit in b:
        matches = row & position_bits.get(unit, 0)
        row = ((row + matches) | (row - matches)) & all_bits
    return len(a) - row.bit_count()
