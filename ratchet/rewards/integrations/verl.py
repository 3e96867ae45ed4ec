"""Reward functions of verl (0.9): `compute_score(data_source, solution_str, ground_truth, ...)`.

A function is called as verl's `NaiveRewardManager` calls it, once for each attempt.
"""

from __future__ import annotations

import copy
from collections.abc import Awaitable, Mapping
from typing import Any, ClassVar

from pydantic import Field

from ratchet.errors import DataError
from ratchet.rewards.base import Verdict
from ratchet.rewards.integrations.base import (
    LibraryReward,
    LibraryRewardConfig,
    describe_location,
    read_columns,
    read_metrics,
    read_number,
    split_messages,
)
from ratchet.rewards.user_threads import call_in_thread
from ratchet.types import Scored, Task, Trajectory
from ratchet.utils.user_code import is_async


class VerlRewardConfig(LibraryRewardConfig):
    """A reward function of verl: `(data_source, solution_str, ground_truth, extra_info)`.

    It returns a number, or a dict whose `score` is the reward. The other numbers of the dict are
    logged. It may be async.
    """

    builds: ClassVar[str] = "ratchet.rewards.integrations.verl:VerlReward"

    reward_kwargs: dict[str, Any] = Field({})
    """Further arguments of the function, as verl's reward_kwargs."""


class VerlReward(LibraryReward):
    """A reward that calls a function of verl: in a thread, unless the function is async.

    `data_source`, `reward_model.ground_truth` and `extra_info` are columns of the row. Without
    them, they are the task's tag, its answer and an empty dict.
    """

    def __init__(self, config: VerlRewardConfig) -> None:
        super().__init__(config)
        self.further_arguments = config.reward_kwargs

    def judge(self, trajectory: Trajectory, task: Task) -> Awaitable[Verdict]:
        return self._call(
            make_verl_arguments(trajectory, task) | copy.deepcopy(self.further_arguments)
        )

    async def _call(self, arguments: dict[str, Any]) -> Verdict:
        if is_async(self.function):
            result = await self.function(**arguments)
        else:
            result = await call_in_thread(self.function, **arguments)
        if not isinstance(result, Mapping):
            return read_number(result, self.function)
        if "score" not in result:
            raise DataError(
                f"{describe_location(self.function)} returned a dict without 'score': it has "
                f"{', '.join(map(str, result))}"
            )
        metrics = read_metrics({name: result[name] for name in result if name != "score"})
        return Scored(read_number(result["score"], self.function), metrics)


def make_verl_arguments(trajectory: Trajectory, task: Task) -> dict[str, Any]:
    """Return the keyword arguments with which verl calls a function.

    `solution_str` is the text of all messages from the policy's first one on. Raises DataError if
    the row has no ground truth.
    """
    columns = read_columns(task)
    answer = copy.deepcopy(task.answer)
    reward_model = columns.get("reward_model")
    truth = reward_model.get("ground_truth") if isinstance(reward_model, Mapping) else answer
    if truth is None:
        raise DataError(
            f"{task.where}: neither reward_model.ground_truth nor an answer, so verl's reward "
            "functions can't judge it: name the column of the answer in environment.columns"
        )
    _, completion = split_messages(trajectory)
    n_turns = sum(message.role == "assistant" for message in completion)
    return {
        "data_source": columns.get("data_source", task.tag),
        "solution_str": "\n".join(message.text for message in completion),
        "ground_truth": truth,
        "extra_info": {
            **(columns.get("extra_info") or {}),
            "num_turns": 2 * n_turns,  # verl counts the turns of both sides
            "rollout_reward_scores": {},
        },
    }
