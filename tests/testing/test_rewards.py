"""The conformance check of rewards must catch each way of breaking the contract."""

import asyncio

import pytest

from ratchet.rewards.base import FunctionReward, answer_text
from ratchet.rewards.config import ExactMatchConfig
from ratchet.rewards.exact_match import ExactMatch
from ratchet.testing import check_reward
from ratchet.types import Message, Scored, Task

exact = ExactMatch(ExactMatchConfig())
TASK = Task("t/0", (Message("user", "37+48="),), answer="85")


def flat(trajectory, task):
    return 1.0


def fails_on_empty(trajectory, task):
    return 1.0 / len(answer_text(trajectory)) if answer_text(trajectory) != "8" else 0.0


class Sorted:
    """Gives the outcomes best first instead of in order."""

    async def score(self, trajectories, task):
        return sorted(await exact.score(trajectories, task), key=lambda o: -o.reward)


class Short:
    async def score(self, trajectories, task):
        return (await exact.score(trajectories, task))[:1]


class Drifting:
    def __init__(self):
        self.calls = 0

    async def score(self, trajectories, task):
        self.calls += 1
        return [Scored(o.reward + self.calls) for o in await exact.score(trajectories, task)]


class Untruncates:
    async def score(self, trajectories, task):
        return [Scored(float(answer_text(t) == "85")) for t in trajectories]


class NotFinite:
    async def score(self, trajectories, task):
        return [Scored(float("inf")) for _ in trajectories]


@pytest.mark.parametrize(
    ("reward", "error"),
    [
        (FunctionReward(flat), "the good answer earns 1.0, the bad one 1.0"),
        (FunctionReward(fails_on_empty), "must be Scored, not Failed"),
        (Sorted(), "the good answer earns 1.0, the bad one 1.0|the same answer earns"),
        (Short(), "1 outcomes for 3 trajectories"),
        (Drifting(), "judging the same group again differs"),
        (Untruncates(), "a truncated trajectory must stay Truncated, not become Scored"),
        (NotFinite(), "is not finite"),
        (flat, "function lacks the method `score`"),
    ],
)
def test_a_broken_reward_is_caught(reward, error):
    with pytest.raises(AssertionError, match=error):
        check_reward(reward, TASK, good="85", bad="8")


def test_a_good_reward_passes():
    check_reward(exact, TASK, good="85", bad="8")
    assert asyncio.run(exact.score([], TASK)) == []
