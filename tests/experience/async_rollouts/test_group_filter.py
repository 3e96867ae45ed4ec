"""Filters of groups by their kind, of the library and of one's own."""

import numpy as np
import pytest
import yaml
from forked_runs import training_forks
from pydantic import ValidationError

from ratchet.config.resolve import resolve
from ratchet.config.schema import RunConfig
from ratchet.errors import ConfigError, TrainingError
from ratchet.experience.async_rollouts.group_filter import build_group_filter
from ratchet.testing.builders import make_group, make_trajectory
from ratchet.testing.kill_and_resume import ChaosTest, Trial
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

    def state_dict(self):
        return {"is_next": self.is_next}

    def load_state_dict(self, state) -> None:
        self.is_next = state["is_next"]


class OnlySaves:
    def keep(self, group: Group) -> bool:
        return True

    def state_dict(self):
        return {}


# It keeps every third group, in the order in which they end.
EVERY_THIRD = """
import numpy as np


class EveryThird:
    def __init__(self):
        self.counts = np.zeros(1, np.int64)

    def keep(self, group):
        self.counts += 1
        return self.counts[0] % 3 == 0

    def state_dict(self):
        return {"counts": self.counts}

    def load_state_dict(self, state):
        self.counts = state["counts"]
"""


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
    again = built(f"{__name__}:EveryOther", first=False)
    again.load_state_dict(other.state_dict())
    assert [again(group(0.0)) for _ in range(2)] == [other(group(0.0)) for _ in range(2)]
    assert best.state_dict() is None
    with pytest.raises(ValidationError, match="above"):
        built(f"{__name__}:by_best")


def test_a_filter_that_fails_ends_the_run_by_its_name():
    with pytest.raises(TrainingError, match=r"by_best failed at group g\..*resume(.|\n)*max\("):
        built(f"{__name__}:by_best", above=0.5)(group())
    with pytest.raises(TrainingError, match=r"no_answer returned None for group g\. Return True"):
        built(f"{__name__}:no_answer")(group(0.0))
    with pytest.raises(TrainingError, match="EveryOther failed in load_state_dict"):
        built(f"{__name__}:EveryOther").load_state_dict({})
    with pytest.raises(ConfigError, match="OnlySaves has no load_state_dict"):
        built(f"{__name__}:OnlySaves")


@pytest.mark.slow
def test_a_killed_run_restores_its_filter_s_state(tmp_path):
    (tmp_path / "every_third.py").write_text(EVERY_THIRD)
    recipe = {
        "model": {"preset": "tiny"},
        "tokenizer": {"kind": "characters"},
        "algorithm": {"kind": "grpo", "group_size": 2},
        "environment": {"kind": "sorting"},
        "sampling": {"max_new_tokens": 4},
        "rollouts": {"group_filter": {"kind": "every_third:EveryThird"}, "max_staleness": 1},
        "evaluation": {"tasks": 0},
        "checkpoint": {"every": 1, "keep": 4},
        "logging": {"progress": "off"},
        "steps": 4,
        "batch_size": 2,
    }
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe))
    with training_forks(tmp_path / "output.log") as forks:
        under_test = ChaosTest(path, tmp_path, forks)
        assert under_test.start(under_test.reference_run, "") == 0
        for step in (2, 3):
            verdict = under_test.run_trial(Trial((f"step.update:{step}:kill",)))
            assert (verdict.differences, verdict.has_missed) == ((), False)


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
