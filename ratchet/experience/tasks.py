"""An endless, restartable stream of training tasks: position i gives the same task in every run with the same seed."""

from __future__ import annotations

import random
from collections.abc import Iterator

from ratchet.errors import DataError
from ratchet.experience.seeds import seed_for
from ratchet.interfaces import Environment
from ratchet.types import Task


class TaskStream:
    """Tasks of the "train" split from position 0 on.

    examples: train on the first so many tasks only, reshuffled every epoch. A finite split is treated as that many examples.
    """

    def __init__(self, environment: Environment, *, seed: int, examples: int | None = None) -> None:
        self.environment, self.seed = environment, seed
        self.position = 0
        self._upcoming: Iterator[Task] | None = None
        self._pool: list[Task] | None = None
        if examples is not None:
            self._pool = [task for task, _ in zip(environment.tasks("train", seed=seed), range(examples), strict=False)]
            self._require(self._pool)

    def seek(self, position: int) -> None:
        self.position, self._upcoming = position, None

    def take(self, n: int) -> list[tuple[int, Task]]:
        """The next n (position, task)."""
        taken = []
        for _ in range(n):
            taken.append((self.position, self._at(self.position)))
            self.position += 1
        return taken

    def _at(self, position: int) -> Task:
        if self._pool is None:
            if self._upcoming is None:
                self._upcoming = iter(self.environment.tasks("train", seed=self.seed, start=position))
            task = next(self._upcoming, None)
            if task is not None:
                return task
            self._pool = list(self.environment.tasks("train", seed=self.seed))
            self._require(self._pool)
        epoch, offset = divmod(position, len(self._pool))
        order = list(range(len(self._pool)))
        random.Random(seed_for(self.seed, "epoch", epoch)).shuffle(order)
        return self._pool[order[offset]]

    def _require(self, pool: list[Task]) -> None:
        if not pool:
            raise DataError(f"{type(self.environment).__name__} has no training tasks: check its files and its filters")
