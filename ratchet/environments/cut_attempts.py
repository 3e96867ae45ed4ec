"""An optional method of environments: the reward of a cut-off attempt."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from ratchet.types import Message


@runtime_checkable
class HasCutReward(Protocol):
    """An environment that rewards attempts that a limit of tokens or turns cut off.

    Without this method, such an attempt has the sum of its turns' rewards: 0 if they have none.
    """

    async def reward_cut_attempt(self, messages: Sequence[Message]) -> float | None:
        """Return a reward to add to those of the attempt's turns; None to add nothing.

        Args:
            messages: The whole conversation. The last message is the policy's unfinished one, or an
                observation that the policy can't answer any more.
        """
        ...
