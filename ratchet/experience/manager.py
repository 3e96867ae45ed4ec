"""Plays whole groups of attempts at once and has each group judged."""

from __future__ import annotations

import asyncio
import logging
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

from ratchet.experience.episode import PromptMemo
from ratchet.experience.seeds import seed_for
from ratchet.interfaces import Environment, Reward
from ratchet.types import Failed, Group, Outcome, Sampling, Scored, Task, Trajectory, Truncated, Unjudged

log = logging.getLogger(__name__)

Rows = list[Trajectory]  # of one attempt: one, unless its history forked


class Plays(Protocol):
    """Who plays attempts: `ratchet.experience.episode.Player`, or an agent from outside."""

    async def play(
        self, task: Task, environment: Environment, sampling: Sampling, *, attempt: int, memo: PromptMemo | None = None
    ) -> Rows: ...


class RolloutManager:
    """new_environment: makes an instance; one plays one attempt at a time, and is used again afterwards.

    reward=None: an attempt's reward is what its environment gave turn by turn. needs_reward: whether an attempt that nobody
    judged is of no use; else it is Unjudged.
    """

    def __init__(
        self,
        player: Plays,
        new_environment: Callable[[], Environment],
        reward: Reward | None,
        *,
        needs_reward: bool = True,
    ) -> None:
        self.player, self.new_environment, self.reward = player, new_environment, reward
        self.needs_reward = needs_reward
        self._idle: list[Environment] = []

    async def group(self, task: Task, sampling: Sampling, *, group_id: str, attempts: int, greedy: bool = False) -> Group:
        """`attempts` tries at one task. Attempt i is drawn with a seed made from (sampling.seed, group_id, i). With `greedy`
        there is one more at temperature 0, the group's baseline."""
        memo = PromptMemo()
        tries = [self._attempt(task, sampling, group_id, i, memo) for i in range(attempts)]
        if greedy:
            tries.append(self._attempt(task, replace(sampling, temperature=0.0), group_id, attempts, memo))
        played = list(await asyncio.gather(*tries))
        if greedy:
            played[-1] = [replace(row, use="baseline") for row in played[-1]]
        return Group(group_id, task, tuple(row for rows in await self._judge(task, played) for row in rows))

    async def groups(
        self, jobs: Sequence[tuple[str, Task]], sampling: Sampling, *, attempts: int, greedy: bool = False
    ) -> list[Group]:
        """One group per (id, task), all concurrently, in the order given."""
        made = (self.group(task, sampling, group_id=name, attempts=attempts, greedy=greedy) for name, task in jobs)
        return list(await asyncio.gather(*made))

    async def close(self) -> None:
        idle, self._idle = self._idle, []
        await asyncio.gather(*(_close(environment) for environment in idle))

    async def _attempt(self, task: Task, sampling: Sampling, group_id: str, attempt: int, memo: PromptMemo) -> Rows:
        environment = self._idle.pop() if self._idle else self.new_environment()
        own = replace(sampling, seed=seed_for(sampling.seed, group_id, attempt))
        rows = await self.player.play(task, environment, own, attempt=attempt, memo=memo)
        if isinstance(rows[-1].outcome, Failed):  # its state can't be trusted any more
            await _close(environment)
        else:
            self._idle.append(environment)
        return rows

    async def _judge(self, task: Task, played: Sequence[Rows]) -> list[Rows]:
        """Attempts that ended in order or were cut off get an outcome with a reward; the others keep what they have."""
        judged = list(played)
        chosen = [i for i, rows in enumerate(played) if isinstance(rows[-1].outcome, Truncated | None)]
        outcomes = await self._outcomes([played[i] for i in chosen], task)
        for i, outcome in zip(chosen, outcomes, strict=True):
            if not self.needs_reward and isinstance(outcome, Truncated) and outcome.reward is None:
                outcome = Unjudged(truncated=True)
            judged[i] = [row.judged(outcome) for row in judged[i]]
        return judged

    async def _outcomes(self, candidates: Sequence[Rows], task: Task) -> Sequence[Outcome]:
        """One for each attempt: its rows are judged by the last, which has the whole conversation."""
        if self.reward is None:
            return [_environment_outcome(rows, needed=self.needs_reward) for rows in candidates]
        try:
            scored = await self.reward.score([rows[-1] for rows in candidates], task) if candidates else []
            return [_with_turn_rewards(rows, outcome) for rows, outcome in zip(candidates, scored, strict=True)]
        except Exception:  # the episode boundary: a reward may be anybody's code, and costs only the attempts it was to judge
            return [Failed("reward", traceback.format_exc())] * len(candidates)


async def _close(environment: Environment) -> None:
    try:
        await environment.close()
    except Exception:  # the episode boundary again: nothing is lost with it
        log.warning("an environment failed to close:\n%s", traceback.format_exc())


def _own_reward(rows: Rows) -> float | None:
    """What the environment itself gave, turn by turn; None where it leaves judging to rewards."""
    given = [turn.reward for row in rows for turn in row.turns if turn.reward is not None]
    return sum(given) if given else None


def _environment_outcome(rows: Rows, *, needed: bool) -> Outcome:
    total, truncated = _own_reward(rows), rows[-1].truncated
    if total is None and not needed:
        return Unjudged(truncated=truncated)
    if truncated:
        return Truncated(total or 0.0)
    return Failed("reward", "neither a reward nor the environment judged this attempt") if total is None else Scored(total)


def _with_turn_rewards(rows: Rows, outcome: Outcome) -> Outcome:
    total = _own_reward(rows)
    if total is not None and isinstance(outcome, Scored | Truncated) and outcome.reward is not None:
        return replace(outcome, reward=outcome.reward + total, parts={**outcome.parts, "environment": total})
    return outcome
