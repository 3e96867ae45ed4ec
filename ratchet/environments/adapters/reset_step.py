"""Base class of adapters for environments with `reset(seed)` and `step(action)`.

Gymnasium, gem and ROLL have such environments. Their calls may block, so they run in a thread while
other attempts go on.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, Self, TypeVar

import numpy as np
from pydantic import Field

from ratchet.environments.base import EnvironmentConfig
from ratchet.errors import DataError
from ratchet.protocols import Step
from ratchet.types import Message, Split, Task


class SeededConfig(EnvironmentConfig):
    """The settings of an environment whose tasks are seeds and whose own steps give the rewards."""

    gives: ClassVar[frozenset[str]] = frozenset({"rollouts"})

    test_tasks: int = Field(100, ge=1, description="Seeds from 0 on that are held out.")
    max_turns: int = Field(100, ge=1, description="An episode that is not over by then ends there.")
    replayable: bool = Field(
        True, description="The same seed and the same actions give the same episode."
    )
    process_random: bool = Field(
        True,
        description="It draws from Python's or numpy's generator of the whole process: its calls "
        "run one at a time, each with "
        "that generator as its own last call left it. false: calls run at once, in threads.",
    )


T = TypeVar("T")
ONE_AT_A_TIME = threading.Lock()


class Observation(NamedTuple):
    """An observation after a reset or a step."""

    text: str  # the message to the policy
    state: str  # identifies the environment's state; the next step's `state_key`
    reward: float = 0.0
    done: bool = False
    metrics: Mapping[str, float] = {}


class Seeded(ABC):
    """A base class that runs episodes of an inner environment.

    A subclass creates the inner environment, and translates its observations and actions to and
    from text. An instance keeps its inner environment between episodes; a copy creates a new one.
    """

    judges = True

    def __init__(self, config: SeededConfig, name: str) -> None:
        self.settings, self.name, self.replayable = config, name, config.replayable
        self.inner: Any = None
        self._random: tuple[Any, Any] | None = None

    @abstractmethod
    def make(self) -> Any:
        """Return a new inner environment."""

    @abstractmethod
    def first(self, observation: Any, info: Mapping[str, Any]) -> Observation:
        """Return the first observation of an episode, from the result of the inner `reset`."""

    @abstractmethod
    def act(self, text: str) -> Observation:
        """Take the action that the policy's text names, and return the observation after it."""

    def __copy__(self) -> Self:
        twin = type(self).__new__(type(self))
        vars(twin).update({**vars(self), "inner": None, "_random": None})
        return twin

    def tasks(self, split: Split, *, seed: int, start: int = 0) -> Iterator[Task]:
        """Return a split's tasks. A task's message only names it; `reset` returns the prompt."""
        if split == "test":
            return (self._task(split, i, i) for i in range(start, self.settings.test_tasks))
        return (self._task(split, i, self._seed(seed, i)) for i in itertools.count(start))

    def _seed(self, seed: int, index: int) -> int:
        return random.Random(f"{self.name}/train/{seed}/{index}").randrange(
            self.settings.test_tasks, 2**31
        )

    def _task(self, split: Split, index: int, seed: int) -> Task:
        message = Message("user", f"{self.name}, seed {seed}")
        return Task(
            id=f"{self.name}/{split}/{index}",
            messages=(message,),
            environment=self.name,
            seed=seed,
            tag=self.name,
        )

    def demonstration(self, task: Task) -> Sequence[Message]:
        raise DataError(
            f"{self.name} comes without solutions: train with rollouts, or write demonstrations of "
            "your own"
        )

    async def reset(self, task: Task) -> Sequence[Message]:
        self._turns = 0
        answer = await self._call(lambda: self._begin(task.seed))
        self._state = answer.state
        return (Message("user", answer.text),)

    async def step(self, message: Message) -> Step:
        self._turns += 1
        before, answer = self._state, await self._call(lambda: self.act(message.text))
        self._state = answer.state
        is_done = answer.done or self._turns >= self.settings.max_turns
        return Step(
            messages=() if is_done else (Message("user", answer.text),),
            reward=answer.reward,
            done=is_done,
            state_key=before,
            metrics=answer.metrics,
        )

    async def close(self) -> None:
        inner, self.inner = self.inner, None
        if hasattr(inner, "close"):
            await asyncio.to_thread(inner.close)

    def _begin(self, seed: int) -> Observation:
        if self.inner is None:
            self.inner = self.make()
        return self.first(*self.inner.reset(seed=seed))

    async def _call(self, work: Callable[[], T]) -> T:
        return await asyncio.to_thread(
            self._with_own_random if self.settings.process_random else _plain, work
        )

    def _with_own_random(self, work: Callable[[], T]) -> T:
        """Call `work` with the process's random generators as this environment's last call left
        them, and restore them afterwards.
        """
        with ONE_AT_A_TIME:
            before = random.getstate(), np.random.get_state()
            try:
                if self._random is not None:
                    random.setstate(self._random[0])
                    np.random.set_state(self._random[1])
                return work()
            finally:
                self._random = random.getstate(), np.random.get_state()
                random.setstate(before[0])
                np.random.set_state(before[1])


def _plain(work: Callable[[], T]) -> T:
    return work()
