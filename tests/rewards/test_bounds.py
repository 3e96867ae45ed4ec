import asyncio

import pytest

from ratchet.config.registry import KINDS
from ratchet.config.resolve import build, resolve
from ratchet.rewards.base import PerTrajectory
from ratchet.testing import answered
from ratchet.types import Failed, Message, Task


class Percent(PerTrajectory):
    name = "percent"
    bounds = (0.0, 1.0)

    def judge(self, trajectory, task):
        return float(trajectory.messages[-1].text)


def test_a_reward_outside_its_declared_bounds_fails_its_attempt_and_says_so():
    task = Task("t/0", (Message("user", "?"),))
    low, high, over, under = asyncio.run(
        Percent().score([answered(task, text) for text in ("0", "1", "50", "-0.1")], task)
    )
    assert (low.reward, high.reward) == (0.0, 1.0)
    for outcome in (over, under):
        assert isinstance(outcome, Failed)
        assert "outside its declared bounds 0.0 to 1.0" in outcome.detail
    assert "returned 50.0" in over.detail


NEEDED = {
    "regex": {"pattern": "a"},
    "unwanted_text": {"texts": ["a"]},
    "judge": {"url": "http://127.0.0.1:1/v1", "model": "m"},
}
UNBOUNDED = {
    "by_tag": "has those of its rewards",
    "crossthinkqa": "has ROLL's scores, from -1 to 1",
    "malformed_tool_calls": "counts",
    "video_r1": "adds the form of the tags to the answer, from 0 to 2",
    "pairwise_judge": "judges groups, as shares of comparisons that it counts itself",
    "reward_model": "gives any number",
    "remote": "gives any number",
    **dict.fromkeys(("trl", "verl", "openrlhf"), "give any number that a user's function returns"),
}


@pytest.mark.needs("langdetect")
@pytest.mark.parametrize("kind", [kind for kind in KINDS["rewards"] if kind not in UNBOUNDED])
def test_every_built_in_reward_declares_its_bounds(kind):
    assert build(resolve("rewards", {"kind": kind, **NEEDED.get(kind, {})})).bounds == (
        0.0,
        1.0,
    )
