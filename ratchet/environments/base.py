"""The base class of the configurations of environments."""

from __future__ import annotations

from typing import ClassVar

from ratchet.config.base import Section


class EnvironmentConfig(Section):
    """The base class of environments' sections.

    Attributes:
        default_reward: Kind of the reward for this environment unless the recipe names another.
        gives: The kinds of training data that it offers (`ratchet.algorithms.config.base.Source`).
        judges: True if its steps give a reward when there is no default one.
    """

    default_reward: ClassVar[str] = ""
    gives: ClassVar[frozenset[str]] = frozenset({"rows", "rollouts"})
    judges: ClassVar[bool] = True


ALL_SOURCES = frozenset({"rows", "pairs", "labelled", "steps", "rollouts"})
