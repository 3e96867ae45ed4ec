"""Reward text that does not repeat itself."""

from __future__ import annotations

from typing import ClassVar, Literal

import numpy as np
from pydantic import Field

from ratchet.config.base import Section
from ratchet.errors import DataError
from ratchet.observe.sentinels import compute_repeated_share
from ratchet.rewards.base import PerTrajectory, answer_text
from ratchet.types import POLICY, Task, Trajectory, Truncated


class RepetitionConfig(Section):
    """A reward of 1 without repeated n-grams, which falls linearly to 0 where all are repeated.

    The share of repeated n-grams is 1 - distinct n-grams / n-grams (arXiv:2502.03373).
    """

    builds: ClassVar[str] = "ratchet.rewards.answers.repetition:Repetition"

    unit: Literal["tokens", "words"] = "tokens"
    """Unit of the n-grams; tokens: of the whole completion; words: of the last message, in lower
    case."""
    ngram: int = Field(8, ge=1)
    """Units per n-gram; short ones repeat in any text."""
    at_most: float = Field(0.0, ge=0, lt=1)
    """Share of repeated n-grams up to which the reward is 1; a higher share earns less."""


class Repetition(PerTrajectory):
    """A reward for text without repetition; text shorter than one n-gram repeats nothing.

    A truncated answer earns 0.
    """

    name = "repetition"
    bounds = (0.0, 1.0)

    def __init__(self, config: RepetitionConfig) -> None:
        self.config = config

    def judge(self, trajectory: Trajectory, task: Task) -> float:
        """Return the reward. Raises DataError if tokens must be counted and the text has none."""
        text = answer_text(trajectory)
        if self.config.unit == "tokens" and not len(trajectory):
            raise DataError("this text has no tokens to compare: set unit to words")
        if isinstance(trajectory.outcome, Truncated):
            return 0.0
        if self.config.unit == "tokens":
            units = trajectory.tokens[trajectory.owner == POLICY]
        else:
            ids: dict[str, int] = {}
            units = np.array(
                [ids.setdefault(word, len(ids)) for word in text.lower().split()], dtype=np.int64
            )
        share = compute_repeated_share(units.tobytes(), units.itemsize, self.config.ngram) or 0.0
        excess = max(0.0, share - self.config.at_most)
        return 1.0 - excess / (1.0 - self.config.at_most)
