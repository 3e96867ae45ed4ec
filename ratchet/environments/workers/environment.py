"""An environment whose attempts are played in worker processes, several in each.

An attempt that computes long, blocks or crashes neither delays nor ends the driver. Tasks,
demonstrations and pairs come from an instance in the driver.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Self

from pydantic import Field, SerializeAsAny

from ratchet.config.base import Section
from ratchet.config.resolve import Slot, build
from ratchet.environments.base import EnvironmentConfig
from ratchet.environments.workers.pool import Pool
from ratchet.protocols import (
    HasLabelledAnswers,
    HasMetrics,
    HasPreferencePairs,
    HasStepLabels,
    HasStopStrings,
    HasTools,
    Step,
)
from ratchet.types import Comparison, Group, Judged, Message, Split, Task


class WorkersConfig(EnvironmentConfig):
    """A section that plays another environment's attempts in worker processes.

    Use it for an environment that computes long, blocks or crashes.
    """

    builds: ClassVar[str] = "ratchet.environments.workers.environment:workers"

    worker: Annotated[SerializeAsAny[Section], Slot("played")] = Field(
        description="The environment whose attempts they play."
    )
    processes: int = Field(
        2, ge=1, le=1024, description="Worker processes at most; each starts when it is needed."
    )
    threads: int = Field(
        8, ge=1, le=1024, description="Threads of each: attempts beyond these wait for one another."
    )

    @property
    def default_reward(self) -> str | Mapping[str, Any]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return getattr(self.worker, "default_reward", "")

    @property
    def gives(self) -> frozenset[str]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return getattr(self.worker, "gives", EnvironmentConfig.gives)

    @property
    def judges(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return getattr(self.worker, "judges", True)


def workers(config: WorkersConfig) -> WorkerEnvironment:
    """Return a worker environment with the optional protocols of the environment itself."""
    local = build(config.worker)
    bases = tuple(made for protocol, made in OFFERS.items() if isinstance(local, protocol))
    return type(f"{type(local).__name__}InWorkers", (*bases, WorkerEnvironment), {})(config, local)


class WorkerEnvironment:
    """An environment that forwards attempts to worker processes.

    Copies share the processes. An instance has a seat in one of them from its first attempt until
    it is closed.

    Args:
        here: The instance in the driver.
    """

    def __init__(self, config: WorkersConfig, here: Any) -> None:
        self.config, self.here = config, here
        self.replayable, self.judges = here.replayable, getattr(here, "judges", True)
        self._pool = Pool(
            config.worker.model_dump(mode="json"),
            processes=config.processes,
            threads=config.threads,
        )
        self._join()

    def __copy__(self) -> Self:
        copied = object.__new__(type(self))
        copied.__dict__ |= self.__dict__
        copied._join()
        return copied

    def _join(self) -> None:
        self._instance = self._pool.join()
        self._task: Task | None = None
        self._said: Mapping[str, Any] = {}
        weakref.finalize(self, self._pool.leave, self._instance).atexit = False

    def tasks(self, split: Split, *, seed: int, start: int = 0) -> Iterator[Task]:
        return self.here.tasks(split, seed=seed, start=start)

    def demonstration(self, task: Task) -> Sequence[Message]:
        return self.here.demonstration(task)

    async def reset(self, task: Task) -> Sequence[Message]:
        """Start an attempt and return its first messages.

        Raises Lost if the process died, and Raised, with the traceback, if the environment raised
        an exception. So does `step`.
        """
        self._task, self._said = None, await self._pool.reset(self._instance, task)
        self._task = task
        return self._said["messages"]

    async def step(self, message: Message) -> Step:
        reply = await self._pool.step(self._instance, message)
        self._said = {**self._said, **reply}
        return reply["step"]

    async def close(self) -> None:
        self._task = None
        await self._pool.close(self._instance)


class _OffersTools(WorkerEnvironment):
    def tools(self, task: Task) -> Sequence[Mapping[str, Any]]:
        return self._said["tools"] if task == self._task else self.here.tools(task)


class _OffersStops(WorkerEnvironment):
    @property
    def stop_strings(self) -> tuple[str, ...]:
        return self._said.get("stops", ())


class _Measures(WorkerEnvironment):
    def measure(self, groups: Sequence[Group]) -> Mapping[str, float]:
        return self.here.measure(groups)


class _Compares(WorkerEnvironment):
    def comparison(self, task: Task) -> Comparison:
        return self.here.comparison(task)


class _Judges(WorkerEnvironment):
    def judged(self, task: Task) -> Judged:
        return self.here.judged(task)


class _Steps(WorkerEnvironment):
    def steps(self, task: Task) -> Sequence[tuple[str, float]]:
        return self.here.steps(task)


OFFERS: Mapping[type, type[WorkerEnvironment]] = {
    HasTools: _OffersTools,
    HasStopStrings: _OffersStops,
    HasMetrics: _Measures,
    HasPreferencePairs: _Compares,
    HasLabelledAnswers: _Judges,
    HasStepLabels: _Steps,
}
