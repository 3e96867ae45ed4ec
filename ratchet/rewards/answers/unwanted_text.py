"""Reward attempts in which certain tokens and texts do not occur."""

from __future__ import annotations

from typing import Annotated, ClassVar

import numpy as np
from pydantic import Field

from ratchet.config.base import Section
from ratchet.errors import DataError
from ratchet.rewards.base import PerTrajectory, list_policy_messages
from ratchet.types import POLICY, Task, Trajectory, Truncated


class UnwantedTextConfig(Section):
    """A reward of 1 if the policy wrote none of the listed texts and tokens in any turn, else 0."""

    builds: ClassVar[str] = "ratchet.rewards.answers.unwanted_text:UnwantedText"

    texts: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    """Texts that the policy must not write; upper and lower case differ."""
    token_ids: tuple[Annotated[int, Field(ge=0)], ...] = ()
    """Ids of tokens that the policy must not write. The token that ends a turn is checked too."""

    def check_keys(self) -> None:
        if not self.texts and not self.token_ids:
            raise ValueError("nothing is unwanted: set texts or token_ids")


class UnwantedText(PerTrajectory):
    """A reward for attempts without unwanted text. A truncated attempt earns 0."""

    name = "unwanted_text"
    bounds = (0.0, 1.0)

    def __init__(self, config: UnwantedTextConfig) -> None:
        self.config = config

    def judge(self, trajectory: Trajectory, task: Task) -> float:
        """Return the reward. Raises DataError for `token_ids` if the text has no tokens."""
        messages = list_policy_messages(trajectory)
        if self.config.token_ids and not len(trajectory):
            raise DataError("this text has no tokens to compare: set texts in place of token_ids")
        if isinstance(trajectory.outcome, Truncated):
            return 0.0
        if any(text in message.text for message in messages for text in self.config.texts):
            return 0.0
        tokens = trajectory.tokens[trajectory.owner == POLICY]
        return float(not np.isin(tokens, self.config.token_ids).any())
