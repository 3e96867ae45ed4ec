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
from ratchet.errors import TrainingError
from ratchet.types import Group
from ratchet.utils.user_code import is_user_error

GroupFilter = Callable[[Group], bool]


class RewardStdConfig(Section):
    """Groups train if the standard deviation of their rewards exceeds a bound."""

    builds: ClassVar[str] = "ratchet.experience.async_rollouts.group_filter:build_reward_std"

    above: float = Field(
        ge=0,
        description="Lower bound, exclusive, of the population standard deviation of a group's "
        "rewards, as judged (before shaping).",
    )


def build_reward_std(config: RewardStdConfig) -> GroupFilter:
    """Return the filter of a section."""
    return partial(_exceeds_std, above=config.above)


def build_group_filter(section: Section) -> GroupFilter:
    """Return the filter of a section, whose errors say that they are the filter's.

    The filter is a function of a group, or an object with such a function named `keep`. It returns
    True for a group that trains (a bool of Python or numpy).

    Raises TrainingError, when called, if the filter raises or returns something else.
    """
    user_filter: Any = build(section)
    keep: Any = getattr(user_filter, "keep", user_filter)  # a function has no method `keep`
    return partial(_call_filter, keep, section.kind_name)


def _call_filter(keep: Callable[[Group], object], name: str, group: Group) -> bool:
    try:
        is_kept = keep(group)
    except BaseException as error:  # user code
        if not is_user_error(error):
            raise
        raise TrainingError(
            f"rollouts.group_filter={name} failed at group {group.id}. Mend it, then resume:\n"
            f"{traceback.format_exc()}"
        ) from error
    if not isinstance(is_kept, bool | np.bool_):
        raise TrainingError(
            f"rollouts.group_filter={name} returned {is_kept!r:.80} for group {group.id}. Return "
            "True for a group that trains, and False for one to replace"
        )
    return bool(is_kept)


def _exceeds_std(group: Group, *, above: float) -> bool:
    rewards = {
        row.attempt: row.reward
        for row in group.trajectories
        if row.use == "train" and row.reward is not None
    }
    return len(rewards) > 0 and pstdev(rewards.values()) > above
