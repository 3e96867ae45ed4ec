"""An endless, restartable stream of training tasks: position i gives the same task in every run with the same seed."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator

from ratchet.experience.seeds import seed_for
from ratchet.interfaces import Environment
from ratchet.types import Task


class TaskStream:
    """Tasks of the "train" split from position 0 on.

    examples: train on the first so many tasks only, reshuffled every epoch.
    """

    def __init__(self, environment: Environment, *, seed: int, examples: int | None = None) -> None:
        self.environment, self.seed = environment, seed
        self.position = 0
        self._upcoming: Iterator[Task] | None = None
        self._epoch, self._shuffled = -1, list[int]()
        self._pool = list(itertools.islice(environment.tasks("train", seed=seed), examples)) if examples else []

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
        if self._pool:
            epoch, offset = divmod(position, len(self._pool))
            return self._pool[self._order(epoch)[offset]]
        if self._upcoming is None:
            self._upcoming = iter(self.environment.tasks("train", seed=self.seed, start=position))
        return next(self._upcoming)

    def _order(self, epoch: int) -> list[int]:
        if epoch != self._epoch:
            self._epoch = epoch
            self._shuffled = random.Random(seed_for(self.seed, "epoch", epoch)).sample(range(len(self._pool)), len(self._pool))
        return self._shuffled
