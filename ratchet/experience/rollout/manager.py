"""Plays whole groups of attempts at once and has them judged. What breaks is tried again, and costs
its attempt alone."""

from __future__ import annotations

import asyncio
import copy
import logging
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol, TypeVar

from ratchet.experience.rollout.episode import PromptMemo
from ratchet.experience.rollout.user_code import UserCodeFailed, guarded, limited, may_pass
from ratchet.experience.seeds import seed_for
from ratchet.observe.stall_report import waiting
from ratchet.observe.tracing.spans import ACTIVITY
from ratchet.protocols import Environment, Reward
from ratchet.types import (
    Failed,
    Group,
    Outcome,
    Sampling,
    Scored,
    Task,
    Trajectory,
    Truncated,
    Unjudged,
    finite,
)

log = logging.getLogger(__name__)

T = TypeVar("T")
Rows = list[Trajectory]  # of one attempt: one, unless its history forked

# the outcome of an attempt that is still to be judged: it ended in order, or was cut off
OPEN = Truncated | None

FIXED = frozenset({str, int, float, bool, bytes, type(None)})  # can't be changed in place
CLOSE_TIMEOUT_S = 30.0  # an environment that can't even close must not hold up the run


class Plays(Protocol):
    """Who plays attempts: `ratchet.experience.rollout.episode.Player`, or an agent from outside."""

    async def play(
        self,
        task: Task,
        environment: Environment,
        sampling: Sampling,
        *,
        attempt: int,
        memo: PromptMemo | None = None,
    ) -> Rows: ...


class PlaysGroups(Protocol):
    """Who plays groups: `RolloutManager`, or workers. playing: how many attempts or groups are
    under way."""

    playing: int

    async def groups(
        self,
        jobs: Sequence[tuple[str, Task]],
        sampling: Sampling,
        *,
        attempts: int,
        greedy: bool = False,
        redundant: int = 0,
        wanted: int | None = None,
    ) -> list[Group]: ...

    async def close(self) -> None: ...


class RolloutManager:
    """new_environment: makes an instance; one plays one attempt at a time, and is used again
    afterwards.

    reward=None: an attempt's reward is what its environment gave turn by turn. needs_reward:
    whether an attempt that nobody judged is of no use; else it is Unjudged. judge_timeout_s: of one
    call of the reward; None: no limit. retries: of an attempt that an environment, a deadline or
    the like broke (played again, with the same seeds and a fresh instance), and of judging it.
    """

    def __init__(
        self,
        player: Plays,
        new_environment: Callable[[], Environment],
        reward: Reward | None,
        *,
        needs_reward: bool = True,
        judge_timeout_s: float | None = None,
        retries: int = 0,
    ) -> None:
        self.player, self.new_environment, self.reward = player, new_environment, reward
        self.needs_reward, self.judge_timeout_s, self.retries = (
            needs_reward,
            judge_timeout_s,
            retries,
        )
        # Whether an attempt can be judged as soon as it ends, whatever becomes of the others.
        self._judges_alone = reward is None or not getattr(reward, "together", True)
        self.playing = 0  # attempts that are played or judged now
        self._idle: list[Environment] = []

    async def group(
        self,
        task: Task,
        sampling: Sampling,
        *,
        group_id: str,
        attempts: int,
        greedy: bool = False,
        redundant: int = 0,
    ) -> Group:
        """`attempts` tries at one task. Attempt i is drawn with a seed made from (sampling.seed,
        group_id, i). With `greedy` there is one more at temperature 0, the group's baseline. With
        `redundant`, so many more are begun: the first `attempts` that end well are kept, and the
        others are cancelled."""
        memo = PromptMemo()
        tries = [
            self._attempt(task, sampling, group_id, i, memo) for i in range(attempts + redundant)
        ]
        playing = first(tries, attempts, well=_ended_well)
        if greedy:
            extra = self._attempt(
                task, replace(sampling, temperature=0.0), group_id, len(tries), memo
            )
            played, (baseline,) = await asyncio.gather(playing, first([extra], 1))
            played.append([replace(row, use="baseline") for row in baseline])
        else:
            played = await playing
        judged = played if self._judges_alone else await self._judge_together(task, played)
        return Group(group_id, task, tuple([row for rows in judged for row in rows]))

    async def groups(
        self,
        jobs: Sequence[tuple[str, Task]],
        sampling: Sampling,
        *,
        attempts: int,
        greedy: bool = False,
        redundant: int = 0,
        wanted: int | None = None,
    ) -> list[Group]:
        """One group per (id, task), all concurrently, in the order given; with `wanted`, the first
        so many that are ready, and the others are cancelled."""
        made = [
            self.group(
                task, sampling, group_id=name, attempts=attempts, greedy=greedy, redundant=redundant
            )
            for name, task in jobs
        ]
        return await first(made, len(made) if wanted is None else wanted)

    async def close(self) -> None:
        idle, self._idle = self._idle, []
        await asyncio.gather(*(_close(environment) for environment in idle))

    async def _attempt(
        self, task: Task, sampling: Sampling, group_id: str, attempt: int, memo: PromptMemo
    ) -> Rows:
        self.playing += 1
        try:
            own = sampling.seeded(seed_for(sampling.seed, group_id, attempt))
            retries = 0
            with ACTIVITY.attempt(group_id, attempt):
                rows = await self._play(task, own, attempt, memo)
                while retries < self.retries and may_pass(rows[-1].outcome):
                    retries += 1
                    rows = await self._play(task, own, attempt, memo, fresh=True)
            if retries:
                rows = [
                    replace(row, metrics={**row.metrics, "retries": float(retries)}) for row in rows
                ]
            return (await self._judge(task, [rows]))[0] if self._judges_alone else rows
        finally:
            self.playing -= 1

    async def _play(
        self, task: Task, sampling: Sampling, attempt: int, memo: PromptMemo, *, fresh: bool = False
    ) -> Rows:
        environment = self._idle.pop() if self._idle and not fresh else self.new_environment()
        ended = False
        try:
            rows = await self.player.play(
                _own(task), environment, sampling, attempt=attempt, memo=memo
            )
            ended = not isinstance(rows[-1].outcome, Failed)
            return rows
        finally:
            if ended:
                self._idle.append(environment)
            else:  # its state can't be trusted any more
                await _close(environment)

    async def _judge_together(self, task: Task, played: Sequence[Rows]) -> list[Rows]:
        self.playing += 1  # as one that is under way, for who waits until nothing moves
        try:
            return await self._judge(task, played)
        finally:
            self.playing -= 1

    async def _judge(self, task: Task, played: Sequence[Rows]) -> list[Rows]:
        """Attempts that ended in order or were cut off get an outcome with a reward; the others
        keep what they have."""
        judged = list(played)
        chosen = [i for i, rows in enumerate(played) if isinstance(rows[-1].outcome, OPEN)]
        if not chosen:
            return judged
        outcomes = await self._outcomes([played[i] for i in chosen], task)
        for i, outcome in zip(chosen, outcomes, strict=True):
            if not self.needs_reward and isinstance(outcome, Truncated) and outcome.reward is None:
                outcome = Unjudged(truncated=True)
            judged[i] = [row.judged(outcome) for row in judged[i]]
        return judged

    async def _outcomes(self, candidates: Sequence[Rows], task: Task) -> list[Outcome]:
        """One for each attempt: its rows are judged by the last, which has the whole conversation.
        What was judged stays so when another is judged again."""
        if self.reward is None:
            return [_environment_outcome(rows, needed=self.needs_reward) for rows in candidates]
        outcomes = await self._score(self.reward, candidates, task)
        for _ in range(self.retries):
            open_ones = [i for i, outcome in enumerate(outcomes) if may_pass(outcome)]
            if not open_ones:
                break
            again = await self._score(self.reward, candidates, task)
            for i in open_ones:
                outcomes[i] = again[i]
        return list(map(_with_turn_rewards, candidates, outcomes))

    async def _score(self, reward: Reward, candidates: Sequence[Rows], task: Task) -> list[Outcome]:
        try:
            async with limited(self.judge_timeout_s):
                with waiting(
                    "attempts", "score", f"reward {type(reward).__name__}", self.judge_timeout_s
                ):
                    given = await guarded(
                        lambda: reward.score([rows[-1] for rows in candidates], task)
                    )
            return [_checked(outcome, reward) for outcome in _one_each(given, candidates, reward)]
        except TimeoutError:
            waited = f"{type(reward).__name__}.score gave nothing within {self.judge_timeout_s:g} s"
            return [Failed("timeout", waited)] * len(candidates)
        except UserCodeFailed as failure:
            return [Failed("reward", str(failure))] * len(candidates)


async def first(
    coroutines: Sequence[Coroutine[Any, Any, T]],
    n: int,
    *,
    well: Callable[[T], bool] = lambda _: True,
    parting: Callable[[], Coroutine[Any, Any, None]] | None = None,
) -> list[T]:
    """Results of the first `n` that end as `well` likes, and of those that ended otherwise by then,
    in the order given; the others are cancelled, after `parting`."""
    loop = asyncio.get_running_loop()
    tasks = [loop.create_task(coroutine) for coroutine in coroutines]
    pending = set(tasks)
    try:
        if n >= len(tasks):
            return list(await asyncio.gather(*tasks))
        good: list[asyncio.Task[T]] = []
        while pending and len(good) < n:
            _, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            good = [task for task in tasks if task.done() and well(task.result())]
        surplus = good[n:]
        chosen = [task.result() for task in tasks if task.done() and task not in surplus]
        if parting is not None:
            await parting()
        return chosen
    finally:
        # Asking a task for its exception also tells asyncio that somebody has looked at it.
        left = [task for task in tasks if not task.done() or task.cancelled() or task.exception()]
        for task in left:
            task.cancel()
        if left:
            await asyncio.gather(*left, return_exceptions=True)


def _own(task: Task) -> Task:
    """What could be changed in place is the attempt's own: neither another one nor the reward sees
    it. In a third of the time that `replace` with copies in depth takes."""
    answer = task.answer if type(task.answer) in FIXED else copy.deepcopy(task.answer)
    flat = type(task.meta) is dict and FIXED.issuperset(map(type, task.meta.values()))
    meta = dict(task.meta) if flat else copy.deepcopy(task.meta)
    return Task(task.id, task.messages, answer, task.environment, task.seed, task.tag, meta)


def _ended_well(rows: Rows) -> bool:
    return not isinstance(rows[-1].outcome, Failed)


async def _close(environment: Environment) -> None:
    try:
        async with asyncio.timeout(CLOSE_TIMEOUT_S):
            await guarded(environment.close)
    except (TimeoutError, UserCodeFailed) as failure:  # nothing is lost with it
        log.warning(
            "an environment failed to close:\n%s",
            str(failure) or f"not done after {CLOSE_TIMEOUT_S:g} s",
        )


def _one_each(given: Any, candidates: Sequence[Rows], reward: Reward) -> list[Any]:
    name = type(reward).__name__
    if not isinstance(given, list | Sequence):  # the former is told at once, the latter asked for
        raise UserCodeFailed(f"{name}.score gave {given!r:.80}, it must be a sequence of outcomes")
    if len(given) != len(candidates):
        raise UserCodeFailed(
            f"{name}.score gave {len(given)} outcomes for {len(candidates)} trajectories"
        )
    return list(given)


def _checked(outcome: Any, reward: Reward) -> Outcome:
    name = type(reward).__name__
    if not isinstance(outcome, Outcome):
        return Failed(
            "reward",
            f"{name}.score gave {outcome!r:.80} for an attempt, it must be an Outcome such as "
            "Scored(1.0)",
        )
    if isinstance(outcome, Scored | Truncated):
        unknown = isinstance(outcome, Truncated) and outcome.reward is None
        parts = outcome.parts.values() if isinstance(outcome.parts, dict | Mapping) else [None]
        if not all(map(finite, parts)) or not (unknown or finite(outcome.reward)):
            return Failed(
                "reward",
                f"{name}.score gave {outcome!r:.200}, and rewards and their parts are finite "
                "numbers",
            )
    return outcome


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
    return (
        Failed("unjudged", "neither a reward nor the environment judged this attempt")
        if total is None
        else Scored(total)
    )


def _with_turn_rewards(rows: Rows, outcome: Outcome) -> Outcome:
    total = _own_reward(rows)
    if total is not None and isinstance(outcome, Scored | Truncated) and outcome.reward is not None:
        return replace(
            outcome, reward=outcome.reward + total, parts={**outcome.parts, "environment": total}
        )
    return outcome
