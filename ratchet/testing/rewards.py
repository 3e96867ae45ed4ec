"""What every Reward must do, as one call: `check_reward(reward, task, good="85", bad="86")`."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import replace

from ratchet.interfaces import Reward
from ratchet.types import Message, Outcome, Scored, Task, Trajectory, Truncated


def require(rule: bool, broken: str) -> None:
    """An assertion that `python -O` keeps."""
    if not rule:
        raise AssertionError(broken)


def conversation(messages: Sequence[Message], outcome: Outcome | None = None) -> Trajectory:
    """A trajectory as a reward sees it: a conversation, the judged message last. It holds no tokens."""
    return replace(Trajectory.supervised([], [], messages=tuple(messages)), outcome=outcome)


def answered(task: Task, text: str, outcome: Outcome | None = None) -> Trajectory:
    """`task`'s messages answered with `text`."""
    return conversation((*task.messages, Message("assistant", text)), outcome)


def check_reward(reward: Reward, task: Task, good: str, bad: str) -> None:
    """Raises AssertionError with the broken rule. `good` must earn more than `bad` as an answer to `task`."""
    require(isinstance(reward, Reward), f"{type(reward).__name__} lacks the method `score` of the Reward protocol")
    asyncio.run(_check(reward, task, good, bad))


async def _check(reward: Reward, task: Task, good: str, bad: str) -> None:
    one, two = answered(task, good), answered(task, bad)
    high, low, twin = await _rewards(reward, task, [one, two, one])
    require(high > low, f"the good answer earns {high}, the bad one {low}")
    require(twin == high, f"the same answer earns {high} and {twin} in one group")
    require(await _rewards(reward, task, [one, two, one]) == [high, low, twin], "judging the same group again differs")
    require(await _rewards(reward, task, [two, one, one]) == [low, high, high], "outcomes are not in the trajectories' order")
    require(list(await reward.score([], task)) == [], "an empty group must give no outcomes")
    (cut,) = await reward.score([answered(task, good, Truncated(None))], task)
    require(isinstance(cut, Truncated), f"a truncated trajectory must stay Truncated, not become {type(cut).__name__}")
    await _rewards(reward, task, [answered(task, "")])


async def _rewards(reward: Reward, task: Task, trajectories: Sequence[Trajectory]) -> list[float]:
    outcomes = await reward.score(trajectories, task)
    require(len(outcomes) == len(trajectories), f"{len(outcomes)} outcomes for {len(trajectories)} trajectories")
    rewards: list[float] = []
    for outcome in outcomes:
        if not isinstance(outcome, Scored):
            raise AssertionError(f"a finished trajectory must be Scored, not {outcome}")
        finite = math.isfinite(outcome.reward) and all(math.isfinite(part) for part in outcome.parts.values())
        require(finite, f"{outcome} is not finite")
        rewards.append(outcome.reward)
    return rewards
