"""Train on a NeMo RL EnvironmentInterface: `environment: {kind: message_log, ...}`."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Mapping, Sequence
from functools import partial
from numbers import Real
from typing import Any

import torch

from ratchet.config.resolve import import_object
from ratchet.environments.single_turn import Rows
from ratchet.errors import DataError
from ratchet.experience.config import MessageLogConfig
from ratchet.experience.nemo_rl.attempt import MessageLogDialogue, step_alone
from ratchet.experience.nemo_rl.batched_data_dict import BatchedDataDict
from ratchet.experience.nemo_rl.environment import (
    EnvironmentInterface,
    post_process,
)
from ratchet.experience.nemo_rl.specs import DatumSpec, as_message, embed_images
from ratchet.protocols import Step
from ratchet.types import Group, Message, Split, Task, Trajectory
from ratchet.utils.user_parts import add_missing_members

log = logging.getLogger(__name__)


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

    def measure(self, groups: Sequence[Group]) -> Mapping[str, float]:
        """Return the numeric metrics of a step's judged attempts.

        They come from `global_post_process_and_metrics`. The batch that it returns is ignored,
        because the training data are fixed by then. If it raises, the error is logged and there are
        no metrics.
        """
        batch = _make_batch(groups)
        if not batch.size:
            return {}
        try:
            _, metrics = post_process(batch, dict.fromkeys(batch["task_name"], self.interface))
        except Exception:  # user code: a failure of its metrics must not end the run
            log.warning(
                "%s.global_post_process_and_metrics failed:\n%s",
                self.interface_name,
                traceback.format_exc(),
            )
            return {}
        return {name: float(value) for name, value in metrics.items() if isinstance(value, Real)}

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


def _make_batch(groups: Sequence[Group]) -> BatchedDataDict[DatumSpec]:
    """Return the judged training attempts as a batch without tokens.

    An attempt whose history forked has several rows; the last has the whole conversation.
    """
    attempts: dict[tuple[str, int], tuple[Task, Trajectory]] = {}
    for group in groups:
        for row in group.trajectories:
            if row.use == "train" and row.reward is not None:
                attempts[group.id, row.attempt] = group.task, row
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
                [row.reward for _, row in judged_attempts], dtype=torch.float32
            ),
            "truncated": torch.tensor(
                [row.truncated for _, row in judged_attempts], dtype=torch.bool
            ),
        }
    )
