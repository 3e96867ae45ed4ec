"""The base class of the configurations of environments."""

from __future__ import annotations

from typing import ClassVar

from ratchet.config.base import Section


class EnvironmentConfig(Section):
    """`default_reward`: kind of the reward that judges this environment's answers unless the recipe
    names another. `gives`: what an algorithm may learn from here (see
    `ratchet.algorithms.config.base.Source`). `judges`: whether its steps give a reward where there
    is no default one."""

    default_reward: ClassVar[str] = ""
    gives: ClassVar[frozenset[str]] = frozenset({"rows", "rollouts"})
    judges: ClassVar[bool] = True


ALL_SOURCES = frozenset({"rows", "pairs", "labelled", "steps", "rollouts"})
