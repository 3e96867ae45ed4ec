"""Train on a NeMo RL EnvironmentInterface: `environment: {kind: message_log, ...}`."""

from __future__ import annotations

import math
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from numbers import Real
from typing import Any

import numpy as np
import torch

from ratchet.config.resolve import import_object
from ratchet.environments.single_turn import Rows
from ratchet.errors import DataError, TrainingError
from ratchet.experience.config import MessageLogConfig
from ratchet.experience.nemo_rl.attempt import MessageLogDialogue, step_alone
from ratchet.experience.nemo_rl.batched_data_dict import BatchedDataDict
from ratchet.experience.nemo_rl.environment import (
    EnvironmentInterface,
    post_process,
)
from ratchet.experience.nemo_rl.specs import DatumSpec, as_message, embed_images
from ratchet.protocols import Step
from ratchet.types import Group, Message, Scored, Split, Task, Trajectory, Truncated
from ratchet.utils.user_parts import add_missing_members


class MessageLogEnvironment(Rows):
    """An environment that calls an EnvironmentInterface, each step in a thread of its own.

    The policy's chat template renders the prompts. So only the roles and contents of a sample's
    message log are used, and not its tokens.
    """

    name = "message_log"
    replayable = False  # the interface need not be deterministic

    def __init__(self, config: MessageLogConfig) -> None:
        interface = import_object(config.interface)(**config.arguments)
        self.interface: EnvironmentInterface[Any] = add_missing_members(
            interface, EnvironmentInterface
        )
        self.data = import_object(config.data)
        self.path = config.data
        self.interface_name = type(self.interface).__name__
        self.raw_observations = _choose(config.raw_observations, self.interface.raw_observations)
        self.judges_cut_answers = _choose(
            config.judges_cut_answers, self.interface.judges_cut_answers
        )
        self._rows: dict[Split, list[Task]] = {}
        self._metrics: Mapping[str, float] = {}
        self.dialogue = self._make_dialogue()

    def rows(self, split: Split) -> Sequence[Task]:
        if split not in self._rows:
            self._rows[split] = [
                self._make_task(split, i, datum) for i, datum in enumerate(self.data(split))
            ]
        return self._rows[split]

    def demonstration(self, task: Task) -> Sequence[Message]:
        raise DataError(
            f"{self.interface_name} has no demonstrations, so it can't train by supervision"
        )

    async def reset(self, task: Task) -> Sequence[Message]:
        self.dialogue = self._make_dialogue()
        self.dialogue.begin(
            task.meta["message_log"], task.meta["extra_env_info"], task.meta["stop_strings"]
        )
        return task.messages

    async def step(self, message: Message) -> Step:
        return await self.dialogue.step(message)

    async def reward_cut_attempt(self, messages: Sequence[Message]) -> float | None:
        return await self.dialogue.reward_cut_attempt(messages)

    def _make_dialogue(self) -> MessageLogDialogue:
        return MessageLogDialogue(
            partial(step_alone, self.interface), judges_cut_answers=self.judges_cut_answers
        )

    @property
    def stop_strings(self) -> tuple[str, ...]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.dialogue.stop_strings

    def post_process(self, groups: Sequence[Group]) -> Sequence[Group]:
        """Return a step's groups with what `global_post_process_and_metrics` changes.

        A changed `total_reward` is the attempt's reward, and with a `loss_multiplier` of 0 none of
        its tokens trains. The metrics are those that `measure` returns.

        Raises:
            TrainingError: The method raises, or returns rewards or multipliers that can't be used.
        """
        attempts = _list_judged_attempts(groups)
        self._metrics = {}
        if not attempts:
            return groups
        batch = _make_batch(attempts)
        tasks = dict.fromkeys(batch["task_name"], self.interface)
        method = f"{self.interface_name}.global_post_process_and_metrics"
        try:
            processed, metrics = post_process(batch, tasks)
            if list(processed.get("idx", batch["idx"])) != list(batch["idx"]):
                raise DataError("the rows are in another order. Return them in the order given")
            rewards, multipliers = _read_processed(processed)
        except Exception as error:  # user code
            raise TrainingError(
                f"{method} failed. Mend it, then resume:\n{traceback.format_exc()}"
            ) from error
        self._metrics = {
            name: float(value) for name, value in metrics.items() if isinstance(value, Real)
        }
        changes = dict(zip(attempts, zip(rewards, multipliers, strict=True), strict=True))
        return [
            replace(
                group,
                trajectories=tuple(
                    _change_row(
                        row,
                        *changes[group.id, row.attempt],
                        is_last=row is attempts[group.id, row.attempt][1],
                    )
                    if (group.id, row.attempt) in changes and row.use == "train"
                    else row
                    for row in group.trajectories
                ),
            )
            for group in groups
        ]

    def measure(self, groups: Sequence[Group]) -> Mapping[str, float]:
        """Return the numeric metrics of the step's judged attempts, from `post_process`."""
        return self._metrics if groups else {}

    def _make_task(self, split: Split, index: int, datum: Mapping[str, Any]) -> Task:
        messages = datum.get("message_log")
        if not isinstance(messages, Sequence) or not messages:
            raise DataError(
                f"'{self.path}' gave sample {index} of {split} without a message_log. Give each "
                "sample one"
            )
        return Task(
            id=f"{self.name}/{split}/{index}",
            messages=tuple(as_message(entry) for entry in messages),
            environment=self.name,
            tag=datum.get("task_name") or self.interface_name,
            meta={
                "message_log": [
                    {"role": entry["role"], "content": embed_images(entry["content"])}
                    for entry in messages
                ],
                "extra_env_info": datum.get("extra_env_info"),
                "stop_strings": datum.get("stop_strings"),
            },
        )


def _choose(setting: bool | None, default: bool) -> bool:
    """Return a key of the recipe, or the interface's own attribute if the key is null."""
    return default if setting is None else setting


def _list_judged_attempts(
    groups: Sequence[Group],
) -> dict[tuple[str, int], tuple[Task, Trajectory]]:
    """Return the judged training attempts by group and number: the task and the last row.

    An attempt whose history forked has several rows; the last has the whole conversation.
    """
    return {
        (group.id, row.attempt): (group.task, row)
        for group in groups
        for row in group.trajectories
        if row.use == "train" and row.reward is not None
    }


def _make_batch(
    attempts: Mapping[tuple[str, int], tuple[Task, Trajectory]],
) -> BatchedDataDict[DatumSpec]:
    """Return the attempts as a batch without tokens. Rewards are float64, as they train."""
    judged_attempts = list(attempts.values())
    return BatchedDataDict[DatumSpec](
        {
            "message_log": [
                [{"role": m.role, "content": m.text} for m in row.messages]
                for _, row in judged_attempts
            ],
            "extra_env_info": [task.meta["extra_env_info"] for task, _ in judged_attempts],
            "loss_multiplier": torch.ones(len(judged_attempts)),
            "idx": [task.id for task, _ in judged_attempts],
            "task_name": [task.tag for task, _ in judged_attempts],
            "total_reward": torch.tensor(
                [row.reward for _, row in judged_attempts], dtype=torch.float64
            ),
            "truncated": torch.tensor(
                [row.truncated for _, row in judged_attempts], dtype=torch.bool
            ),
        }
    )


def _read_processed(batch: BatchedDataDict[DatumSpec]) -> tuple[list[float], list[float]]:
    """Return the rewards and the loss multipliers. Raises DataError if they can't be used."""
    rewards = [float(reward) for reward in batch["total_reward"]]
    multipliers = [float(multiplier) for multiplier in batch["loss_multiplier"]]
    for reward in rewards:
        if not math.isfinite(reward):
            raise DataError(f"total_reward must be finite, not {reward}")
    for multiplier in multipliers:
        if multiplier not in (0, 1):
            raise DataError(f"loss_multiplier must be 0 or 1, not {multiplier:g}")
    return rewards, multipliers


def _change_row(row: Trajectory, reward: float, multiplier: float, *, is_last: bool) -> Trajectory:
    """Return a row with another reward, and without trainable tokens if the multiplier is 0.

    The last turn of the attempt's last row gets the difference, and so does a part `post_process`
    if the reward has parts, so that turns and parts still sum to the reward.
    """
    if not multiplier:
        row = replace(row, trainable=np.zeros_like(row.trainable))
    outcome = row.outcome
    if not isinstance(outcome, Scored | Truncated) or outcome.reward is None:
        return row
    difference = reward - outcome.reward
    if not difference:
        return row
    parts = {**outcome.parts, "post_process": difference} if outcome.parts else {}
    turns = row.turns
    if is_last and turns and turns[-1].reward is not None:
        turns = (*turns[:-1], replace(turns[-1], reward=turns[-1].reward + difference))
    return replace(row, turns=turns, outcome=replace(outcome, reward=reward, parts=parts))
