"""An endless, restartable stream of training tasks.

Position i gives the same task in every run with the same seed.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ratchet.errors import DataError
from ratchet.experience.seeds import derive_seed
from ratchet.protocols import Environment
from ratchet.types import TEMPLATE_VARIABLES, Group, Message, Task

# After this many tasks in a row without a new prompt, the pool is taken to be complete.
MAX_REPEATS = 10_000
TaskKey = tuple[tuple[Message, ...] | str, str]  # see `get_task_key`


def get_task_key(task: Task) -> TaskKey:
    """Return what tells the tasks of a pool apart: the prompt and the variables of its rendering.

    Plain text has no prompt, so its key has the task's id.
    """
    return task.messages or task.id, str(task.meta.get(TEMPLATE_VARIABLES))


class TaskStream:
    """A stream of the tasks of the "train" split, from position 0 on.

    Args:
        examples: Train on this many distinct tasks only, reshuffled every epoch; None: on all.
        pool_seed: The seed that selects these tasks; None: `seed`.
    """

    def __init__(
        self,
        environment: Environment,
        *,
        seed: int,
        examples: int | None = None,
        pool_seed: int | None = None,
    ) -> None:
        self.environment = environment
        self.seed = seed
        self.position = 0
        self._iterator: Iterator[Task] | None = None
        self._epoch = -1
        self._epoch_order: list[int] = []
        self._pool = (
            self._collect_distinct(seed if pool_seed is None else pool_seed, examples)
            if examples
            else []
        )

    def seek(self, position: int) -> None:
        self.position = position
        self._iterator = None

    def take(self, n: int) -> list[tuple[int, Task]]:
        """Return the next n pairs (position, task)."""
        tasks = []
        for _ in range(n):
            tasks.append((self.position, self._get_task(self.position)))
            self.position += 1
        return tasks

    def observe(self, group: Group) -> None:
        """Note the results of a group that has ended. Only subclasses use them."""

    def measure(self) -> Mapping[str, float]:
        return {}

    def snapshot(self, unfinished: Sequence[tuple[int, Task]]) -> dict[str, Any]:
        """Return the state; `unfinished` has the tasks that were taken and are not finished."""
        return {
            "position": self.position,
            "pending": sorted(position for position, _ in unfinished),
        }

    def restore(self, state: Mapping[str, Any]) -> list[tuple[int, Task]]:
        """Restore the state, and return its unfinished pairs (position, task)."""
        unfinished = []
        for position in state["pending"]:
            self.seek(position)
            unfinished += self.take(1)
        self.seek(state["position"])
        return unfinished

    def _get_task(self, position: int) -> Task:
        if self._pool:
            epoch, offset = divmod(position, len(self._pool))
            return self._pool[self._get_order(epoch)[offset]]
        if self._iterator is None:
            self._iterator = iter(self.environment.tasks("train", seed=self.seed, start=position))
        task = next(self._iterator, None)
        if task is None:
            raise DataError(
                f"{type(self.environment).__name__}.tasks('train') ended after {position}. It must "
                "repeat its data without end"
            )
        return task

    def _collect_distinct(self, seed: int, count: int) -> list[Task]:
        """Return the first `count` tasks with distinct prompts, or all if there are fewer."""
        pool: dict[TaskKey, Task] = {}
        repeats = 0  # in a row
        for task in self.environment.tasks("train", seed=seed):
            key = get_task_key(task)
            repeats = repeats + 1 if key in pool else 0
            pool.setdefault(key, task)
            if len(pool) == count or repeats > MAX_REPEATS:
                break
        return list(pool.values())

    def _get_order(self, epoch: int) -> list[int]:
        """Return the shuffled order of the pool in an epoch."""
        if epoch != self._epoch:
            self._epoch = epoch
            self._epoch_order = random.Random(derive_seed(self.seed, "epoch", epoch)).sample(
                range(len(self._pool)), len(self._pool)
            )
        return self._epoch_order
