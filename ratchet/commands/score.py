"""The command `ratchet score`: apply any reward to a file of answers, line by line."""

from __future__ import annotations

import asyncio
import json
import math
import sys
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heappush, heappushpop
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ratchet.config.base import Section
from ratchet.config.from_words import section_from_words
from ratchet.config.sections import list_judged
from ratchet.data.jsonl import TYPE_NAMES, read_lines
from ratchet.errors import ConfigError, DataError
from ratchet.executors.event_loop import run_event_loop
from ratchet.observe.progress_bar import show_bar
from ratchet.protocols import Reward
from ratchet.rewards.weighted_sum import compose_rewards
from ratchet.types import Cancelled, Failed, Message, Outcome, Task, Trajectory
from ratchet.utils import safe_read
from ratchet.utils.process_settings import keep_settings
from ratchet.utils.terminal_text import make_console, shorten_text
from ratchet.utils.user_code import UserCodeFailed, run_guarded

# Rows in memory per worker: a slow row delays the output, but not the judging of later rows.
ROWS_PER_WORKER = 64
MAX_WORST_ROWS = 5  # rows in the summary's table of the worst rows
BLOCK_BYTES = 2**20  # read at once to count lines
ROLES = ("system", "user", "assistant", "tool")
# Columns that become the trajectory, and are left out of the task's `meta`.
TRAJECTORY_COLUMNS = ("response", "messages")


@dataclass(frozen=True)
class Score:
    """The result of judging one row."""

    line: int
    """The row's line number in the file, from 1 on."""
    id: str
    """The row's id; `line N` if it has none."""
    outcome: Outcome
    seconds: float
    """Time to judge the row, without the wait for a free worker."""
    source_fields: Mapping[str, Any] = field(default_factory=dict)
    """Fields that `as_json` writes in place of `line`, for a row that is not from a file."""

    @property
    def reward(self) -> float | None:
        return self.outcome.reward

    @property
    def outcome_name(self) -> str:
        return type(self.outcome).__name__.lower()

    @property
    def detail(self) -> str:
        if isinstance(self.outcome, Failed):
            return f"{self.outcome.kind}: {self.outcome.detail}"
        return self.outcome.reason if isinstance(self.outcome, Cancelled) else ""

    def as_json(self) -> str:
        json_parts = {
            name: value if math.isfinite(value) else None
            for name, value in self.outcome.parts.items()
        }
        return json.dumps(
            {
                **(self.source_fields or {"line": self.line}),
                "id": self.id,
                "reward": self.reward,
                "parts": json_parts,
                "outcome": self.outcome_name,
                "seconds": round(self.seconds, 6),
                "detail": self.detail,
            }
        )


@keep_settings()
def score_file(
    path: str | Path, kind: str, overrides: Sequence[str], *, as_json: bool, workers: int
) -> None:
    """Write a line of JSON for each row to stdout, or a summary. A bad row does not stop the rest.

    Raises ConfigError or another RatchetError if the reward can't be built, DataError if the file
    can't be read or no row could be judged.
    """
    if isinstance(path, Path) and path.is_dir():
        raise DataError(
            f"{path} is a directory, but not a run directory: give a file of rows, or the "
            "directory of a run"
        )
    reward = compose_rewards([make_reward_section(kind, overrides, workers)])
    run_event_loop(_score_file(path, reward, as_json=as_json, workers=workers))


def make_reward_section(kind: str, overrides: Sequence[str], workers: int) -> Section:
    """Return the config section of a reward.

    If the section has a key `workers` that `overrides` does not set, it is set to `workers`.
    """
    try:
        section = section_from_words("rewards", kind, overrides)
    except ConfigError as error:
        raise ConfigError(f"reward {kind}: {error}") from error
    if (judged := next(list_judged(section), None)) is not None:
        raise ConfigError(
            f"reward {kind}: judge={judged.judge} names a model of a recipe's judges, and there is "
            "no recipe here. Name a model elsewhere (url and model, or path), or score a run by "
            "its own rewards"
        )
    uses_default = (
        "workers" in type(section).model_fields and "workers" not in section.model_fields_set
    )
    return section.model_copy(update={"workers": workers}) if uses_default else section


async def _score_file(path: str | Path, reward: Reward, *, as_json: bool, workers: int) -> None:
    summary = Summary()
    first_failure: Score | None = None
    is_judged = False
    with show_bar("rows", _count_lines(path)) as advance:
        async for score in score_rows(path, reward, workers):
            is_failed = isinstance(score.outcome, Failed)
            is_judged = is_judged or not is_failed
            first_failure = score if is_failed and first_failure is None else first_failure
            if as_json:
                sys.stdout.write(score.as_json() + "\n")
                sys.stdout.flush()
            else:
                summary.add(score)
            advance(1)
    if not as_json:
        summary.show(make_console())
    if first_failure is not None and not is_judged:
        reason = first_failure.detail.strip().rpartition("\n")[2]
        raise DataError(f"{path}: no row could be judged. {first_failure.id}: {reason}")


def _count_lines(path: str | Path) -> int | None:
    """Return the number of lines of a file; None for an address, a pipe and a compressed file."""
    if not isinstance(path, Path) or not path.is_file() or path.suffix != ".jsonl":
        return None
    with safe_read.open_file(path) as file:
        return sum(block.count(b"\n") for block in iter(lambda: file.read(BLOCK_BYTES), b""))


async def score_rows(path: str | Path, reward: Reward, workers: int) -> AsyncIterator[Score]:
    """Yield scores in row order, judging `workers` rows at once.

    At most ROWS_PER_WORKER * workers rows are in memory.
    """
    free_workers = asyncio.Semaphore(workers)
    pending: deque[asyncio.Task[Score]] = deque()
    try:
        for line, row in read_lines(path):
            pending.append(asyncio.create_task(_score(path, line, row, reward, free_workers)))
            while len(pending) >= ROWS_PER_WORKER * workers or (pending and pending[0].done()):
                yield await pending.popleft()
            await asyncio.sleep(0)  # lets the started tasks run while the file is read
        while pending:
            yield await pending.popleft()
    finally:
        for task in pending:
            task.cancel()


async def _score(
    path: str | Path,
    line: int,
    row: Mapping[str, Any] | DataError,
    reward: Reward,
    free_workers: asyncio.Semaphore,
) -> Score:
    """Judge one row once a worker is free. A row that can't be judged gets the outcome Failed."""
    row_name = f"line {line}"
    if isinstance(row, DataError):
        return Score(line, row_name, Failed("row", str(row)), 0.0)
    try:
        task, trajectory = make_attempt(row, row_name)
    except DataError as error:
        return Score(line, row_name, Failed("row", f"{path}, {row_name}: {error}"), 0.0)
    async with free_workers:
        start = time.perf_counter()
        try:
            # A reward may be user code: its bug must fail one row only.
            (outcome,) = await run_guarded(lambda: reward.score([trajectory], task))
        except UserCodeFailed as failure:
            outcome = Failed("reward", str(failure))
        return Score(line, task.id, outcome, time.perf_counter() - start)


# --- from a row to a task and a trajectory


def make_attempt(row: Mapping[str, Any], row_name: str) -> tuple[Task, Trajectory]:
    """Return the task and the answered conversation as text, without tokens. Raises DataError."""
    messages = _parse_messages(row, "messages") if "messages" in row else _make_messages(row)
    if not messages or messages[-1].role != "assistant":
        raise DataError("column 'messages' must end with a message of the assistant")
    task_id = next(
        (row[key] for key in ("id", "task_id") if isinstance(row.get(key), str | int)), row_name
    )
    tag = row.get("tag")
    task = Task(
        id=str(task_id),
        messages=messages[:-1],
        answer=row.get("answer"),
        tag=tag if isinstance(tag, str) else "",
        meta={key: value for key, value in row.items() if key not in TRAJECTORY_COLUMNS},
    )
    return task, Trajectory.supervised([], [], messages=messages)


def _make_messages(row: Mapping[str, Any]) -> tuple[Message, ...]:
    response = row.get("response")
    if not isinstance(response, str):
        columns = ", ".join(row) or "no columns"
        problem = (
            f"column 'response' is {_name_type(response)}, must be a string"
            if "response" in row
            else "there is no column 'response'"
        )
        raise DataError(
            f"{problem}, and there is no column 'messages'; the row has {columns}. Give the column "
            "of the answers the name response"
        )
    prompt = row.get("prompt")
    if prompt is None:
        prompt_messages: tuple[Message, ...] = ()
    elif isinstance(prompt, str):
        prompt_messages = (Message("user", prompt),)
    else:
        prompt_messages = _parse_messages(row, "prompt")
    return (*prompt_messages, Message("assistant", response))


def _parse_messages(row: Mapping[str, Any], column: str) -> tuple[Message, ...]:
    messages: list[Message] = []
    value = row[column]
    if not isinstance(value, list):
        raise DataError(
            f"column '{column}' is {_name_type(value)}, must be an array of {{role, content}}"
        )
    for index, message in enumerate(value):
        role, content = (
            (message.get("role"), message.get("content"))
            if isinstance(message, dict)
            else (None, None)
        )
        if role not in ROLES or not isinstance(content, str):
            raise DataError(
                f"{column}[{index}] must have a role ({', '.join(ROLES)}) and a content of text"
            )
        messages.append(Message(role, content))
    return tuple(messages)


def _name_type(value: Any) -> str:
    return "null" if value is None else TYPE_NAMES[type(value)]


# --- the summary


@dataclass
class Summary:
    """A running summary of scores, in constant memory."""

    location_column: str = "line"
    """"line", or the key of `Score.source_fields` that locates a row."""
    outcome_counts: Counter[str] = field(default_factory=Counter)
    sums_by_part: dict[str, tuple[float, int]] = field(default_factory=dict)
    """The sum of each part of the reward, and the number of rows with that part."""
    seconds: float = 0.0
    failed_scores: list[Score] = field(default_factory=list)
    """The first MAX_WORST_ROWS rows without a reward."""
    lowest_scores: list[tuple[float, int, Score]] = field(default_factory=list)
    """A heap of the MAX_WORST_ROWS rows with the lowest rewards. The highest of these rewards is on
    top."""

    def add(self, score: Score) -> None:
        self.outcome_counts[score.outcome_name] += 1
        self.seconds += score.seconds
        if score.reward is None:
            self.failed_scores = [*self.failed_scores, score][:MAX_WORST_ROWS]
            return
        for name, value in {"reward": score.reward, **score.outcome.parts}.items():
            total, count = self.sums_by_part.get(name, (0.0, 0))
            self.sums_by_part[name] = (total + value, count + 1)
        entry = (-score.reward, -score.line, score)
        if len(self.lowest_scores) < MAX_WORST_ROWS:
            heappush(self.lowest_scores, entry)
        else:
            heappushpop(self.lowest_scores, entry)

    def show(self, console: Console) -> None:
        n_rows = self.outcome_counts.total()
        table = Table("rows", *self.outcome_counts, "seconds a row")
        table.add_row(
            str(n_rows), *map(str, self.outcome_counts.values()), f"{self.seconds / n_rows:.3g}"
        )
        console.print(table)
        if self.sums_by_part:
            means = Table("mean of", "", "rows")
            for name, (total, count) in self.sums_by_part.items():
                means.add_row(escape(name), f"{total / count:.4g}", str(count))
            console.print(means)
        worst = Table(
            self.location_column, "id", "outcome", "reward", "detail", title="the worst rows"
        )
        for score in [
            *self.failed_scores,
            *(score for *_, score in sorted(self.lowest_scores, reverse=True)),
        ]:
            last_line = shorten_text(score.detail.strip().rpartition("\n")[2], 400)
            reward = "-" if score.reward is None else f"{score.reward:.4g}"
            location = str(score.source_fields.get(self.location_column, score.line))
            worst.add_row(location, escape(score.id), score.outcome_name, reward, escape(last_line))
        console.print(worst)
