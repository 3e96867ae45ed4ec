"""An optional part of environments."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from ratchet.types import Message


@runtime_checkable
class HasCutReward(Protocol):
    """An environment that rewards attempts that a limit of tokens or turns cut off.

    Without it they have the sum of their turns' rewards, or 0.
    """

    async def reward_cut_attempt(self, messages: Sequence[Message]) -> float | None:
        """Return the reward of the attempt, in addition to that of its turns; None for none.

        Args:
            messages: The whole conversation. The last message is the policy's unfinished one, or
                an observation that it can't answer any more.
        """
        ...
