"""Base class of adapters for environments with `reset(seed)` and `step(action)`.

Gymnasium, gem and ROLL have such environments. Their calls may block, so they run in threads, and
other attempts continue meanwhile.
"""

from __future__ import annotations

import random
import threading
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, Self, TypeVar

import numpy as np
from pydantic import Field

from ratchet.config.sections import EnvironmentConfig
from ratchet.environments.adapters.seeded_tasks import SeededTasks
from ratchet.errors import DataError
from ratchet.protocols import Step
from ratchet.rewards.user_threads import call_in_thread
from ratchet.types import Message, Task


class ResetStepConfig(EnvironmentConfig):
    """The settings of an environment whose tasks are seeds, and whose steps return the rewards."""

    data_kinds: ClassVar[frozenset[str]] = frozenset({"rollouts"})

    test_tasks: int = Field(100, ge=1)
    """Number of test tasks. Their seeds count from 0."""
    max_turns: int = Field(100, ge=1)
    """Number of turns after which an episode ends."""
    replayable: bool = True
    """True if the same seed and the same actions give the same episode."""
    uses_global_random: bool = True
    """True for an environment that uses the global generator of Python's random or of numpy. Its
    calls then run one at a time, and the generator's state is saved between them. False: calls run
    concurrently in threads."""


T = TypeVar("T")
RESET_RESULT = ("observation", "info")
STEP_RESULT = ("observation", "reward", "terminated", "truncated", "info")
GLOBAL_RANDOM_LOCK = threading.Lock()


class Observation(NamedTuple):
    """An observation after a reset or a step."""

    text: str
    """The message to the policy."""
    state: str
    """A key of the environment's state, which becomes the next step's `state_key`."""
    reward: float = 0.0
    done: bool = False
    metrics: Mapping[str, float] = {}


class ResetStepEnvironment(SeededTasks):
    """A base class of adapters, which runs episodes of an inner environment.

    A subclass creates the inner environment, and converts its observations to text and text to its
    actions. An instance reuses its inner environment in later episodes. A copy creates a new one.
    """

    def __init__(self, config: ResetStepConfig, name: str) -> None:
        self.settings = config
        self.name = name
        self.replayable = config.replayable
        self.n_test_tasks = config.test_tasks
        self.inner: Any = None
        self._random_state: tuple[Any, Any] | None = None

    @abstractmethod
    def make_inner(self) -> Any:
        """Return a new inner environment."""

    @abstractmethod
    def make_first_observation(self, observation: Any, info: Mapping[str, Any]) -> Observation:
        """Return the first observation of an episode, from the result of the inner `reset`."""

    @abstractmethod
    def take_action(self, text: str) -> Observation:
        """Take the action in the policy's text, and return the observation after it."""

    def __copy__(self) -> Self:
        copy = type(self).__new__(type(self))
        vars(copy).update({**vars(self), "inner": None, "_random_state": None})
        return copy

    async def reset(self, task: Task) -> Sequence[Message]:
        self._turns = 0
        observation = await self._call(lambda: self._begin(task.seed))
        self._state = observation.state
        return (Message("user", observation.text),)

    async def step(self, message: Message) -> Step:
        self._turns += 1
        previous_state = self._state
        observation = await self._call(lambda: self.take_action(message.text))
        self._state = observation.state
        is_done = observation.done or self._turns >= self.settings.max_turns
        return Step(
            messages=() if is_done else (Message("user", observation.text),),
            reward=observation.reward,
            done=is_done,
            state_key=previous_state,
            metrics=observation.metrics,
        )

    async def close(self) -> None:
        inner, self.inner = self.inner, None
        if hasattr(inner, "close"):
            await call_in_thread(inner.close)

    def _begin(self, seed: int) -> Observation:
        if self.inner is None:
            self.inner = self.make_inner()
        result = self._read_result("reset", self.inner.reset(seed=seed), RESET_RESULT)
        return self.make_first_observation(*result)

    def step_inner(self, action: Any) -> tuple[Any, ...]:
        """Return what the inner `step` returns. Raises DataError if it has another form."""
        return self._read_result("step", self.inner.step(action), STEP_RESULT)

    def _read_result(self, method: str, result: Any, names: Sequence[str]) -> tuple[Any, ...]:
        """Return a result of `reset` or `step`, whose last value, the info, may be None."""
        is_row = isinstance(result, tuple | list) and len(result) == len(names)
        if not is_row or not isinstance(result[-1], Mapping | None):
            raise DataError(
                f"{self.name}: {method} returned {result!r:.80}. It must return "
                f"({', '.join(names)}), as environments of Gymnasium do, with a dict as info."
            )
        return *result[:-1], result[-1] or {}

    async def _call(self, function: Callable[[], T]) -> T:
        return await call_in_thread(
            self._run_with_random_state if self.settings.uses_global_random else _call_directly,
            function,
        )

    def _run_with_random_state(self, function: Callable[[], T]) -> T:
        """Call `function` with this instance's own state of the global random generators.

        After the call, that state is saved for the next call, and the generators get back the state
        that they had before.
        """
        with GLOBAL_RANDOM_LOCK:
            global_state = random.getstate(), np.random.get_state()
            try:
                if self._random_state is not None:
                    random.setstate(self._random_state[0])
                    np.random.set_state(self._random_state[1])
                return function()
            finally:
                self._random_state = random.getstate(), np.random.get_state()
                random.setstate(global_state[0])
                np.random.set_state(global_state[1])


def _call_directly(function: Callable[[], T]) -> T:
    return function()
