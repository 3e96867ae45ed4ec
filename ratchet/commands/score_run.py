"""`ratchet score RUN`: apply a reward to the attempts that a run has recorded."""

from __future__ import annotations

import asyncio
import sys
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console
from rich.table import Table

from ratchet.commands.score import ROWS_PER_WORKER, Score, Summary, make_reward_section
from ratchet.config.loader import load_config
from ratchet.config.schema import RunConfig
from ratchet.errors import ConfigError, DataError
from ratchet.executors.event_loop import run_event_loop
from ratchet.experience.rollout.manager import add_turn_rewards, judge_attempts
from ratchet.observe.progress_bar import show_bar
from ratchet.observe.records.groups import read_groups
from ratchet.observe.records.reader import Record
from ratchet.protocols import Reward
from ratchet.rewards.judge_models.base import Judges
from ratchet.rewards.weighted_sum import compose_rewards
from ratchet.runs.resolve import fetch_run_record
from ratchet.runs.run_dir import RunDirectory
from ratchet.training.stage_from_config import build_reward
from ratchet.training.workers.judges import close_judges, start_judges
from ratchet.types import Failed, Group, Outcome, Trajectory, Truncated
from ratchet.utils.terminal_text import make_console
from ratchet.utils.user_code import UserCodeFailed

# Rewards that differ by at most this count as equal, because parts may be summed in another order.
EQUALITY_TOLERANCE = 1e-9


@dataclass(frozen=True)
class RecordedAttempt:
    """An attempt of a run. Its trajectories hold the reward that it got in training, if any."""

    step: int
    group: Group
    rows: list[Trajectory]

    @property
    def trajectory(self) -> Trajectory:
        """The last trajectory, which has all messages."""
        return self.rows[-1]


def score_run(
    run: str | Path,
    kind: str,
    overrides: Sequence[str],
    *,
    steps: Sequence[int],
    as_json: bool,
    workers: int,
) -> None:
    """Write a line of JSON for each recorded attempt to stdout, or a summary.

    Args:
        run: A run directory or its address.
        kind: The kind of the reward; "" for the rewards that the recipe gives each stage.
        overrides: Keys of the reward, as key=value.
        steps: Steps to judge; empty for all recorded steps.
        as_json: True prints lines of JSON, False a summary.
        workers: Number of groups judged at once.

    Raises:
        ConfigError: The reward is missing, or can't be built.
        DataError: The record can't be read, or holds no attempts.
    """
    directory = RunDirectory(fetch_run_record(run))
    record = Record(directory.steps)
    if missing := sorted(set(steps) - record.steps.keys()):
        raise DataError(f"step {missing[0]} is not in the record of {run}")
    config = load_config(directory.config)
    judges = {} if kind else start_judges(config)
    rewards = _build_rewards(config, judges, kind, overrides, workers)
    scores = _score_record(record, rewards, steps or sorted(record.steps), workers)
    total = sum(record.steps[step].rows for step in steps or record.steps)
    with show_bar("attempts", total) as advance:
        run_event_loop(_write_and_close(scores, judges, str(run), as_json=as_json, advance=advance))


def _build_rewards(
    config: RunConfig, judges: Judges, kind: str, overrides: Sequence[str], workers: int
) -> Mapping[str, Reward]:
    """Return the reward of each stage that has one, by the stage's name."""
    if kind:
        reward = compose_rewards([make_reward_section(kind, overrides, workers)])
        return {stage.name: reward for stage in config.stages}
    if overrides:
        raise ConfigError(f"{overrides[0]} is a key of a reward: name the reward by --reward")
    rewards = {
        stage.name: build_reward(stage.rewards, judges)
        for stage in config.stages
        if stage.source in ("rollouts", None)
    }
    return {name: reward for name, reward in rewards.items() if reward is not None}


async def _score_record(
    record: Record, rewards: Mapping[str, Reward], steps: Sequence[int], workers: int
) -> AsyncIterator[tuple[RecordedAttempt, Score]]:
    """Yield the scores of all attempts in the order of the record."""
    free_workers = asyncio.Semaphore(workers)
    pending: deque[asyncio.Task[list[tuple[RecordedAttempt, Score]]]] = deque()
    try:
        for step in steps:
            reward = rewards.get(record.steps[step].stage)
            if reward is None:
                continue
            for group in read_groups(record.step(step), record.media(step)):
                attempts = _list_attempts(step, group)
                if attempts:
                    pending.append(
                        asyncio.create_task(_score_group(attempts, reward, free_workers))
                    )
                while len(pending) >= ROWS_PER_WORKER * workers or (pending and pending[0].done()):
                    for attempt_and_score in await pending.popleft():
                        yield attempt_and_score
                await asyncio.sleep(0)  # lets the started tasks run while the record is read
        while pending:
            for attempt_and_score in await pending.popleft():
                yield attempt_and_score
    finally:
        for task in pending:
            task.cancel()


def _list_attempts(step: int, group: Group) -> list[RecordedAttempt]:
    """Return the sampled attempts that have a reward or need none (`Trajectory.is_usable`)."""
    return [
        RecordedAttempt(step, group, rows)
        for rows in group.attempts
        if rows[-1].sampled and rows[-1].is_usable
    ]


async def _score_group(
    attempts: Sequence[RecordedAttempt], reward: Reward, free_workers: asyncio.Semaphore
) -> list[tuple[RecordedAttempt, Score]]:
    """Judge the attempts of a group together, as training does."""
    task = attempts[0].group.task
    async with free_workers:
        start = time.perf_counter()
        outcomes: Sequence[Outcome]
        try:
            # A reward must not see the recorded reward, but it must see that an attempt was cut
            # off.
            candidates = [
                [
                    replace(row, outcome=Truncated() if row.truncated else None)
                    for row in attempt.rows
                ]
                for attempt in attempts
            ]
            # A reward may be user code: its bug must fail one group, not the rest.
            judged = await judge_attempts(reward, candidates, task)
            outcomes = list(map(add_turn_rewards, candidates, judged))
        except UserCodeFailed as failure:
            outcomes = [Failed("reward", str(failure))] * len(attempts)
        seconds = (time.perf_counter() - start) / len(attempts)
    return [
        (
            attempt,
            Score(
                attempt.trajectory.attempt,
                task.id,
                outcome,
                seconds,
                source_fields={
                    "step": attempt.step,
                    "group": attempt.group.id,
                    "attempt": attempt.trajectory.attempt,
                    "recorded": attempt.trajectory.reward,
                },
            ),
        )
        for attempt, outcome in zip(attempts, outcomes, strict=True)
    ]


async def _write_and_close(
    scores: AsyncIterator[tuple[RecordedAttempt, Score]],
    judges: Judges,
    run: str,
    *,
    as_json: bool,
    advance: Callable[[int], None],
) -> None:
    try:
        await _write(scores, run, as_json=as_json, advance=advance)
    finally:
        await close_judges(judges)


async def _write(
    scores: AsyncIterator[tuple[RecordedAttempt, Score]],
    run: str,
    *,
    as_json: bool,
    advance: Callable[[int], None],
) -> None:
    """Write the scores as lines of JSON or as a summary. Raises DataError if there are none.

    `advance` gets the number of rows of each attempt that is scored.
    """
    summary, comparison = Summary(location_column="step"), RewardComparison()
    n_scores = 0
    async for attempt, score in scores:
        n_scores += 1
        advance(len(attempt.rows))
        if as_json:
            sys.stdout.write(score.as_json() + "\n")
            sys.stdout.flush()
        else:
            summary.add(replace(score, line=n_scores))
            comparison.add(score.reward, attempt.trajectory.reward)
    if not n_scores:
        raise DataError(
            f"{run} has recorded no attempts to judge: its stages train on given text, or have no "
            "rewards. If they have no rewards, give --reward KIND"
        )
    if not as_json:
        console = make_console()
        summary.show(console)
        comparison.show(console)


class RewardComparison:
    """A running comparison of new rewards with the recorded ones."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.recorded_sum = 0.0

    def add(self, reward: float | None, recorded: float | None) -> None:
        if reward is None or recorded is None:
            return
        difference = reward - recorded
        is_equal = abs(difference) <= EQUALITY_TOLERANCE
        self.counts["equal" if is_equal else "higher" if difference > 0 else "lower"] += 1
        self.recorded_sum += recorded

    def show(self, console: Console) -> None:
        total = self.counts.total()
        if not total:
            return
        table = Table("recorded mean", "equal", "higher now", "lower now")
        table.add_row(
            f"{self.recorded_sum / total:.4g}",
            *(str(self.counts[name]) for name in ("equal", "higher", "lower")),
        )
        console.print(table)
