"""Play the items of an Atropos environment: `environment: {kind: atropos, path: ...}`.

Its `get_next_item` gives the tasks, and its `collect_trajectories` plays and scores a group.

Source: the package atroposlib 0.4.0, envs/base.py (BaseEnv).
"""

from __future__ import annotations

import asyncio
import copy
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

from ratchet.errors import ConfigError, DataError
from ratchet.experience.atropos.manager import AtroposManager
from ratchet.experience.atropos.policy_server import PolicyServer
from ratchet.experience.config import AtroposConfig
from ratchet.experience.rollout.manager import GroupEnvironment
from ratchet.protocols import Step
from ratchet.types import Message, Split, Task
from ratchet.utils.user_imports import import_object

REQUIRED_METHODS = ("config_init", "setup", "get_next_item", "collect_trajectories")
SERVER_CONFIG = "atroposlib.envs.server_handling.server_baseline:APIServerConfig"
# What it would log, and write for Atropos's own trainers.
FIXED_OPTIONS = {"use_wandb": False, "data_path_to_save_groups": None}
PLAYS_GROUPS = (
    "an environment of Atropos plays whole groups by itself. Use it as a stage's environment, not "
    "as a part of another one, and with a model that runs here"
)


class AtroposEnvironment(GroupEnvironment):
    """An environment whose tasks are the items of a `BaseEnv`, in the order that it gives them.

    Raises ConfigError if the class can't be loaded.
    """

    name = "atropos"
    manager_class = AtroposManager

    def __init__(self, config: AtroposConfig) -> None:
        self.config = config
        self.items = _Items(_load(config), config.test_tasks)

    def tasks(self, split: Split, *, seed: int, start: int = 0) -> Iterator[Task]:
        """Return the items of a split from position `start`. The environment fixes their order."""
        end = self.config.test_tasks
        indices = range(start, end) if split == "test" else itertools.count(start)
        return (self._make_task(split, index) for index in indices)

    def _make_task(self, split: Split, index: int) -> Task:
        name = f"{self.config.path}/{split}/{index}"
        message = Message("user", name)  # the environment writes the prompts
        meta = {"split": split, "index": index}
        return Task(name, (message,), environment=self.name, tag=self.config.path, meta=meta)

    async def reset(self, task: Task) -> Sequence[Message]:
        """Return the task's messages, which name its item. Only the check before a run calls it."""
        return task.messages

    async def step(self, message: Message) -> Step:
        raise DataError(PLAYS_GROUPS)

    def demonstration(self, task: Task) -> Sequence[Message]:
        raise DataError(f"{self.config.path} has no demonstrations: train with rollouts")

    async def play_group(self, task: Task, server: PolicyServer, n_attempts: int) -> Any:
        """Return what `collect_trajectories` returns, after `postprocess_histories`.

        Each group has a shallow copy of the environment, with its own server and group size.
        """
        item = await self.items.find(task.meta["split"], task.meta["index"])
        inner = copy.copy(self.items.inner)
        inner.config = inner.config.model_copy(update={"group_size": n_attempts})
        inner.server = copy.copy(inner.server)
        inner.server.servers = [server]
        result = await inner.collect_trajectories(item)
        if not isinstance(result, tuple) or len(result) != 2 or not result[0]:
            return result
        return await inner.postprocess_histories(result[0]), result[1]


class _Items:
    """The items of an environment, drawn in its order and kept, so that a task can be played again.

    The first `n_test` are held out. The training split leaves out items that are equal to them.
    Environments get copies, because they may change an item while they play it.
    """

    def __init__(self, inner: Any, n_test: int) -> None:
        self.inner, self._n_test = inner, n_test
        self._items: dict[Split, list[Any]] = {"train": [], "test": []}
        self._held_out = set[str]()
        self._is_set_up = False
        self._lock = asyncio.Lock()

    async def find(self, split: Split, index: int) -> Any:
        """Return a copy of an item. Raises DataError if the environment has no further items."""
        async with self._lock:
            if not self._is_set_up:
                await self.inner.setup()
                self._is_set_up = True
            test, train = self._items["test"], self._items["train"]
            while len(test) < self._n_test:
                test.append(await self._draw())
                self._held_out.add(repr(test[-1]))
            n_repeated = 0
            while split == "train" and len(train) <= index:
                item = await self._draw()
                n_repeated = n_repeated + 1 if repr(item) in self._held_out else 0
                if n_repeated > 2 * self._n_test:
                    raise DataError(
                        "all items of the environment are held out. Set environment.test_tasks to "
                        "fewer than it has"
                    )
                if not n_repeated:
                    train.append(item)
            item = self._items[split][index]
            try:
                return copy.deepcopy(item)
            except TypeError:  # it has a part that can't be copied, such as a lock
                return item

    async def _draw(self) -> Any:
        item = await self.inner.get_next_item()
        if item is None:
            n_items = sum(map(len, self._items.values()))
            raise DataError(
                f"get_next_item returned None after {n_items} items. Let it begin again, or train "
                "for fewer steps"
            )
        return item


def _load(config: AtroposConfig) -> Any:
    """Return the environment, with its own defaults where the recipe has no key."""
    env_class = import_object(config.path)
    missing = next((name for name in REQUIRED_METHODS if not hasattr(env_class, name)), None)
    if missing is not None:
        raise ConfigError(
            f"environment.path={config.path} has no method {missing}. Name a subclass of "
            "atroposlib's BaseEnv"
        )
    defaults, _ = env_class.config_init()
    unknown = sorted(set(config.config) - set(type(defaults).model_fields))
    if unknown:
        raise ConfigError(
            f"environment.config.{unknown[0]}: {type(defaults).__name__} has no such field. Remove "
            "it"
        )
    # It is never called, because each group has a server of its own.
    server = import_object(SERVER_CONFIG)(
        model_name="policy", api_key="unused", base_url="http://127.0.0.1:9/v1", health_check=False
    )
    try:
        options = type(defaults).model_validate(
            {**defaults.model_dump(), **config.config, **FIXED_OPTIONS}
        )
        return env_class(config=options, server_configs=[server], slurm=False, testing=False)
    except (ImportError, OSError, TypeError, ValueError) as error:
        raise ConfigError(f"environment.path={config.path} can't be made: {error}") from error
