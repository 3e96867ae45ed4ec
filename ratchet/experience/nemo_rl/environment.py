"""Define batched environments, step them with checks, and split and join their return values.

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
from ratchet.utils.user_parts import add_missing_members

Metadata = TypeVar("Metadata")

# Part name given to a scalar reward if other rewards of the batch have named parts.
SCALAR = "reward"


class EnvironmentReturn(NamedTuple, Generic[Metadata]):
    """The return value of `step`, with a row for each conversation."""

    observations: Sequence[Mapping[str, Any]]
    """The next messages, with `role` and `content`: text, or a list of parts, some of them
    images."""
    metadata: Sequence[Metadata]
    """Passed to the next `step`; None leaves it unchanged."""
    next_stop_strings: Sequence[Sequence[str] | None] | None
    """Stop strings of the policy's next turn; None leaves them unchanged, [] removes them."""
    rewards: Tensor | Mapping[str, Tensor]
    """The turn's rewards, float [B], or named parts that sum to them, each float [B]."""
    terminateds: Tensor
    """True where the episode ended, bool [B]."""
    answers: Sequence[str | None] | None
    """The extracted answers, if any."""


class EnvironmentInterface(ABC, Generic[Metadata]):
    """An environment that steps many conversations at once.

    The state of a conversation belongs in its metadata, not in the instance: each call gets copies,
    rows are grouped arbitrarily, and several threads may call `step` at once.
    """

    raw_observations: bool = False
    """True (as in NeMo RL): the observation's text is tokenized without the chat template, and
    special tokens written in it are parsed. The environment must write the turn headers itself, or
    may continue the policy's turn. False (default): the chat template renders observations."""
    judges_cut_answers: bool = False
    """True: `step` is also called for an answer that the token budget cut off, and its reward
    counts; the row ends there. False (default): the environment does not get such an answer."""

    @abstractmethod
    def step(
        self, message_log_batch: list[MessageLog], metadata: list[Metadata]
    ) -> EnvironmentReturn[Metadata]:
        """Take one turn in each conversation.

        Args:
            message_log_batch: Whole conversations, of entries with `role` and `content`. The
                policy's message is last.
            metadata: The metadata of each conversation.
        """

    @abstractmethod
    def global_post_process_and_metrics(
        self, batch: BatchedDataDict[Any]
    ) -> tuple[BatchedDataDict[Any], dict[str, Any]]:
        """Return the environment's rows of a batch, possibly changed, and metrics.

        It is called after all rollouts of the batch.
        """


@dataclass(frozen=True, slots=True)
class EnvironmentReply:
    """One row of an `EnvironmentReturn`. `parts` is None if the reward has no parts."""

    observation: dict[str, Any]
    metadata: Any
    stop_strings: list[str] | None
    reward: float
    parts: dict[str, float] | None
    terminated: bool
    answer: str | None


class ActorEnvironment(EnvironmentInterface[Any]):
    """An environment in a Ray actor, called through the actor's handle.

    NeMo RL's environments are such actors. A bare handle in `task_to_env` is wrapped with the
    default options. Ray wraps an exception of the environment in a `RayTaskError`, which is raised
    here.
    """

    def __init__(
        self, actor: Any, *, raw_observations: bool = False, judges_cut_answers: bool = False
    ) -> None:
        self.actor = actor
        self.raw_observations = raw_observations
        self.judges_cut_answers = judges_cut_answers

    def step(
        self, message_log_batch: list[MessageLog], metadata: list[Any]
    ) -> EnvironmentReturn[Any]:
        return _wait_for(self.actor.step.remote(message_log_batch, metadata))

    def global_post_process_and_metrics(
        self, batch: BatchedDataDict[Any]
    ) -> tuple[BatchedDataDict[Any], dict[str, Any]]:
        return _wait_for(self.actor.global_post_process_and_metrics.remote(batch))


def _wait_for(reference: Any) -> Any:
    """Return the value of a Ray object reference."""
    import ray  # only callers that hold an actor need it

    return ray.get(reference)


def step_rows(
    environment: EnvironmentInterface[Any], logs: Sequence[MessageLog], metadata: Sequence[Any]
) -> list[EnvironmentReply]:
    """Call `step` once, check its return value, and split it into rows.

    The environment gets copies, so it can't change the caller's logs and metadata.

    Raises:
        DataError: The return value has the wrong shape. Exceptions of `step` are raised unchanged.
    """
    log_copies = [
        [{"role": entry["role"], "content": copy.deepcopy(entry["content"])} for entry in log]
        for log in logs
    ]
    returned = environment.step(log_copies, copy.deepcopy(list(metadata)))
    name, n_rows = type(environment).__name__, len(logs)
    if not isinstance(returned, tuple) or len(returned) != len(EnvironmentReturn._fields):
        raise DataError(f"{name}.step returned {returned!r:.80}. It must be an EnvironmentReturn")
    result = EnvironmentReturn(*returned)
    _check_lengths(result, n_rows, name)
    stop_strings = result.next_stop_strings or [None] * n_rows
    answers = result.answers or [None] * n_rows
    return [
        EnvironmentReply(
            _check_observation(result.observations[i], name),
            result.metadata[i],
            _check_stop_strings(stop_strings[i], name),
            *_get_reward(result.rewards, i),
            bool(result.terminateds[i]),
            answers[i],
        )
        for i in range(n_rows)
    ]


def join_replies(replies: Sequence[EnvironmentReply]) -> EnvironmentReturn[Any]:
    """Join rows into one `EnvironmentReturn`.

    If only some rewards have parts, a reward without parts becomes the part "reward". A part that a
    row lacks is 0 in that row.
    """
    has_parts = any(reply.parts is not None for reply in replies)
    parts = [{SCALAR: reply.reward} if reply.parts is None else reply.parts for reply in replies]
    names = dict.fromkeys(name for row in parts for name in row)
    return EnvironmentReturn(
        observations=[reply.observation for reply in replies],
        metadata=[reply.metadata for reply in replies],
        next_stop_strings=[reply.stop_strings for reply in replies],
        rewards={name: torch.tensor([row.get(name, 0.0) for row in parts]) for name in names}
        if has_parts
        else torch.tensor([reply.reward for reply in replies]),
        terminateds=torch.tensor([reply.terminated for reply in replies], dtype=torch.bool),
        answers=[reply.answer for reply in replies],
    )


class MissingEnvironment(DataError, ValueError):
    """A row's task name has no environment. NeMo RL raises ValueError here."""


def get_environment(
    task_to_env: Mapping[str, EnvironmentInterface[Any]], task_name: str
) -> EnvironmentInterface[Any]:
    """Return the environment of a task name. A Ray actor is wrapped in `ActorEnvironment`.

    Raises MissingEnvironment if `task_to_env` lacks the task name.
    """
    if task_name not in task_to_env:
        names = ", ".join(f"'{name}'" for name in task_to_env)
        raise MissingEnvironment(
            f"No environment found for task type: {task_name}, the task_name of a row. task_to_env "
            f"has {names or 'none'}. Add it there"
        )
    environment = task_to_env[task_name]
    if _is_ray_actor(environment):
        return ActorEnvironment(environment)
    return add_missing_members(environment, EnvironmentInterface)


def _is_ray_actor(environment: Any) -> bool:
    return hasattr(environment, "_actor_id") and hasattr(environment.step, "remote")


def post_process(
    batch: BatchedDataDict[Any], task_to_env: Mapping[str, EnvironmentInterface[Any]]
) -> tuple[BatchedDataDict[Any], dict[str, Any]]:
    """Call each environment's `global_post_process_and_metrics` on its rows.

    Returns:
        The batch in its original order, and the metrics, named "task_name/metric".

    Raises:
        DataError: An environment returns more or fewer rows than it got.
    """
    rows_by_environment: dict[int, tuple[str, list[int]]] = {}
    for row, name in enumerate(batch["task_name"]):
        get_environment(task_to_env, name)
        first_name_and_rows = rows_by_environment.setdefault(id(task_to_env[name]), (name, []))
        first_name_and_rows[1].append(row)
    processed_batches: list[BatchedDataDict[Any]] = []
    metrics: dict[str, Any] = {}
    for name, rows in rows_by_environment.values():
        environment = get_environment(task_to_env, name)
        processed, environment_metrics = environment.global_post_process_and_metrics(
            batch.select_indices(rows)
        )
        if processed.size != len(rows):
            method = f"{type(environment).__name__}.global_post_process_and_metrics"
            raise DataError(
                f"{method} got {len(rows)} rows and returned {processed.size}. Return as many rows "
                "as it gets"
            )
        processed_batches.append(processed)
        metrics |= {f"{name}/{key}": value for key, value in environment_metrics.items()}
    if not processed_batches:
        return batch, {}
    order = [row for _, rows in rows_by_environment.values() for row in rows]
    return BatchedDataDict[Any].from_batches(processed_batches).reorder_data(order), metrics


def _check_lengths(result: EnvironmentReturn[Any], n_rows: int, name: str) -> None:
    rewards = result.rewards if isinstance(result.rewards, Mapping) else {"": result.rewards}
    columns = {
        "observations": result.observations,
        "metadata": result.metadata,
        "terminateds": result.terminateds,
        **{f"rewards {part}".strip(): values for part, values in rewards.items()},
        **(
            {}
            if result.next_stop_strings is None
            else {"next_stop_strings": result.next_stop_strings}
        ),
        **({} if result.answers is None else {"answers": result.answers}),
    }
    for column, values in columns.items():
        shape = tuple(values.shape) if isinstance(values, Tensor) else (len(values),)
        if shape != (n_rows,):
            raise DataError(
                f"{name}.step returned {column} of shape {shape} for {n_rows} conversations. The "
                f"shape must be ({n_rows},)"
            )


def _check_observation(observation: Any, name: str) -> dict[str, Any]:
    if not isinstance(observation, Mapping):
        raise DataError(
            f"{name}.step returned the observation {observation!r:.80}. It must have a role and "
            "content"
        )
    if as_message(observation).role == "assistant":
        raise DataError(
            f"{name}.step returned an observation with the role 'assistant'. Use another one, such "
            "as 'user'"
        )
    return {"role": observation["role"], "content": observation["content"]}


def _check_stop_strings(stop_strings: Any, name: str) -> list[str] | None:
    if stop_strings is not None and (
        isinstance(stop_strings, str)
        or not all(isinstance(text, str) and text for text in stop_strings)
    ):
        raise DataError(
            f"{name}.step returned the stop strings {stop_strings!r:.80}. They must be a list of "
            "strings, or None"
        )
    return None if stop_strings is None else list(stop_strings)


def _get_reward(rewards: Any, row: int) -> tuple[float, dict[str, float] | None]:
    """Return the reward of a row and its parts.

    A non-finite reward raises no error here, because it must fail only its own row, later.
    """
    if not isinstance(rewards, Mapping):
        return float(rewards[row]), None
    parts = {name: float(values[row]) for name, values in rewards.items()}
    return math.fsum(parts.values()) if all(map(math.isfinite, parts.values())) else math.nan, parts
