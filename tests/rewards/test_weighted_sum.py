import asyncio

import pytest

from ratchet.errors import ConfigError
from ratchet.rewards.answers.exact_match import ExactMatch, ExactMatchConfig
from ratchet.rewards.base import FunctionReward, answer_text
from ratchet.rewards.weighted_sum import WeightedSum
from ratchet.testing import answered, check_reward
from ratchet.types import Cancelled, Failed, Message, Scored, Task, Truncated, Unjudged
from ratchet.utils.user_code import UserCodeFailed

TASK = Task("t/0", (Message("user", "37+48="),), answer="85")
exact = ExactMatch(ExactMatchConfig())


def length(trajectory, task):
    return len(answer_text(trajectory))


def style(trajectory, task):
    return {"short": 0.25, "polite": 0.5}


def fragile(trajectory, task):
    return 1 / len(answer_text(trajectory))


class Fixed:
    def __init__(self, outcome):
        self.outcome = outcome

    async def score(self, trajectories, task):
        return [self.outcome for _ in trajectories]


def judge(reward, *texts, outcome=None):
    return asyncio.run(reward.score([answered(TASK, text, outcome) for text in texts], TASK))


def test_the_reward_is_the_weighted_sum_and_parts_are_logged_unweighted():
    reward = WeightedSum(
        {"exact": exact, "length": FunctionReward(length)}, {"exact": 2.0, "length": -0.125}
    )
    assert judge(reward, "85", "8500") == [
        Scored(2.0 - 0.25, {"exact": 1.0, "exact/exact_match": 1.0, "length": 2.0}),
        Scored(0.0 - 0.5, {"exact": 0.0, "exact/exact_match": 0.0, "length": 4.0}),
    ]


@pytest.mark.parametrize("weight", [True, "1", float("nan")])
def test_a_weight_that_is_no_number_is_refused(weight):
    with pytest.raises(ConfigError, match=r"weights\['exact'\]=.* is not a finite number"):
        WeightedSum({"exact": exact}, {"exact": weight})


def test_a_class_that_changes_its_task_changes_it_for_no_other_call():
    class Taker:
        async def score(self, trajectories, task):
            return [Scored(task.meta["tests"].pop()) for _ in trajectories]

    task = Task("t", (Message("user", "?"),), meta={"tests": [2.0]})
    reward = WeightedSum({"taken": Taker(), "again": Taker()}, {"taken": 1.0, "again": 1.0})
    for _ in range(2):
        (outcome,) = asyncio.run(reward.score([answered(task, "a")], task))
        assert outcome.reward == 4.0


def test_parts_of_parts_keep_both_names():
    reward = WeightedSum({"style": FunctionReward(style)}, {"style": 2.0})
    assert judge(reward, "85") == [
        Scored(1.5, {"style": 0.75, "style/short": 0.25, "style/polite": 0.5})
    ]


def test_one_failed_part_fails_its_attempt_alone():
    reward = WeightedSum(
        {"exact": exact, "fragile": FunctionReward(fragile)}, {"exact": 1.0, "fragile": 0.0}
    )
    good, broken = judge(reward, "85", "")
    assert isinstance(good, Scored)
    assert good.reward == 1.0
    assert isinstance(broken, Failed)
    assert broken.kind == "reward"
    assert broken.detail.startswith("reward 'fragile': ")
    assert "ZeroDivisionError" in broken.detail


def test_truncation_and_cancellation_pass_through():
    both = {"exact": 1.0, "other": 1.0}
    reward = WeightedSum({"exact": exact, "other": FunctionReward(length)}, both)
    (cut,) = judge(reward, "85", outcome=Truncated(None))
    assert cut == Truncated(
        2.0, {"exact": 0.0, "exact/exact_match": 0.0, "other": 2.0, "other/length": 2.0}
    )
    assert judge(WeightedSum({"exact": exact, "other": Fixed(Cancelled("late"))}, both), "85") == [
        Cancelled("late")
    ]
    assert judge(WeightedSum({"exact": exact, "other": Fixed(Unjudged())}, both), "85") == [
        Unjudged()
    ]
    (unjudged,) = judge(
        WeightedSum({"other": Fixed(Truncated(None)), "exact": exact}, both),
        "85",
        outcome=Truncated(None),
    )
    assert isinstance(unjudged, Truncated)
    assert unjudged.reward is None


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_an_object_that_scores_no_finite_number_fails_the_attempt(value):
    (outcome,) = judge(
        WeightedSum({"exact": exact, "odd": Fixed(Scored(value))}, {"exact": 1.0, "odd": 0.0}), "85"
    )
    assert outcome == Failed("reward", f"reward 'odd' is {value}: it must be finite")


def test_names_must_match():
    with pytest.raises(
        ConfigError, match=r"rewards \['exact'\] and weights \['exakt'\] must have the same names"
    ):
        WeightedSum({"exact": exact}, {"exakt": 1.0})
    with pytest.raises(ConfigError, match="at least one"):
        WeightedSum({}, {})


def test_it_keeps_the_contract_of_rewards():
    check_reward(
        WeightedSum(
            {"exact": exact, "length": FunctionReward(length)}, {"exact": 1.0, "length": 0.1}
        ),
        TASK,
        "85",
        "8",
    )


class Panic(BaseException):
    """As of a library in Rust."""


class Raises:
    """A reward of its own kind, which raises before or after it waits."""

    def __init__(self, error):
        self.error = error

    async def score(self, trajectories, task):
        raise self.error


@pytest.mark.parametrize("error", [SystemExit(3), Panic("rust"), GeneratorExit()])
def test_nothing_that_a_reward_raises_beside_another_ends_the_run(error):
    """Rewards of a sum are tasks: a SystemExit in one would end the event loop, and the run."""

    def exits(trajectory, task):
        if answer_text(trajectory) == "8500":
            raise error
        return 1.0

    reward = WeightedSum(
        {"exact": exact, "exits": FunctionReward(exits)}, {"exact": 1.0, "exits": 1.0}
    )
    good, broken = judge(reward, "85", "8500")
    assert isinstance(good, Scored)
    assert isinstance(broken, Failed)
    assert type(error).__name__ in broken.detail
    reward = WeightedSum({"exact": exact, "raises": Raises(error)}, {"exact": 1.0, "raises": 1.0})
    with pytest.raises(UserCodeFailed, match=type(error).__name__):
        judge(reward, "85")
