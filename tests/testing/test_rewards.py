"""The conformance check of rewards must catch each way of breaking the contract."""

import asyncio
import subprocess
import time

import pytest

from ratchet.rewards.answers.exact_match import ExactMatch, ExactMatchConfig
from ratchet.rewards.base import FunctionReward, answer_text
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


class Excuses:
    """Makes a reward of its service's failure."""

    async def score(self, trajectories, task):
        try:
            subprocess.run(["true"], check=True)
        except OSError:
            return [Scored(0.0) for _ in trajectories]
        return await exact.score(trajectories, task)


class Helped:
    """Asks a helper process, which may die; `again`: starts another then."""

    def __init__(self, *, judges_dead=False, again=True):
        self.helper, self.judges_dead, self.again = None, judges_dead, again

    async def score(self, trajectories, task):
        if self.helper is None:
            self.helper = subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        alive = bool(self.ask())
        if not alive and self.again:
            self.helper = None
        if not alive and not self.judges_dead:
            raise RuntimeError("the helper died")
        return (
            await exact.score(trajectories, task) if alive else [Scored(-1.0) for _ in trajectories]
        )

    def ask(self):
        try:
            self.helper.stdin.write(b"?\n")
            self.helper.stdin.flush()
        except BrokenPipeError:
            return b""
        return self.helper.stdout.readline()


class Hangs:
    async def score(self, trajectories, task):
        await asyncio.Event().wait()


def blocks(trajectory, task):
    time.sleep(1)
    return 1.0


@pytest.mark.parametrize(
    ("reward", "deadline_s", "error"),
    [
        (
            Excuses(),
            30,
            r"out of reach the reward gives Scored\(reward=0.0.*, without the fault Scored\(reward=1.0.*is not a reward; "
            r"let it raise",
        ),
        (
            Helped(judges_dead=True),
            30,
            r"killed the reward gives Scored\(reward=-1.0.*, without the fault Scored\(reward=1.0",
        ),
        (Helped(again=False), 30, "3 calls after a fault has passed, the reward gives Failed"),
        (Hangs(), 0.1, "score gave nothing within 0.1 s: bound what it waits for"),
        (
            FunctionReward(blocks),
            0.1,
            "score still runs 0.2 s after it began: it blocks the event loop",
        ),
    ],
)
def test_faults_and_hangs_are_caught(reward, deadline_s, error):
    with pytest.raises(AssertionError, match=error):
        check_reward(reward, TASK, good="85", bad="8", deadline_s=deadline_s)


def test_one_whose_helper_may_die_passes_where_it_raises_and_starts_another():
    check_reward(Helped(), TASK, good="85", bad="8")


def test_a_reward_is_named_by_its_path_and_needs_no_answers():
    check_reward("ratchet.rewards.answers.exact_match:ExactMatchConfig")
    with pytest.raises(AssertionError, match=r"the good answer earns 1\.0, the bad one 1\.0"):
        check_reward(f"{__name__}:flat", TASK, good="85", bad="8")
