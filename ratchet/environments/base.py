"""The base class of the configurations of environments, and an optional part of environments."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Protocol, runtime_checkable

from ratchet.config.base import Section
from ratchet.types import Message


class EnvironmentConfig(Section):
    """The base class of environments' sections.

    Attributes:
        default_reward: Kind of the reward, unless the recipe names another; "": none.
        data_kinds: The kinds of training data that the environment offers
            (`ratchet.algorithms.config.base.Source`).
        judges: True if the environment's steps return rewards when there is no default reward.
    """

    default_reward: ClassVar[str] = ""
    data_kinds: ClassVar[frozenset[str]] = frozenset({"rows", "rollouts"})
    judges: ClassVar[bool] = True


ALL_SOURCES = frozenset({"rows", "pairs", "labelled", "steps", "rollouts"})


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
