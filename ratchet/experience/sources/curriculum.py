"""Which task is next, where some teach more than others.

The task at a position is drawn with weights, by a seed of that position. So it follows from (seed,
position, what was known when the position was taken) alone, and what is known changes only where a
group ends: embedded runs draw the same each time, and a checkpoint needs what is known, and which
tasks those positions have that are not done with.
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
from ratchet.experience.seeds import seed_for
from ratchet.experience.sources.tasks import TaskStream
from ratchet.protocols import Environment
from ratchet.types import Group, Task

UNTRIED = 0.5  # the success rate where a task is worth most to try


class Curriculum(TaskStream):
    """per_step: tasks that a step takes. Raises DataError where the tasks don't say how difficult
    they are.

    N = tasks in the pool, O = those that are open.
    """

    def __init__(
        self,
        environment: Environment,
        config: CurriculumConfig,
        *,
        per_step: int,
        seed: int,
        examples: int,
        pool_seed: int | None = None,
    ) -> None:
        super().__init__(environment, seed=seed, examples=examples, pool_seed=pool_seed)
        self.config, self.per_step = config, per_step
        self._places = {task.messages: place for place, task in enumerate(self._pool)}
        self._rates_N = np.full(len(self._pool), UNTRIED)
        self._tried_N = np.zeros(len(self._pool), dtype=np.bool_)
        ranks = (
            range(len(self._pool))
            if config.difficulty is None
            else _easiest_first(self._pool, config.difficulty)
        )
        self._ranked_N = np.array(ranks)

    def observe(self, group: Group) -> None:
        rewards = [
            row.reward
            for row in (rows[-1] for rows in group.attempts)
            if row.use == "train" and row.reward is not None
        ]
        if not rewards:
            return
        place, kept = self._places[group.task.messages], self.config.memory
        successes = fmean(reward >= self.config.success for reward in rewards)
        self._rates_N[place] = kept * self._rates_N[place] + (1 - kept) * successes
        self._tried_N[place] = True

    def measure(self) -> Mapping[str, float]:
        numbers = {"open_share": len(self._open(self.position)) / len(self._pool)}
        if self._tried_N.any():
            numbers |= {
                "tried_share": self._tried_N.mean(),
                "success_rate": self._rates_N[self._tried_N].mean(),
            }
        return {f"curriculum/{name}": float(value) for name, value in numbers.items()}

    def snapshot(self, waiting: Sequence[tuple[int, Task]]) -> dict[str, Any]:
        by_position = dict(waiting)
        state = super().snapshot(waiting)
        places = [self._places[by_position[position].messages] for position in state["pending"]]
        return {
            **state,
            "places": places,
            "rates": self._rates_N.copy(),
            "tried": self._tried_N.copy(),
        }

    def restore(self, state: Mapping[str, Any]) -> list[tuple[int, Task]]:
        self.seek(state["position"])
        self._rates_N, self._tried_N = state["rates"].copy(), state["tried"].copy()
        return [
            (position, self._pool[place])
            for position, place in zip(state["pending"], state["places"], strict=True)
        ]

    def _at(self, position: int) -> Task:
        open_O = self._open(position)
        bounds_O = np.cumsum(self._weights(open_O))
        point = random.Random(seed_for(self.seed, "curriculum", position)).random() * bounds_O[-1]
        return self._pool[
            open_O[min(int(np.searchsorted(bounds_O, point, side="right")), len(open_O) - 1)]
        ]

    def _open(self, position: int) -> NDArray[np.int64]:
        """Places of the tasks that may be drawn."""
        if self.config.difficulty is None:
            return self._ranked_N
        start, passed = self.config.opens_at, position // self.per_step / self.config.opens_by
        return self._ranked_N[: math.ceil(min(1.0, start + (1 - start) * passed) * len(self._pool))]

    def _weights(self, open_O: NDArray[np.int64]) -> NDArray[np.float64]:
        rates_O = self._rates_N[open_O]
        worth_O = {
            "even": np.ones_like(rates_O),
            "learnable": rates_O * (1 - rates_O),
            "hard": 1 - rates_O,
        }[self.config.prefer]
        total, share = worth_O.sum(), self.config.explore
        return (
            share / len(open_O) + (1 - share) * worth_O / total if total else np.ones_like(rates_O)
        )


def _easiest_first(pool: Sequence[Task], name: str) -> list[int]:
    for task in pool:
        value = task.meta.get(name)
        if not isinstance(value, int | float) or not math.isfinite(value):
            known = ", ".join(task.meta) or "nothing"
            raise DataError(
                f"curriculum.difficulty={name}: task {task.id} has no such number in its meta "
                f"(there is {known}): name another "
                "one, or remove it"
            )
    return sorted(range(len(pool)), key=lambda place: pool[place].meta[name])
