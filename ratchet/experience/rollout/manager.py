"""Play groups of attempts concurrently and judge them. A failed attempt is retried."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol, TypeVar

from ratchet.experience.rollout.environment_answers import (
    MAX_NUMBER,
    close_environment,
    is_computable,
    show,
)
from ratchet.experience.rollout.episode_state import PromptCache
from ratchet.experience.rollout.failures import is_retryable
from ratchet.experience.seeds import derive_seed
from ratchet.observe.stall_report import waiting
from ratchet.protocols import Environment, Reward
from ratchet.rewards.base import copy_task
from ratchet.rewards.deadline import limit_time
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
)
from ratchet.utils.tracer import ATTEMPT_TRACK, REWARD_TRACK, span
from ratchet.utils.user_code import UserCodeFailed, leave_when_cancelled, run_guarded
from ratchet.utils.user_parts import add_missing_members

log = logging.getLogger(__name__)

T = TypeVar("T")
AttemptRows = list[Trajectory]  # the trajectories of one attempt: one, unless its history forked

# Outcomes that a reward still judges: None (the attempt ended normally) and Truncated.
JUDGEABLE = Truncated | None


class AttemptPlayer(Protocol):
    """A player of attempts: `EpisodePlayer`, or a player for external agents."""

    async def play(
        self,
        task: Task,
        environment: Environment,
        sampling: Sampling,
        *,
        attempt: int,
        prompt_cache: PromptCache | None = None,
    ) -> AttemptRows: ...


class GroupPlayer(Protocol):
    """A player of groups: `RolloutManager`, or a pool of rollout workers.

    `n_playing` is the number of attempts or groups in flight.
    """

    n_playing: int

    async def groups(
        self,
        jobs: Sequence[tuple[str, Task]],
        sampling: Sampling,
        *,
        attempts: int,
        greedy: bool = False,
        redundant: int = 0,
        keep_first: int | None = None,
    ) -> list[Group]: ...

    async def close(self) -> None: ...


class RolloutManager:
    """The manager of a stage's attempts.

    Args:
        player: Plays single attempts.
        new_environment: Creates an environment. It plays one attempt at a time and is reused.
        reward: Judges attempts; None takes the sum of the environment's turn rewards.
        needs_reward: If True, an attempt without a reward fails. If False, it becomes Unjudged.
        judge_timeout_s: Seconds for one call of the reward; None sets no limit.
        retries: Maximum number of retries of an attempt that failed because of infrastructure, and
            of its judging. A retried attempt has the same seeds and a new environment.
    """

    def __init__(
        self,
        player: AttemptPlayer,
        new_environment: Callable[[], Environment],
        reward: Reward | None,
        *,
        needs_reward: bool = True,
        judge_timeout_s: float | None = None,
        retries: int = 0,
    ) -> None:
        self.player = player
        self.new_environment = new_environment
        self.reward = None if reward is None else add_missing_members(reward, Reward)
        self.needs_reward = needs_reward
        self.judge_timeout_s = judge_timeout_s
        self.retries = retries
        # True if an attempt can be judged as soon as it ends, without the rest of its group.
        self._judges_alone = self.reward is None or not self.reward.compares_attempts
        self.n_playing = 0  # attempts that are being played or judged
        # Called with the number of attempts of each group that has ended.
        self.on_group_end: Callable[[int], None] | None = None
        self._idle_environments: list[Environment] = []

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
        """Play `attempts` attempts at one task and judge them.

        Attempt i is sampled with a seed derived from (sampling.seed, group_id, i).

        Args:
            greedy: Add an attempt at temperature 0, the group's baseline.
            redundant: Begin this many more attempts. The first `attempts` that do not fail are
                kept, and the others are cancelled.
        """
        prompt_cache = PromptCache()
        coroutines = [
            self._attempt(task, sampling, group_id, i, prompt_cache)
            for i in range(attempts + redundant)
        ]
        played_attempts = gather_first(coroutines, attempts, is_good=_has_not_failed)
        if greedy:
            greedy_coroutine = self._attempt(
                task, replace(sampling, temperature=0.0), group_id, len(coroutines), prompt_cache
            )
            attempt_rows, (baseline,) = await asyncio.gather(
                played_attempts, gather_first([greedy_coroutine], 1)
            )
            attempt_rows.append([replace(row, use="baseline") for row in baseline])
        else:
            attempt_rows = await played_attempts
        judged_rows = (
            attempt_rows if self._judges_alone else await self._judge_together(task, attempt_rows)
        )
        if self.on_group_end is not None:
            self.on_group_end(attempts)
        return Group(group_id, task, tuple([row for rows in judged_rows for row in rows]))

    async def groups(
        self,
        jobs: Sequence[tuple[str, Task]],
        sampling: Sampling,
        *,
        attempts: int,
        greedy: bool = False,
        redundant: int = 0,
        keep_first: int | None = None,
    ) -> list[Group]:
        """Play one group for each (id, task), all concurrently, and return them in this order.

        With `keep_first`, only that many groups are returned: those that end first. The others are
        cancelled.
        """
        coroutines = [
            self.group(
                task,
                sampling,
                group_id=group_id,
                attempts=attempts,
                greedy=greedy,
                redundant=redundant,
            )
            for group_id, task in jobs
        ]
        return await gather_first(coroutines, len(coroutines) if keep_first is None else keep_first)

    async def close(self) -> None:
        idle, self._idle_environments = self._idle_environments, []
        await asyncio.gather(*(_close(environment) for environment in idle))

    async def _attempt(
        self, task: Task, sampling: Sampling, group_id: str, attempt: int, prompt_cache: PromptCache
    ) -> AttemptRows:
        """Play an attempt, with retries, and judge it unless its group is judged together."""
        self.n_playing += 1
        try:
            seeded = sampling.seeded(derive_seed(sampling.seed, group_id, attempt))
            retries = 0
            with span(ATTEMPT_TRACK, f"{group_id}#{attempt}") as attempt_span:
                rows = await self._play(task, seeded, attempt, prompt_cache)
                while retries < self.retries and is_retryable(rows[-1].outcome):
                    retries += 1
                    rows = await self._play(
                        task, seeded, attempt, prompt_cache, in_new_environment=True
                    )
                if attempt_span is not None:
                    attempt_span.attributes = {
                        "rl.attempt.outcome": type(rows[-1].outcome).__name__.lower(),
                        "rl.attempt.retries": retries,
                        "rl.task.tag": task.tag,
                    }
            if retries:
                rows = [
                    replace(row, metrics={**row.metrics, "retries": float(retries)}) for row in rows
                ]
            return (await self._judge(task, [rows]))[0] if self._judges_alone else rows
        finally:
            self.n_playing -= 1

    async def _play(
        self,
        task: Task,
        sampling: Sampling,
        attempt: int,
        prompt_cache: PromptCache,
        *,
        in_new_environment: bool = False,
    ) -> AttemptRows:
        """Play an attempt once, in an idle or a new environment."""
        environment = (
            self._idle_environments.pop()
            if self._idle_environments and not in_new_environment
            else add_missing_members(self.new_environment(), Environment)
        )
        is_reusable = False
        try:
            rows = await self.player.play(
                copy_task(task), environment, sampling, attempt=attempt, prompt_cache=prompt_cache
            )
            is_reusable = not isinstance(rows[-1].outcome, Failed)
            return rows
        finally:
            if is_reusable:
                self._idle_environments.append(environment)
            else:  # its state is unreliable after a failure
                await _close(environment)

    async def _judge_together(
        self, task: Task, attempt_rows: Sequence[AttemptRows]
    ) -> list[AttemptRows]:
        """Judge all attempts of a group in one call of the reward."""
        # Judging counts as an attempt in flight, so that a snapshot waits for it.
        self.n_playing += 1
        try:
            return await self._judge(task, attempt_rows)
        finally:
            self.n_playing -= 1

    async def _judge(self, task: Task, attempt_rows: Sequence[AttemptRows]) -> list[AttemptRows]:
        """Judge the attempts that ended normally or were cut off. Others keep their outcome."""
        judged_rows = list(attempt_rows)
        judgeable_indices = [
            i for i, rows in enumerate(attempt_rows) if isinstance(rows[-1].outcome, JUDGEABLE)
        ]
        if not judgeable_indices:
            return judged_rows
        outcomes = await self._compute_outcomes([attempt_rows[i] for i in judgeable_indices], task)
        for i, outcome in zip(judgeable_indices, outcomes, strict=True):
            if not self.needs_reward and isinstance(outcome, Truncated) and outcome.reward is None:
                outcome = Unjudged(truncated=True)
            judged_rows[i] = [row.with_outcome(outcome) for row in judged_rows[i]]
        return judged_rows

    async def _compute_outcomes(
        self, candidates: Sequence[AttemptRows], task: Task
    ) -> list[Outcome]:
        """Return an outcome for each attempt.

        The reward judges the last row of an attempt, which has all messages. A retry keeps the
        outcomes that did not fail.
        """
        if self.reward is None:
            return [
                _get_environment_outcome(rows, needs_reward=self.needs_reward)
                for rows in candidates
            ]
        outcomes = await self._score(self.reward, candidates, task)
        for _ in range(self.retries):
            failed_indices = [i for i, outcome in enumerate(outcomes) if is_retryable(outcome)]
            if not failed_indices:
                break
            retried = await self._score(self.reward, candidates, task)
            for i in failed_indices:
                outcomes[i] = retried[i]
        return list(map(add_turn_rewards, candidates, outcomes))

    async def _score(
        self, reward: Reward, candidates: Sequence[AttemptRows], task: Task
    ) -> list[Outcome]:
        """Return the reward's outcomes, or failures if the reward raises or takes too long."""
        try:
            async with limit_time(self.judge_timeout_s):
                name = type(reward).__name__
                waits = waiting("attempts", "score", f"reward {name}", self.judge_timeout_s)
                with waits, span(REWARD_TRACK, name) as reward_span:
                    judging = judge_attempts(reward, candidates, task)
                    outcomes = await (
                        judging if self.judge_timeout_s is None else leave_when_cancelled(judging)
                    )
                    if reward_span is not None:
                        reward_span.attributes = {"rl.reward.values": _list_rewards(outcomes)}
                    return outcomes
        except TimeoutError:
            detail = (
                f"{type(reward).__name__}.score returned nothing within {self.judge_timeout_s:g} s"
            )
            return [Failed("timeout", detail)] * len(candidates)
        except UserCodeFailed as failure:
            return [Failed("reward", f"{task.label}:\n{failure}")] * len(candidates)


async def judge_attempts(
    reward: Reward, candidates: Sequence[AttemptRows], task: Task
) -> list[Outcome]:
    """Return the outcome that a reward gives each attempt, without the environment's turn rewards.

    Raises UserCodeFailed if the reward raises, or does not return one outcome for each attempt.
    """

    async def call() -> list[Outcome]:
        outcomes = await reward.score([rows[-1] for rows in candidates], task)
        return [
            _check_outcome(outcome, reward)
            for outcome in _check_outcome_count(outcomes, candidates, reward)
        ]

    return await run_guarded(call)


async def gather_first(
    coroutines: Sequence[Coroutine[Any, Any, T]],
    n: int,
    *,
    is_good: Callable[[T], bool] = lambda _: True,
    before_cancel: Callable[[], Coroutine[Any, Any, None]] | None = None,
) -> list[T]:
    """Return the first `n` good results, in the order of the coroutines.

    Bad results that came before the n-th good one are included. Unfinished coroutines are
    cancelled.

    Args:
        coroutines: They run concurrently.
        n: The number of good results to wait for.
        is_good: Returns True for a good result.
        before_cancel: Called and awaited before the cancellation, if only some results are needed.
    """
    loop = asyncio.get_running_loop()
    tasks = [loop.create_task(coroutine) for coroutine in coroutines]
    pending = set(tasks)
    try:
        if n >= len(tasks):
            return list(await asyncio.gather(*tasks))
        good: list[asyncio.Task[T]] = []
        while pending and len(good) < n:
            _, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            good = [task for task in tasks if task.done() and is_good(task.result())]
        surplus_tasks = good[n:]
        results = [task.result() for task in tasks if task.done() and task not in surplus_tasks]
        if before_cancel is not None:
            await before_cancel()
        return results
    finally:
        # Reading a task's exception also keeps asyncio from logging it as never retrieved.
        unfinished = [
            task for task in tasks if not task.done() or task.cancelled() or task.exception()
        ]
        for task in unfinished:
            task.cancel()
        if unfinished:
            await asyncio.gather(*unfinished, return_exceptions=True)


def _list_rewards(outcomes: Sequence[Outcome]) -> list[float]:
    judged = [outcome for outcome in outcomes if isinstance(outcome, Scored | Truncated)]
    return [outcome.reward for outcome in judged if outcome.reward is not None]


def _has_not_failed(rows: AttemptRows) -> bool:
    return not isinstance(rows[-1].outcome, Failed)


async def _close(environment: Environment) -> None:
    try:
        await close_environment(environment)
    except UserCodeFailed as failure:
        log.warning("an environment failed to close:\n%s", failure)


def _check_outcome_count(
    outcomes: Any, candidates: Sequence[AttemptRows], reward: Reward
) -> list[Any]:
    """Return the outcomes, or raise UserCodeFailed unless there is one for each attempt."""
    name = type(reward).__name__
    # `list` comes first because `isinstance` is fast for it and slow for `Sequence`.
    if not isinstance(outcomes, list | Sequence):
        raise UserCodeFailed(
            f"{name}.score returned {show(outcomes)}. It must be a sequence of outcomes"
        )
    if len(outcomes) != len(candidates):
        raise UserCodeFailed(
            f"{name}.score returned {len(outcomes)} outcomes for {len(candidates)} trajectories"
        )
    return list(outcomes)


def _check_outcome(outcome: Any, reward: Reward) -> Outcome:
    """Return the outcome, or a failure if it is malformed."""
    name = type(reward).__name__
    if not isinstance(outcome, Outcome):
        return Failed(
            "reward",
            f"{name}.score returned {show(outcome)} for an attempt. It must be an Outcome such as "
            "Scored(1.0)",
        )
    if isinstance(outcome, Scored | Truncated):
        is_unjudged = isinstance(outcome, Truncated) and outcome.reward is None
        parts = outcome.parts.values() if isinstance(outcome.parts, dict | Mapping) else [None]
        if not all(map(is_computable, parts)) or not (is_unjudged or is_computable(outcome.reward)):
            return Failed(
                "reward",
                f"{name}.score returned {show(outcome)}; rewards and their parts must be finite "
                f"numbers, within ±{MAX_NUMBER:g}",
            )
    return outcome


class GroupEnvironment(Environment):
    """An environment that plays whole groups, by a manager of its own."""

    manager_class: type[RolloutManager]


def _sum_turn_rewards(rows: AttemptRows) -> float | None:
    """Return the sum of the environment's turn rewards, or None if it gave none."""
    turn_rewards = [turn.reward for row in rows for turn in row.turns if turn.reward is not None]
    return sum(turn_rewards) if turn_rewards else None


def _get_environment_outcome(rows: AttemptRows, *, needs_reward: bool) -> Outcome:
    """Return the outcome of an attempt that only the environment's turn rewards judge."""
    total = _sum_turn_rewards(rows)
    truncated = rows[-1].truncated
    if total is None and not needs_reward:
        return Unjudged(truncated=truncated)
    if truncated:
        return Truncated(total or 0.0)
    return (
        Failed("unjudged", "neither a reward nor the environment judged this attempt")
        if total is None
        else Scored(total)
    )


def add_turn_rewards(rows: AttemptRows, outcome: Outcome) -> Outcome:
    """Return the outcome with the environment's turn rewards added."""
    total = _sum_turn_rewards(rows)
    if total is not None and isinstance(outcome, Scored | Truncated) and outcome.reward is not None:
        return replace(
            outcome, reward=outcome.reward + total, parts={**outcome.parts, "environment": total}
        )
    return outcome
