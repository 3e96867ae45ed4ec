"""Reward functions of OpenRLHF (0.11): `reward_func(queries, prompts, labels)`.

A function is called as `SingleTurnAgentExecutor` calls it: with one attempt at a time.
"""

from __future__ import annotations

import copy
from collections.abc import Awaitable, Mapping
from typing import Any, ClassVar

from ratchet.errors import DataError
from ratchet.rewards.base import Verdict
from ratchet.rewards.integrations.base import (
    LibraryReward,
    LibraryRewardConfig,
    describe_location,
    read_metrics,
    read_number,
    split_messages,
)
from ratchet.rewards.user_threads import call_in_thread
from ratchet.types import Scored, Task, Trajectory


class OpenRLHFRewardConfig(LibraryRewardConfig):
    """A reward function of OpenRLHF: `(queries, prompts, labels)`, lists of one text each.

    It returns a tensor, or a dict whose `rewards` is the reward. The dict's `scores` and
    `extra_logs` are logged.
    """

    builds: ClassVar[str] = "ratchet.rewards.integrations.openrlhf:OpenRLHFReward"


class OpenRLHFReward(LibraryReward):
    """A reward that calls a function of OpenRLHF in a thread.

    A prompt is the text of its messages, and a query is the prompt followed by the answer, both
    without the chat template's own text. The label is the task's answer, or the row's `label`.
    """

    def judge(self, trajectory: Trajectory, task: Task) -> Awaitable[Verdict]:
        prompt_messages, completion = split_messages(trajectory)
        prompt = "\n".join(message.text for message in prompt_messages)
        query = prompt + "\n".join(message.text for message in completion)
        label = copy.deepcopy(task.meta.get("label") if task.answer is None else task.answer)
        return self._call(query, prompt, label)

    async def _call(self, query: str, prompt: str, label: Any) -> Verdict:
        result = await call_in_thread(self.function, [query], [prompt], [label])
        if not isinstance(result, Mapping):
            return read_number(_get_only(result), self.function)
        if "rewards" not in result:
            raise DataError(
                f"{describe_location(self.function)} returned a dict without 'rewards': it has "
                f"{', '.join(map(str, result))}"
            )
        reward = read_number(_get_only(result["rewards"]), self.function)
        logged = dict(result.get("extra_logs") or {})
        if result.get("scores") is not None:
            logged["scores"] = result["scores"]
        metrics = {name: _get_only(value) for name, value in logged.items()}
        return Scored(reward, read_metrics(metrics))


def _get_only(value: Any) -> Any:
    """Return the element of a list with one element; anything else unchanged."""
    return value[0] if isinstance(value, list | tuple) and len(value) == 1 else value
