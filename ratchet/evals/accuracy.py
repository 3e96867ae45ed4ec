"""Held-out accuracy: greedy, and optionally the mean over sampled attempts."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from ratchet.experience.manager import RolloutManager
from ratchet.types import Failed, Group, Sampling, Task

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Accuracy:
    """Mean reward over held-out tasks; a failed attempt is left out and counted.

    greedy: one attempt a task at temperature 0. sampled: mean over `samples` attempts a task, None when not asked for.
    """

    tasks: int
    greedy: float
    sampled: float | None
    truncated_share: float
    failed: int

    def numbers(self) -> dict[str, float]:
        named = {"accuracy": self.greedy, "truncated_share": self.truncated_share, "failed": float(self.failed)}
        return named | ({} if self.sampled is None else {"sampled": self.sampled})


class Evaluator:
    """manager: judges by the yardstick, which by default is the environment's own reward: shaping can't move it."""

    measures = "answers of the policy"

    def __init__(self, manager: RolloutManager, tasks: Sequence[Task], sampling: Sampling, *, samples: int = 0) -> None:
        self.manager, self.tasks, self.sampling, self.samples = manager, tasks, sampling, samples
        self.managers = (manager,)

    async def run(self) -> Accuracy:
        jobs = [(f"eval/{task.id}", task) for task in self.tasks]
        greedy = await self.manager.groups(jobs, replace(self.sampling, temperature=0.0), attempts=1)
        sampled: float | None = None
        if self.samples:
            sampled = _mean_reward(await self.manager.groups(jobs, self.sampling, attempts=self.samples))
        attempts = [rows[-1] for group in greedy for rows in group.attempts]
        failures = [t.outcome for t in attempts if isinstance(t.outcome, Failed)]
        if failures:
            log.warning(
                "%d of %d evaluation attempts failed and are left out; %s", len(failures), len(attempts), failures[0].detail
            )
        return Accuracy(
            tasks=len(self.tasks),
            greedy=_mean_reward(greedy),
            sampled=sampled,
            truncated_share=fmean(t.truncated for t in attempts),
            failed=len(failures),
        )


def _mean_reward(groups: Sequence[Group]) -> float:
    rewards = [rows[-1].reward for group in groups for rows in group.attempts if rows[-1].reward is not None]
    return fmean(rewards) if rewards else float("nan")
