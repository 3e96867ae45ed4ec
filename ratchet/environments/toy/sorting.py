"""Sort digits: "73120465=" -> "01234567".

A decoder with 0.1 M parameters learns it from random weights on a CPU in about a minute.
"""

from __future__ import annotations

import random
from typing import ClassVar

from pydantic import Field

from ratchet.config.sections import ALL_SOURCES, EnvironmentConfig
from ratchet.environments.single_turn import Problem, Procedural
from ratchet.environments.wrong_answers import SingleAnswer


class SortingConfig(EnvironmentConfig):
    """Sort digits: "73120465=" -> "01234567"."""

    builds: ClassVar[str] = "ratchet.environments.toy.sorting:Sorting"
    default_reward: ClassVar[str] = "exact_match"
    data_kinds: ClassVar[frozenset[str]] = ALL_SOURCES

    digits: int = Field(8, ge=1, le=1000)
    """Number of digits to sort."""


class Sorting(SingleAnswer, Procedural):
    """An environment of digits to sort."""

    name = "sorting"

    def __init__(self, config: SortingConfig) -> None:
        self.config = config

    def sample(self, rng: random.Random) -> Problem:
        digits = rng.choices("0123456789", k=self.config.digits)
        return Problem("".join(digits) + "=", "".join(sorted(digits)))
