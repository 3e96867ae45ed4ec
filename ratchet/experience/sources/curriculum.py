"""A curriculum: draw tasks that teach more with higher probability.

Positions number the tasks that are drawn. The task at a position is drawn by weight, with a seed
derived from the position: it depends only on the run's seed, the position and the success rates at
the time of the draw. Rates change only when a group ends. So synchronous runs draw the same tasks
each time, and a checkpoint needs only the rates and the tasks of pending positions.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ratchet.config.experience import CurriculumConfig
from ratchet.errors import DataError
from ratchet.experience.seeds import derive_seed
from ratchet.experience.sources.tasks import TaskStream, get_task_key
from ratchet.protocols import Environment
from ratchet.types import Group, Task, is_number_not_bool

UNTRIED_RATE = 0.5  # initial success rate; prefer=learnable gives it the highest weight
# Checkpoint key of the pending tasks' indices in the pool. The name is that of older checkpoints.
PENDING_INDICES = "places"


class Curriculum(TaskStream):
    """A task stream that draws tasks by their success rates, and may begin with the easiest.

    N = tasks in the pool, O = open tasks, which may be drawn at a position.

    Args:
        tasks_per_step: Number of tasks of a step. The other arguments are those of `TaskStream`.

    Raises:
        DataError: A task's meta has no finite number under the recipe's `difficulty`.
    """

    def __init__(
        self,
        environment: Environment,
        config: CurriculumConfig,
        *,
        tasks_per_step: int,
        seed: int,
        examples: int,
        pool_seed: int | None = None,
    ) -> None:
        super().__init__(environment, seed=seed, examples=examples, pool_seed=pool_seed)
        self.config = config
        self.tasks_per_step = tasks_per_step
        self._index_by_key = {get_task_key(task): index for index, task in enumerate(self._pool)}
        self._rates_N = np.full(len(self._pool), UNTRIED_RATE)
        self._tried_N = np.zeros(len(self._pool), dtype=np.bool_)
        ranks = (
            range(len(self._pool))
            if config.difficulty is None
            else _sort_by_difficulty(self._pool, config.difficulty)
        )
        self._ranked_N = np.array(ranks)  # indices in the pool, the easiest task first

    def observe(self, group: Group) -> None:
        """Update the success rate of the group's task."""
        rewards = group.rewards
        if not rewards:
            return
        index = self._index_by_key[get_task_key(group.task)]
        memory = self.config.memory
        successes = fmean(reward >= self.config.success for reward in rewards)
        self._rates_N[index] = memory * self._rates_N[index] + (1 - memory) * successes
        self._tried_N[index] = True

    def measure(self) -> Mapping[str, float]:
        metrics = {"open_share": len(self._get_open_tasks(self.position)) / len(self._pool)}
        if self._tried_N.any():
            metrics |= {
                "tried_share": self._tried_N.mean(),
                "success_rate": self._rates_N[self._tried_N].mean(),
            }
        return {f"curriculum/{name}": float(value) for name, value in metrics.items()}

    def snapshot(self, unfinished: Sequence[tuple[int, Task]]) -> dict[str, Any]:
        task_by_position = dict(unfinished)
        state = super().snapshot(unfinished)
        indices = [
            self._index_by_key[get_task_key(task_by_position[position])]
            for position in state["pending"]
        ]
        return {
            **state,
            PENDING_INDICES: indices,
            "rates": self._rates_N.copy(),
            "tried": self._tried_N.copy(),
        }

    def restore(self, state: Mapping[str, Any]) -> list[tuple[int, Task]]:
        self.seek(state["position"])
        self._rates_N = state["rates"].copy()
        self._tried_N = state["tried"].copy()
        return [
            (position, self._pool[index])
            for position, index in zip(state["pending"], state[PENDING_INDICES], strict=True)
        ]

    def _get_task(self, position: int) -> Task:
        """Draw the task of a position by weight."""
        open_O = self._get_open_tasks(position)
        cumulative_O = np.cumsum(self._compute_weights(open_O))
        u = random.Random(derive_seed(self.seed, "curriculum", position)).random()
        drawn = int(np.searchsorted(cumulative_O, u * cumulative_O[-1], side="right"))
        return self._pool[open_O[min(drawn, len(open_O) - 1)]]

    def _get_open_tasks(self, position: int) -> NDArray[np.int64]:
        """Return the indices in the pool of the tasks that may be drawn at a position."""
        if self.config.difficulty is None:
            return self._ranked_N
        start = self.config.start_share
        progress = position // self.tasks_per_step / self.config.full_by_step
        return self._ranked_N[
            : math.ceil(min(1.0, start + (1 - start) * progress) * len(self._pool))
        ]

    def _compute_weights(self, open_O: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return weights proportional to the probability of drawing each open task."""
        rates_O = self._rates_N[open_O]
        usefulness_O = {
            "even": np.ones_like(rates_O),
            "learnable": rates_O * (1 - rates_O),
            "hard": 1 - rates_O,
        }[self.config.prefer]
        total = usefulness_O.sum()
        explore_share = self.config.explore
        return (
            explore_share / len(open_O) + (1 - explore_share) * usefulness_O / total
            if total
            else np.ones_like(rates_O)
        )


def _sort_by_difficulty(pool: Sequence[Task], name: str) -> list[int]:
    """Return the indices in the pool of all tasks, sorted by increasing difficulty."""
    for task in pool:
        value = task.meta.get(name)
        if not is_number_not_bool(value):
            present = ", ".join(task.meta) or "nothing"
            raise DataError(
                f"curriculum.difficulty={name} is not a number in the meta of task {task.id} (it "
                f"has {present}). Name another key, or remove curriculum.difficulty"
            )
    return sorted(range(len(pool)), key=lambda index: pool[index].meta[name])
