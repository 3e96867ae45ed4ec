"""Play environments on servers of the Open Reward Standard: the policy calls the server's tools.

A task is an index of a split. The results of tools bring the rewards and end the episode. A message
without a call goes to the environment's terminal tool, if it has one, and ends the episode.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Self

from pydantic import Field

from ratchet.config.sections import EnvironmentConfig
from ratchet.data.chat.thinking import split_thinking
from ratchet.environments.servers.http_session import ServerFault, ServerUrl, ask_server
from ratchet.environments.servers.open_reward_session import OpenRewardSession
from ratchet.environments.single_turn import Rows, is_held_out
from ratchet.errors import ConfigError, DataError
from ratchet.protocols import Step
from ratchet.types import Message, Split, Task

MAX_TASKS = 1 << 22  # of a split; each takes about a KiB of memory


class OpenRewardConfig(EnvironmentConfig):
    """An environment on a server of the Open Reward Standard (docs/integrations/open-reward.md)."""

    builds: ClassVar[str] = "ratchet.environments.servers.open_reward:OpenReward"
    data_kinds: ClassVar[frozenset[str]] = frozenset({"rollouts"})

    url: ServerUrl
    """Address of the server: http://host:8080."""
    environment: str | None = Field(None, pattern="^[A-Za-z0-9_-]+$")
    """Name of an environment of the server; null: its first one."""
    train_split: str = "train"
    """The server's split to train on."""
    test_split: str | None = "test"
    """The server's held-out split; null: a tenth of train_split."""
    max_turns: int = Field(64, ge=1)
    """Turns after which an episode is ended."""
    timeout_s: float = Field(60.0, gt=0)
    """Time limit of an answer, and of a session's setup, in seconds."""
    replayable: bool = True
    """True if the same task and the same calls give the same episode."""

    def check_keys(self) -> None:
        if self.test_split == self.train_split:
            raise ValueError(
                f"test_split={self.test_split} is the training split too: set test_split to null, "
                "which holds out a tenth of it"
            )


class OpenReward(Rows):
    """An environment whose episodes a server plays. Each attempt has a session of its own."""

    name = "open_reward"

    def __init__(self, config: OpenRewardConfig) -> None:
        self.config, self.replayable = config, config.replayable
        self._session: OpenRewardSession | None = None
        self._splits: dict[Split, list[Task]] = {}
        self._lock = threading.Lock()

    def __copy__(self) -> Self:
        copy = type(self).__new__(type(self))
        vars(copy).update({**vars(self), "_session": None})
        return copy

    def rows(self, split: Split) -> Sequence[Task]:
        """Return the tasks of a split. The first call asks the server, and blocks.

        Raises ConfigError for an environment or a split that the server lacks, and DataError if it
        gives no answer.
        """
        with self._lock:
            if not self._splits:
                self._splits.update(self._list_tasks())
        return self._splits[split]

    def tools(self, task: Task) -> Sequence[Mapping[str, Any]]:
        return () if self._session is None else self._session.tools

    def demonstration(self, task: Task) -> Sequence[Message]:
        raise DataError("environments on servers have no demonstrations: train with rollouts")

    async def reset(self, task: Task) -> Sequence[Message]:
        """Begin the task in a new session. Raises ServerFault if the server fails."""
        await self.close()
        config, meta = self.config, task.meta
        self._n_turns = 0
        self._session = OpenRewardSession(config.url, meta["environment"], config.timeout_s)
        return await self._session.open(meta["split"], meta["index"])

    async def step(self, message: Message) -> Step:
        """Call the tools of a message, up to the one that ends the episode.

        Raises ServerFault if the server fails.
        """
        assert self._session is not None, "step before reset"
        self._n_turns += 1
        if not message.tool_calls:
            return await self._end(message)
        answers: list[Message] = []
        reward, is_done, n_errors = 0.0, False, 0.0
        for call in message.tool_calls:
            result = await self._session.call(call.name, call.arguments)
            answers.append(Message("tool", result.content, tool_call_id=call.id))
            reward += result.reward
            n_errors += result.is_error
            is_done = result.finished
            if is_done:
                break
        is_done = is_done or self._n_turns >= self.config.max_turns
        metrics = {"tool_calls": float(len(answers)), "tool_errors": n_errors}
        return Step(() if is_done else tuple(answers), reward, is_done, metrics=metrics)

    async def _end(self, message: Message) -> Step:
        """Return the last step, for a message without a call."""
        assert self._session is not None
        if not self._session.terminal_tool:
            return Step((), 0.0, True)
        _, text = split_thinking(message.text)
        result = await self._session.call_terminal_tool(text)
        return Step((), result.reward, True)

    async def close(self) -> None:
        """End the session."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    def _list_tasks(self) -> dict[Split, list[Task]]:
        config = self.config
        try:
            names = [str(name) for name in self._ask("/list_environments")]
            name = (config.environment or names[0]).lower()
            if name not in names:
                raise ConfigError(
                    f"environment.environment={config.environment}: the server has "
                    f"{', '.join(names)}. Set one of these."
                )
            splits = [str(split["name"]) for split in self._ask(f"/{name}/splits")]
            tasks = [
                self._list_split(name, split, splits)
                for split in (config.train_split, config.test_split)
                if split is not None
            ]
        except ServerFault as error:
            raise DataError(str(error)) from error
        except (LookupError, TypeError, ValueError) as error:
            raise DataError(
                f"{config.url} does not list tasks by the Open Reward Standard: {error!r}"
            ) from error
        if config.test_split is not None:
            return {"train": tasks[0], "test": tasks[1]}
        return {
            "train": [task for task in tasks[0] if not is_held_out(task.id)],
            "test": [task for task in tasks[0] if is_held_out(task.id)],
        }

    def _list_split(self, name: str, split: str, splits: Sequence[str]) -> list[Task]:
        if split not in splits:
            raise ConfigError(
                f"{name} of {self.config.url} has no split '{split}', only {', '.join(splits)}. "
                "Set environment.train_split and test_split (null: a tenth of train_split)."
            )
        count = self._ask(f"/{name}/num_tasks", {"split": split})["num_tasks"]
        if type(count) is not int or not 0 <= count <= MAX_TASKS:
            raise ValueError(f"num_tasks is {count!r:.80}, and must be from 0 to {MAX_TASKS}")
        return [_make_task(name, split, index) for index in range(count)]

    def _ask(self, path: str, body: Any = None) -> Any:
        return ask_server(f"{self.config.url.rstrip('/')}{path}", body, self.config.timeout_s)


def _make_task(name: str, split: str, index: int) -> Task:
    """Return a task. Its messages only name it, because the prompt comes with the session."""
    return Task(
        f"{name}/{split}/{index}",
        (Message("user", f"{name}, task {index} of split {split}"),),
        environment="open_reward",
        tag=name,
        meta={"environment": name, "split": split, "index": index},
    )
