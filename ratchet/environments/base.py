"""The base class of the configurations of environments."""

from __future__ import annotations

from typing import ClassVar

from ratchet.config.base import Section


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
