"""Group filters: decide which groups train, and which a new group replaces."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from functools import partial
from statistics import pstdev
from typing import Any, ClassVar

import numpy as np
from pydantic import Field

from ratchet.config.base import Section
from ratchet.config.resolve import build
from ratchet.errors import ConfigError, TrainingError
from ratchet.types import Group
from ratchet.utils.user_code import is_user_error


class RewardStdConfig(Section):
    """Groups train if the standard deviation of their rewards exceeds a bound."""

    builds: ClassVar[str] = "ratchet.experience.async_rollouts.group_filter:build_reward_std"

    above: float = Field(ge=0)
    """Lower bound, exclusive, of the population standard deviation of a group's rewards, as judged
    (before shaping)."""


def build_reward_std(config: RewardStdConfig) -> Callable[[Group], bool]:
    """Return the filter of a section."""
    return partial(_exceeds_std, above=config.above)


class GroupFilter:
    """The group filter of a recipe. Its errors name it.

    Args:
        user_filter: A function of a group, or an object with such a function named `keep`. It
            returns True for a group that trains (a bool of Python or numpy). An object may have
            `state_dict()`, whose result checkpoints save, and `load_state_dict(state)`.
        name: The name of the filter in error messages.

    Raises ConfigError if the filter has only one of `state_dict` and `load_state_dict`.
    """

    def __init__(self, user_filter: Any, name: str) -> None:
        self.name = name
        self._user_filter = user_filter
        # A function has no method `keep`.
        self._keep: Callable[[Group], object] = getattr(user_filter, "keep", user_filter)
        self._has_state = hasattr(user_filter, "state_dict")
        if self._has_state != hasattr(user_filter, "load_state_dict"):
            missing = "load_state_dict" if self._has_state else "state_dict"
            raise ConfigError(
                f"rollouts.group_filter={name} has no {missing}, so that a resumed run could not "
                f"restore its state. Give it both, or neither"
            )

    def __call__(self, group: Group) -> bool:
        """Return True if the group trains.

        Raises TrainingError if the filter raises or returns something else than a boolean.
        """
        is_kept = self._call(lambda: self._keep(group), f"at group {group.id}")
        if not isinstance(is_kept, bool | np.bool_):
            raise TrainingError(
                f"rollouts.group_filter={self.name} returned {is_kept!r:.80} for group {group.id}. "
                "Return True for a group that trains, and False for one to replace"
            )
        return bool(is_kept)

    def state_dict(self) -> Any:
        """Return the filter's state for a checkpoint; None if it has none.

        Raises TrainingError if the filter raises.
        """
        if not self._has_state:
            return None
        return self._call(self._user_filter.state_dict, "in state_dict")

    def load_state_dict(self, state: Any) -> None:
        """Restore what `state_dict` returned. Raises TrainingError if the filter raises."""
        if self._has_state and state is not None:
            self._call(lambda: self._user_filter.load_state_dict(state), "in load_state_dict")

    def _call(self, call: Callable[[], object], place: str) -> object:
        try:
            return call()
        except BaseException as error:  # user code
            if not is_user_error(error):
                raise
            raise TrainingError(
                f"rollouts.group_filter={self.name} failed {place}. Mend it, then resume:\n"
                f"{traceback.format_exc()}"
            ) from error


def build_group_filter(section: Section) -> GroupFilter:
    """Return the filter of a section. Raises ConfigError if it saves a state but restores none."""
    return GroupFilter(build(section), section.kind_name)


def _exceeds_std(group: Group, *, above: float) -> bool:
    rewards = {
        row.attempt: row.reward
        for row in group.trajectories
        if row.use == "train" and row.reward is not None
    }
    return len(rewards) > 0 and pstdev(rewards.values()) > above
