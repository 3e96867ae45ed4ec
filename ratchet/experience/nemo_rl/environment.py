"""The batched environment: its protocol, what it must return, and one row of that.

B = conversations in a call.
"""

from __future__ import annotations

import copy
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from ratchet.errors import DataError
from ratchet.experience.nemo_rl.batched_data_dict import BatchedDataDict
from ratchet.experience.nemo_rl.specs import MessageLog, as_message

Metadata = TypeVar("Metadata")

SCALAR = "reward"  # the part that a reward without parts is, where it meets others with parts


class EnvironmentReturn(NamedTuple, Generic[Metadata]):
    """What `step` answers, a row per conversation.

    observations: the next message, with `role` and `content`. metadata: handed to the next `step`;
    None leaves it as it was. next_stop_strings: what ends the policy's next turn; None leaves them,
    [] ends them. rewards: float [B] of this turn, or named parts, each float [B], which sum to it.
    terminateds: bool [B]. answers: what was read out of each answer, if anything.
    """

    observations: Sequence[Mapping[str, str]]
    metadata: Sequence[Metadata]
    next_stop_strings: Sequence[Sequence[str] | None] | None
    rewards: Tensor | Mapping[str, Tensor]
    terminateds: Tensor
    answers: Sequence[str | None] | None


class EnvironmentInterface(ABC, Generic[Metadata]):
    """Answers many conversations at once. What a conversation needs from turn to turn lies in its
    metadata, not in the instance: each call gets copies, rows come in any company, and several
    threads may be in `step` at once."""

    @abstractmethod
    def step(
        self, message_log_batch: list[MessageLog], metadata: list[Metadata]
    ) -> EnvironmentReturn[Metadata]:
        """One turn. message_log_batch: whole conversations, entries with `role` and `content`, the
        policy's answer last."""

    @abstractmethod
    def global_post_process_and_metrics(
        self, batch: BatchedDataDict[Any]
    ) -> tuple[BatchedDataDict[Any], dict[str, Any]]:
        """After all rollouts of a batch, with the environment's rows of it: (those rows, possibly
        changed; metrics)."""


@dataclass(frozen=True, slots=True)
class Reply:
    """One row of an EnvironmentReturn. `parts` is None where the reward has none."""

    observation: dict[str, str]
    metadata: Any
    stop_strings: list[str] | None
    reward: float
    parts: dict[str, float] | None
    terminated: bool
    answer: str | None


def step_rows(
    environment: EnvironmentInterface[Any], logs: Sequence[MessageLog], metadata: Sequence[Any]
) -> list[Reply]:
    """One call of `step`, checked. The environment gets copies: nothing that it does to them is
    seen outside.

    Raises DataError for a return of the wrong shape, and whatever `step` raises.
    """
    shown = [
        [{"role": entry["role"], "content": entry["content"]} for entry in log] for log in logs
    ]
    returned = environment.step(shown, copy.deepcopy(list(metadata)))
    name, rows = type(environment).__name__, len(logs)
    if not isinstance(returned, tuple) or len(returned) != len(EnvironmentReturn._fields):
        raise DataError(f"{name}.step returned {returned!r:.80}, it must be an EnvironmentReturn")
    answer = EnvironmentReturn(*returned)
    _check_lengths(answer, rows, name)
    stops = answer.next_stop_strings or [None] * rows
    answers = answer.answers or [None] * rows
    return [
        Reply(
            _observation(answer.observations[i], name),
            answer.metadata[i],
            _stops(stops[i], name),
            *_reward(answer.rewards, i),
            bool(answer.terminateds[i]),
            answers[i],
        )
        for i in range(rows)
    ]


def joined(replies: Sequence[Reply]) -> EnvironmentReturn[Any]:
    """The rows as one return. Where only some rewards have parts, a reward without is the part
    "reward"; a part that a row has not is 0 there."""
    named = any(reply.parts is not None for reply in replies)
    parts = [{SCALAR: reply.reward} if reply.parts is None else reply.parts for reply in replies]
    names = dict.fromkeys(name for row in parts for name in row)
    return EnvironmentReturn(
        observations=[reply.observation for reply in replies],
        metadata=[reply.metadata for reply in replies],
        next_stop_strings=[reply.stop_strings for reply in replies],
        rewards={name: torch.tensor([row.get(name, 0.0) for row in parts]) for name in names}
        if named
        else torch.tensor([reply.reward for reply in replies]),
        terminateds=torch.tensor([reply.terminated for reply in replies], dtype=torch.bool),
        answers=[reply.answer for reply in replies],
    )


def environment_of(
    task_to_env: Mapping[str, EnvironmentInterface[Any]], task_name: str
) -> EnvironmentInterface[Any]:
    if task_name not in task_to_env:
        known = ", ".join(f"'{name}'" for name in task_to_env)
        raise DataError(
            f"task_name '{task_name}' has no environment: task_to_env has {known or 'none'}; add "
            "it there"
        )
    return task_to_env[task_name]


def post_process(
    batch: BatchedDataDict[Any], task_to_env: Mapping[str, EnvironmentInterface[Any]]
) -> tuple[BatchedDataDict[Any], dict[str, Any]]:
    """Each environment's `global_post_process_and_metrics` on its rows: (the batch that they leave,
    in its order; their metrics, named "task_name/metric"). Raises DataError where one gives back
    another number of rows."""
    rows_of: dict[int, tuple[str, list[int]]] = {}
    for row, name in enumerate(batch["task_name"]):
        rows_of.setdefault(id(environment_of(task_to_env, name)), (name, []))[1].append(row)
    parts: list[BatchedDataDict[Any]] = []
    metrics: dict[str, Any] = {}
    for name, rows in rows_of.values():
        environment = task_to_env[name]
        part, numbers = environment.global_post_process_and_metrics(batch.select(rows))
        if part.size != len(rows):
            where = f"{type(environment).__name__}.global_post_process_and_metrics"
            raise DataError(
                f"{where} got {len(rows)} rows and gave back {part.size}: it may change rows, not "
                "their number"
            )
        parts.append(part)
        metrics |= {f"{name}/{key}": value for key, value in numbers.items()}
    if not parts:
        return batch, {}
    order = [row for _, rows in rows_of.values() for row in rows]
    return BatchedDataDict[Any].from_batches(parts).reorder(order), metrics


def _check_lengths(answer: EnvironmentReturn[Any], rows: int, name: str) -> None:
    rewards = answer.rewards if isinstance(answer.rewards, Mapping) else {"": answer.rewards}
    columns = {
        "observations": answer.observations,
        "metadata": answer.metadata,
        "terminateds": answer.terminateds,
        **{f"rewards {part}".strip(): values for part, values in rewards.items()},
        **(
            {}
            if answer.next_stop_strings is None
            else {"next_stop_strings": answer.next_stop_strings}
        ),
        **({} if answer.answers is None else {"answers": answer.answers}),
    }
    for column, values in columns.items():
        shape = tuple(values.shape) if isinstance(values, Tensor) else (len(values),)
        if shape != (rows,):
            raise DataError(
                f"{name}.step gave {column} of shape {shape} for {rows} conversations, it must be "
                f"({rows},)"
            )


def _observation(found: Any, name: str) -> dict[str, str]:
    if not isinstance(found, Mapping):
        raise DataError(
            f"{name}.step gave the observation {found!r:.80}, it must have a role and content"
        )
    if as_message(found).role == "assistant":
        raise DataError(
            f"{name}.step speaks for the assistant: give its observations another role, such as "
            "'user'"
        )
    return {"role": found["role"], "content": found["content"]}


def _stops(found: Any, name: str) -> list[str] | None:
    if found is not None and (
        isinstance(found, str) or not all(isinstance(text, str) and text for text in found)
    ):
        raise DataError(
            f"{name}.step gave the stop strings {found!r:.80}, they must be a list of strings, or "
            "None"
        )
    return None if found is None else list(found)


def _reward(rewards: Any, row: int) -> tuple[float, dict[str, float] | None]:
    """One that is not finite is left to who reads it: it fails its own row only."""
    if not isinstance(rewards, Mapping):
        return float(rewards[row]), None
    parts = {name: float(values[row]) for name, values in rewards.items()}
    return math.fsum(parts.values()) if all(map(math.isfinite, parts.values())) else math.nan, parts
