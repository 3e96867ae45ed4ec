"""Reward functions of TRL (version 1.16): `reward(prompts, completions, **columns)`.

A function is called as `GRPOTrainer._calculate_rewards` calls it, once for the attempts of a group.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, ClassVar

from ratchet.errors import DataError
from ratchet.protocols import Reward
from ratchet.rewards.integrations.base import (
    LibraryRewardConfig,
    average_metrics,
    describe_location,
    encode_messages,
    read_columns,
    read_number,
    split_messages,
)
from ratchet.rewards.weighted_sum import NOT_APPLICABLE
from ratchet.types import Cancelled, Failed, Outcome, Scored, Task, Trajectory, Truncated
from ratchet.utils.user_code import UserCodeFailed, is_async, run_guarded
from ratchet.utils.user_imports import import_object

NO_LISTS = (Mapping, Set, str, bytes, bytearray)  # iterables that are no list of rewards
# TRL does not pass these columns on, because it has arguments of its own for them.
OWN_ARGUMENTS = ("prompt", "completion", "completion_ids")


class TRLRewardConfig(LibraryRewardConfig):
    """A reward function of TRL: `(prompts, completions, completion_ids, **columns) -> list`.

    It may be async. None in the list means that the reward does not apply to the row: then only the
    other rewards count, and an attempt without any reward is not trained on.
    """

    builds: ClassVar[str] = "ratchet.rewards.integrations.trl:build_trl_reward"

    factory_kwargs: dict[str, Any] | None = None
    """Arguments of a function that makes the reward function, such as
    trl.rewards:get_soft_overlong_punishment; null: `function` is the reward function."""
    conversational: bool | None = None
    """Pass lists of messages (true) or text (false); null: text if the row's column `prompt` is
    text."""


@dataclass(frozen=True)
class TRLTrainerState:
    """The fields of TRL's `trainer_state` that Ratchet provides."""

    global_step: int
    """Version of the weights that began the attempt, which is the number of steps so far."""


def build_trl_reward(config: TRLRewardConfig) -> TRLReward:
    """Return the reward of a section, and make its function if it has `factory_kwargs`."""
    function = import_object(config.function)
    if config.factory_kwargs is not None:
        function = function(**config.factory_kwargs)
    return TRLReward(function, config.function, conversational=config.conversational)


class TRLReward(Reward):
    """A reward that calls a function of TRL with all attempts of a group.

    What the function passes to `log_metric` is logged beside its reward. `log_extra` has no effect.
    """

    compares_attempts = True

    def __init__(
        self, function: Callable[..., Any], label: str, *, conversational: bool | None = None
    ) -> None:
        self.function = function
        self.label = label
        self.conversational = conversational

    async def score(self, trajectories: Sequence[Trajectory], task: Task) -> Sequence[Outcome]:
        """Return an outcome for each attempt; attempts that failed or were cancelled keep theirs.

        All others are Failed("reward") if the function raises or returns a list of another length.
        A value that is not a finite number fails its attempt.
        """
        # The outcomes of judged attempts are replaced below.
        outcomes: list[Any] = [trajectory.outcome for trajectory in trajectories]
        judged_indices = [
            index
            for index, trajectory in enumerate(trajectories)
            if not isinstance(trajectory.outcome, Failed | Cancelled)
        ]
        if not judged_indices:
            return outcomes
        metrics: dict[str, list[Any]] = {}
        try:
            arguments = make_arguments(
                [trajectories[index] for index in judged_indices],
                task,
                conversational=self.conversational,
            )
            arguments["log_metric"] = lambda name, value: metrics.setdefault(name, []).append(value)
            values = await call_trl_reward(self.function, arguments)
        except (UserCodeFailed, DataError) as error:
            failure = Failed("reward", f"reward {self.label}, task '{task.id}':\n{error}")
            for index in judged_indices:
                outcomes[index] = failure
            return outcomes
        parts = average_metrics(metrics)
        for index, value in zip(judged_indices, values, strict=True):
            outcomes[index] = self._make_outcome(value, trajectories[index], task, parts)
        return outcomes

    def _make_outcome(
        self, value: Any, trajectory: Trajectory, task: Task, parts: Mapping[str, float]
    ) -> Outcome:
        if value is None:
            return NOT_APPLICABLE
        try:
            reward = read_number(value, self.function)
        except DataError as error:
            return Failed("reward", f"reward {self.label}, task '{task.id}':\n{error}")
        outcome_type = Truncated if isinstance(trajectory.outcome, Truncated) else Scored
        return outcome_type(reward, parts)


async def call_trl_reward(function: Callable[..., Any], arguments: dict[str, Any]) -> list[Any]:
    """Call a function, and return its value for each completion.

    Raises UserCodeFailed if it raises, and DataError unless it returns one value a completion.

    The function runs in the thread of the event loop, as in TRL: it may use signals.
    """

    n_expected = len(arguments["completions"])  # the function may change its list

    async def call() -> tuple[Any, list[Any] | None]:
        result = function(**arguments)
        result = await result if is_async(function) else result
        # The keys of a dict, the bytes of a text and the order of a set are no rewards.
        has_rewards = isinstance(result, Iterable) and not isinstance(result, NO_LISTS)
        return result, list(result) if has_rewards else None

    result, values = await run_guarded(call)
    if values is None or len(values) != n_expected:
        returned = f"{result!r:.200}" if values is None else f"{len(values)} rewards"
        raise DataError(
            f"{describe_location(function)} returned {returned} for {n_expected} completions, it "
            "must return a list with one number, or None, for each completion"
        )
    return values


def make_arguments(
    trajectories: Sequence[Trajectory], task: Task, *, conversational: bool | None
) -> dict[str, Any]:
    """Return the keyword arguments with which TRL calls a reward function.

    Raises DataError for a trajectory in which the policy wrote nothing.

    Args:
        conversational: True for messages, False for text; None for the form of the row's prompt.
    """
    row_prompt = task.meta.get("prompt")
    if conversational is None:
        conversational = not isinstance(row_prompt, str)
    prompts: list[Any] = []
    completions: list[Any] = []
    for trajectory in trajectories:
        prompt, completion = split_messages(trajectory)
        if conversational:
            messages = encode_messages([*prompt, *completion])
            prompts.append(messages[: len(prompt)])
            completions.append(messages[len(prompt) :])
        else:
            is_text = isinstance(row_prompt, str)
            prompts.append(row_prompt if is_text else "".join(message.text for message in prompt))
            completions.append("".join(message.text for message in completion))
    return {
        "prompts": prompts,
        "completions": completions,
        "completion_ids": [_get_completion_ids(trajectory) for trajectory in trajectories],
        "trainer_state": TRLTrainerState(max(map(_get_version, trajectories), default=0)),
        **make_column_arguments(task, len(trajectories)),
    }


def make_column_arguments(task: Task, n: int) -> dict[str, Any]:
    """Return the arguments that do not depend on the attempts: the row's columns, n times each.

    `log_extra` and `log_metric` do nothing.
    """
    rows = [read_columns(task) for _ in range(n)]
    return {
        **{
            name: [row[name] for row in rows]
            for name in read_columns(task)
            if name not in OWN_ARGUMENTS
        },
        "log_extra": lambda column, values: None,
        "log_metric": lambda name, value: None,
    }


def _get_completion_ids(trajectory: Trajectory) -> list[int]:
    """Return the tokens from the policy's first one on, tool answers included."""
    sampled = trajectory.trainable.nonzero()[0]
    return trajectory.tokens[int(sampled[0]) if len(sampled) else len(trajectory) :].tolist()


def _get_version(trajectory: Trajectory) -> int:
    """Return the version of the weights that wrote the trajectory's first tokens."""
    versions = trajectory.versions[trajectory.versions >= 0]
    return int(versions[0]) if len(versions) else 0
