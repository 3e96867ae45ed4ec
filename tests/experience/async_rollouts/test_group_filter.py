"""Filters of groups by their kind, of the library and of one's own."""

import numpy as np
import pytest
from pydantic import ValidationError

from ratchet.config.resolve import resolve
from ratchet.config.schema import RunConfig
from ratchet.errors import TrainingError
from ratchet.experience.async_rollouts.group_filter import build_group_filter
from ratchet.testing.builders import make_group, make_trajectory
from ratchet.types import Group


def group(*rewards):
    rows = [
        make_trajectory([1], [2], reward=reward, attempt=attempt)
        for attempt, reward in enumerate(rewards)
    ]
    return make_group("g", rows)


def by_best(group, above: float):
    return max(row.reward for row in group.trajectories) > above


def by_spread(group):
    return np.std([row.reward for row in group.trajectories]) > 0.4


def no_answer(group):
    return None


class EveryOther:
    def __init__(self, first: bool = True) -> None:
        self.is_next = not first

    def keep(self, group: Group) -> bool:
        self.is_next = not self.is_next
        return self.is_next


def built(kind, **keys):
    return build_group_filter(resolve("group_filter", {"kind": kind, **keys}))


def test_a_spread_of_rewards_is_above_its_bound():
    # The population standard deviation of 0, 1, 1, 0 is 0.5.
    assert built("reward_std", above=0.4)(group(0.0, 1.0, 1.0, 0.0))
    assert not built("reward_std", above=0.5)(group(0.0, 1.0, 1.0, 0.0))
    assert not built("reward_std", above=0.0)(group(1.0, 1.0))
    assert not built("reward_std", above=0.0)(group())


def test_a_function_or_class_of_one_s_own_is_a_filter():
    best = built(f"{__name__}:by_best", above=0.5)
    assert (best(group(0.0, 1.0)), best(group(0.0, 0.5))) == (True, False)
    spread = built(f"{__name__}:by_spread")
    assert [spread(group(0.0, 1.0)), spread(group(1.0, 1.0))] == [True, False]
    other = built(f"{__name__}:EveryOther", first=False)
    assert [other(group(0.0)) for _ in range(3)] == [False, True, False]
    with pytest.raises(ValidationError, match="above"):
        built(f"{__name__}:by_best")


def test_a_filter_that_fails_ends_the_run_by_its_name():
    with pytest.raises(TrainingError, match=r"by_best failed at group g\..*resume(.|\n)*max\("):
        built(f"{__name__}:by_best", above=0.5)(group())
    with pytest.raises(TrainingError, match=r"no_answer returned None for group g\. Return True"):
        built(f"{__name__}:no_answer")(group(0.0))


def test_a_recipe_s_filter_is_written_with_its_keys():
    section = {"kind": f"{__name__}:by_best", "above": 0.5}
    recipe = {
        "model": {"preset": "tiny"},
        "stages": [{
            "name": "a",
            "steps": 1,
            "algorithm": {"kind": "grpo"},
            "environment": {"kind": "sorting"},
            "rollouts": {"group_filter": section},
        }],
    }  # fmt: skip
    rollouts = RunConfig.model_validate(recipe).stages[0].rollouts
    assert rollouts.prefetches
    assert rollouts.model_dump()["group_filter"] == section
