"""A base class of environments whose tasks are seeds of episodes."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence

from ratchet.errors import DataError
from ratchet.protocols import Environment
from ratchet.types import Message, Split, Task


class SeededTasks(Environment):
    """A base class of environments whose tasks are seeds.

    Attributes:
        n_test_tasks: Number of held-out tasks, whose seeds are 0 to n_test_tasks - 1. The seeds of
            training tasks are random and at least n_test_tasks.
        returns_rewards: True, because the steps return rewards.
    """

    name: str
    n_test_tasks: int
    returns_rewards = True

    def tasks(self, split: Split, *, seed: int, start: int = 0) -> Iterator[Task]:
        """Return a split's tasks from position `start`; the train split is endless.

        A task's message only names it: `reset` returns the prompt.
        """
        if split == "test":
            return (self._make_task(split, i, i) for i in range(start, self.n_test_tasks))
        return (self._make_task(split, i, self._make_seed(seed, i)) for i in itertools.count(start))

    def _make_seed(self, seed: int, index: int) -> int:
        return random.Random(f"{self.name}/train/{seed}/{index}").randrange(
            self.n_test_tasks, 2**31
        )

    def _make_task(self, split: Split, index: int, seed: int) -> Task:
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
            f"{self.name} has no solutions: train with rollouts, or write demonstrations of your "
            "own"
        )
