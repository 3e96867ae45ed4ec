"""Show some attempts of a step as a table, for trackers that can display one."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

from ratchet.types import Group, Message, Trajectory
from ratchet.utils.terminal_text import escape_surrogates

COLUMNS = ("step", "task", "tag", "prompt", "response", "reward", "outcome", "tokens")
MAX_CHARACTERS = 10_000  # of a prompt or a response; the middle of a longer one is cut out


@dataclass(frozen=True)
class RolloutTable:
    """The tables in which a tracker shows attempts."""

    make: Callable[..., Any]
    """The tracker's class for tables, called with `columns=` and `data=`."""
    rows: int
    """Attempts in each table; 0 for no tables."""
    every: int
    """Steps between tables."""

    def build(self, step: int, groups: Sequence[Group]) -> Any | None:
        """Return the tracker's table of a step, a row of `COLUMNS` for each attempt.

        The first attempt of every group comes before the second of any. None stands for no table:
        none is due, or the step has no attempts.
        """
        if not self.rows or step % self.every:
            return None
        attempts = [
            (index, group, trajectory)
            for group in groups
            for index, trajectory in enumerate(group.trajectories)
        ]
        attempts.sort(key=itemgetter(0))
        rows = [_make_row(step, group, attempt) for _, group, attempt in attempts[: self.rows]]
        return self.make(columns=list(COLUMNS), data=rows) if rows else None


def _make_row(step: int, group: Group, trajectory: Trajectory) -> list[Any]:
    task = group.task
    outcome = trajectory.outcome
    n_prompt = len(task.messages)
    # An agent may begin with other messages than the task's; then they are part of the response.
    begins_with_prompt = trajectory.messages[:n_prompt] == task.messages
    response = trajectory.messages[n_prompt if begins_with_prompt else 0 :]
    return [
        step,
        escape_surrogates(task.id),
        escape_surrogates(task.tag),
        _write_out(task.messages),
        _write_out(response),
        trajectory.reward,
        "" if outcome is None else type(outcome).__name__.lower(),
        len(trajectory),
    ]


def _write_out(messages: Sequence[Message]) -> str:
    """Return messages as text: each with its role, its media as `[image]` and its tool calls."""
    text = "\n".join(f"{message.role}: {_write_message(message)}" for message in messages)
    if len(text) > MAX_CHARACTERS:
        half = MAX_CHARACTERS // 2
        n_cut = len(text) - 2 * half
        text = f"{text[:half]}\n[{n_cut:,} characters left out]\n{text[-half:]}"
    return escape_surrogates(text)


def _write_message(message: Message) -> str:
    if isinstance(message.content, str):
        text = message.content
    else:
        text = "".join(
            part.value if part.type == "text" else f"[{part.type}]" for part in message.content
        )
    calls = (
        f"{call.name}({json.dumps(dict(call.arguments), ensure_ascii=False)})"
        for call in message.tool_calls
    )
    return "\n".join((*([text] if text or not message.tool_calls else []), *calls))
