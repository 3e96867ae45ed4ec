"""Configuration of the built-in rewards. Free of torch and of their code."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from ratchet.config.base import Section


class ExactMatchConfig(Section):
    """1 where the answer's text, stripped, is the task's answer."""

    builds: ClassVar[str] = "ratchet.rewards.exact_match:ExactMatch"


class NumericAnswerConfig(Section):
    """1 where the answer's final number equals the task's."""

    builds: ClassVar[str] = "ratchet.rewards.numeric:NumericAnswer"

    require_marker: bool = Field(False, description='Only a number after "####" or in \\boxed{} counts.')


class CountdownRewardConfig(Section):
    """1 where an expression of the given numbers reaches the target."""

    builds: ClassVar[str] = "ratchet.rewards.countdown:CountdownReward"

    partial: float = Field(0.0, ge=0, lt=1, description="For a legal expression that misses the target.")
