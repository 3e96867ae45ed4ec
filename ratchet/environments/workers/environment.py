"""An environment whose attempts are played in worker processes, several attempts in each.

An attempt that computes for long, blocks or crashes does not affect the driver. Tasks,
demonstrations and preference pairs come from an instance in the driver.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Self

from pydantic import Field

from ratchet.config.resolve import Slot
from ratchet.config.schema import AnyEnvironment
from ratchet.config.sections import EnvironmentConfig
from ratchet.environments.build import build_environment
from ratchet.environments.workers.pool import Pool
from ratchet.protocols import Environment, Step
from ratchet.types import Comparison, Group, LabelledAnswer, Message, Split, Task


class WorkersConfig(EnvironmentConfig):
    """Another environment whose attempts are played in worker processes.

    Use it for an environment that computes for long, blocks or crashes.
    """

    builds: ClassVar[str] = "ratchet.environments.workers.environment:workers"

    worker: Annotated[AnyEnvironment, Slot("worker_environment")]
    """Environment that the workers play."""
    processes: int = Field(2, ge=1, le=1024)
    """Maximum number of worker processes; each starts when it is needed."""
    threads: int = Field(8, ge=1, le=1024)
    """Number of threads of each worker; attempts in the same thread block each other."""

    @property
    def default_reward(self) -> str | Mapping[str, Any]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.worker.default_reward

    @property
    def data_kinds(self) -> frozenset[str]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.worker.data_kinds

    @property
    def returns_rewards(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.worker.returns_rewards


def workers(config: WorkersConfig) -> WorkerEnvironment:
    """Return an environment whose attempts are played in workers."""
    return WorkerEnvironment(config, build_environment(config.worker))


class WorkerEnvironment(Environment):
    """An environment that forwards attempts to worker processes.

    Copies share the processes. From its first attempt until it is closed, an instance belongs to a
    thread of one process.

    Args:
        local: The instance of the environment in the driver.
    """

    def __init__(self, config: WorkersConfig, local: Environment) -> None:
        self.config, self.local = config, local
        self.replayable, self.returns_rewards = local.replayable, local.returns_rewards
        self.raw_observations = local.raw_observations
        self._pool = Pool(
            config.worker.model_dump(mode="json"),
            processes=config.processes,
            threads=config.threads,
        )
        self._register()

    def __copy__(self) -> Self:
        environment = object.__new__(type(self))
        vars(environment).update(vars(self))
        environment._register()
        return environment

    def _register(self) -> None:
        """Give this copy a number in the pool, which the pool forgets when the copy is gone."""
        self._instance = self._pool.register()
        self._task: Task | None = None
        self._reply: Mapping[str, Any] = {}
        weakref.finalize(self, self._pool.unregister, self._instance).atexit = False

    def tasks(self, split: Split, *, seed: int, start: int = 0) -> Iterator[Task]:
        return self.local.tasks(split, seed=seed, start=start)

    def task_count(self) -> int | None:
        return self.local.task_count()

    def drops_too_long_rows(self, task: Task) -> bool:
        return self.local.drops_too_long_rows(task)

    def demonstration(self, task: Task) -> Sequence[Message]:
        return self.local.demonstration(task)

    async def reset(self, task: Task) -> Sequence[Message]:
        """Start an attempt and return its first messages.

        Like `step`, it raises EnvironmentProcessLost if the process died, and EnvironmentRaised,
        with the traceback, if the environment raised an exception.
        """
        self._reply = await self._pool.reset(self._instance, task)
        self._task = task
        return self._reply["messages"]

    async def step(self, message: Message) -> Step:
        reply = await self._pool.step(self._instance, message)
        self._reply = {**self._reply, **reply}
        return reply["step"]

    def observe(
        self, task: Task, first: Sequence[Message], turns: Sequence[Sequence[Message]]
    ) -> Sequence[Message]:
        return self.local.observe(task, first, turns)

    async def reward_cut_attempt(self, messages: Sequence[Message]) -> float | None:
        return await self._pool.reward_cut_attempt(self._instance, messages)

    async def close(self) -> None:
        self._task = None
        await self._pool.close(self._instance)

    @property
    def has_tools(self) -> bool:
        return self.local.has_tools

    def tools(self, task: Task) -> Sequence[Mapping[str, Any]]:
        return self._reply["tools"] if task == self._task else self.local.tools(task)

    @property
    def stop_strings(self) -> tuple[str, ...]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self._reply.get("stop_strings", ())

    def post_process(self, groups: Sequence[Group]) -> Sequence[Group]:
        return self.local.post_process(groups)

    def measure(self, groups: Sequence[Group]) -> Mapping[str, float]:
        return self.local.measure(groups)

    @property
    def has_pairs(self) -> bool:
        return self.local.has_pairs

    def comparison(self, task: Task) -> Comparison:
        return self.local.comparison(task)

    @property
    def has_labelled_answers(self) -> bool:
        return self.local.has_labelled_answers

    def labelled_answer(self, task: Task) -> LabelledAnswer:
        return self.local.labelled_answer(task)

    @property
    def has_step_labels(self) -> bool:
        return self.local.has_step_labels

    def steps(self, task: Task) -> Sequence[tuple[str, float]]:
        return self.local.steps(task)
