"""Plays whole groups of attempts at once and has each group judged."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace

from ratchet.experience.episode import Player, PromptMemo
from ratchet.experience.seeds import seed_for
from ratchet.interfaces import Environment, Reward
from ratchet.types import Failed, Group, Outcome, Sampling, Scored, Task, Trajectory, Truncated


class RolloutManager:
    """new_environment: makes an instance; one plays one attempt at a time, and is used again afterwards.

    reward=None: an attempt's reward is what its environment gave turn by turn.
    """

    def __init__(self, player: Player, new_environment: Callable[[], Environment], reward: Reward | None) -> None:
        self.player, self.new_environment, self.reward = player, new_environment, reward
        self._idle: list[Environment] = []

    async def group(self, task: Task, sampling: Sampling, *, group_id: str, attempts: int) -> Group:
        """`attempts` tries at one task. Attempt i is drawn with a seed made from (sampling.seed, group_id, i)."""
        memo = PromptMemo()
        played = await asyncio.gather(*(self._attempt(task, sampling, group_id, i, memo) for i in range(attempts)))
        return Group(group_id, task, tuple(await self._judge(task, played)))

    async def groups(self, jobs: Sequence[tuple[str, Task]], sampling: Sampling, *, attempts: int) -> list[Group]:
        """One group per (id, task), all concurrently, in the order given."""
        return list(
            await asyncio.gather(*(self.group(task, sampling, group_id=name, attempts=attempts) for name, task in jobs))
        )

    async def close(self) -> None:
        await asyncio.gather(*(environment.close() for environment in self._idle))
        self._idle.clear()

    async def _attempt(self, task: Task, sampling: Sampling, group_id: str, attempt: int, memo: PromptMemo) -> Trajectory:
        environment = self._idle.pop() if self._idle else self.new_environment()
        own = replace(sampling, seed=seed_for(sampling.seed, group_id, attempt))
        trajectory = await self.player.play(task, environment, own, attempt=attempt, memo=memo)
        if isinstance(trajectory.outcome, Failed):  # its state can't be trusted any more
            await environment.close()
        else:
            self._idle.append(environment)
        return trajectory

    async def _judge(self, task: Task, played: Sequence[Trajectory]) -> list[Trajectory]:
        """Attempts that ended in order or were cut off get an outcome with a reward; the others keep what they have."""
        judged = list(played)
        rows = [i for i, t in enumerate(played) if t.outcome is None or isinstance(t.outcome, Truncated)]
        candidates = [played[i] for i in rows]
        if self.reward is None:
            outcomes: Sequence[Outcome] = [_environment_outcome(t) for t in candidates]
        else:
            scored = await self.reward.score(candidates, task) if candidates else []
            outcomes = [_with_turn_rewards(t, outcome) for t, outcome in zip(candidates, scored, strict=True)]
        for i, outcome in zip(rows, outcomes, strict=True):
            judged[i] = judged[i].judged(outcome)
        return judged


def _environment_outcome(trajectory: Trajectory) -> Outcome:
    total = sum(turn.reward for turn in trajectory.turns)
    return Truncated(total) if isinstance(trajectory.outcome, Truncated) else Scored(total)


def _with_turn_rewards(trajectory: Trajectory, outcome: Outcome) -> Outcome:
    total = sum(turn.reward for turn in trajectory.turns)
    if total and isinstance(outcome, Scored | Truncated) and outcome.reward is not None:
        return replace(outcome, reward=outcome.reward + total, parts={**outcome.parts, "environment": total})
    return outcome
