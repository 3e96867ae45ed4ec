"""Reward an answer whose length is within bounds."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from ratchet.config.base import Section
from ratchet.errors import DataError
from ratchet.rewards.base import PerTrajectory, answer_text
from ratchet.types import Task, Trajectory, Truncated


class LengthConfig(Section):
    """A reward of 1 within bounds, which falls linearly to 0 at a distance of `margin` outside."""

    builds: ClassVar[str] = "ratchet.rewards.answers.length:Length"

    unit: Literal["tokens", "words", "characters", "lines"] = "tokens"
    """Unit of length; tokens count the whole completion, other units the last message."""
    at_least: int = Field(0, ge=0)
    """Minimum length; shorter answers earn less."""
    at_most: int | None = Field(None, ge=0)
    """Maximum length; longer answers earn less; null: no bound."""
    margin: int = Field(0, ge=0)
    """Distance outside a bound at which the reward reaches 0."""

    def check_keys(self) -> None:
        if self.at_most is not None and self.at_most < self.at_least:
            raise ValueError(
                f"at_most={self.at_most} is below at_least={self.at_least}: no length fits"
            )


class Length(PerTrajectory):
    """A reward for the answer's length.

    The unit tokens counts all that the policy wrote; other units count the last assistant message.
    A truncated answer earns 0.
    """

    name = "length"
    bounds = (0.0, 1.0)

    def __init__(self, config: LengthConfig) -> None:
        self.config = config

    def judge(self, trajectory: Trajectory, task: Task) -> float:
        """Return the reward. Raises DataError if tokens must be counted and the text has none."""
        text = answer_text(trajectory)
        if isinstance(trajectory.outcome, Truncated):
            return 0.0
        length = self._measure_length(text, trajectory)
        excess = 0 if self.config.at_most is None else length - self.config.at_most
        distance = max(excess, self.config.at_least - length, 0)
        if distance == 0:
            return 1.0
        return max(0.0, 1.0 - distance / self.config.margin) if self.config.margin else 0.0

    def _measure_length(self, text: str, trajectory: Trajectory) -> int:
        if self.config.unit == "tokens":
            if not len(trajectory):
                raise DataError("this text has no tokens to count: set unit to words or characters")
            return trajectory.completion_length
        if self.config.unit == "characters":
            return len(text)
        return len(text.split() if self.config.unit == "words" else text.splitlines())
