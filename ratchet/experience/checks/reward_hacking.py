"""What shows that a reward is being fooled: another judge's opinion of the attempts, and tasks that
nobody can solve."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean

from ratchet.experience.rollout.manager import RolloutManager
from ratchet.experience.rollout.user_code import UserCodeFailed, guarded
from ratchet.observe.sentinels import Exhibit
from ratchet.protocols import Reward
from ratchet.types import Group, Sampling, Scored, Task, Trajectory, Truncated, finite

OPINION, CANARY = "second_opinion/disagreement", "canary/reward"


@dataclass(frozen=True)
class Findings:
    """metrics: by prefix and key. shown: evidence, by the metric that it is of."""

    metrics: dict[str, dict[str, float]] = field(default_factory=dict)
    shown: dict[str, list[Exhibit]] = field(default_factory=dict)


@dataclass
class Probes:
    """second: judges a few attempts of a step once more; nothing trains on it. manager: plays the
    canaries, and judges them by the reward that trains. every: steps between two looks. sample:
    attempts that are judged again."""

    every: int
    sample: int
    second: Reward | None = None
    manager: RolloutManager | None = None
    canaries: Sequence[Task] = ()
    sampling: Sampling = field(default_factory=Sampling)

    @property
    def managers(self) -> tuple[RolloutManager, ...]:
        return () if self.manager is None else (self.manager,)

    def due(self, done: int) -> bool:
        return done % self.every == 0

    async def check(self, groups: Sequence[Group]) -> Findings:
        """What both say now. The canaries are played greedily, with the generator's weights."""
        findings = Findings()
        if self.second is not None:
            await self._ask(self.second, groups, findings)
        if self.manager is not None and self.canaries:
            await self._play(self.manager, findings)
        return findings

    async def _ask(self, second: Reward, groups: Sequence[Group], findings: Findings) -> None:
        """Whole groups, as some rewards compare their attempts, until enough attempts are
        judged."""
        compared: list[tuple[float, float]] = []
        for group in groups:
            if len(compared) >= self.sample:
                break
            rows = [
                attempt[-1]
                for attempt in group.attempts
                if attempt[-1].use == "train" and attempt[-1].reward is not None
            ]
            for row, reward in zip(rows, await _judged(second, rows, group.task), strict=True):
                if reward is not None and row.reward is not None:
                    compared.append((row.reward, reward))
                    exhibit = Exhibit(abs(row.reward - reward), group, row)
                    findings.shown.setdefault(OPINION, []).append(exhibit)
        if compared:
            findings.metrics["second_opinion"] = {
                "reward": fmean(reward for _, reward in compared),
                "disagreement": fmean(abs(first - reward) for first, reward in compared),
            }

    async def _play(self, manager: RolloutManager, findings: Findings) -> None:
        jobs = [(f"canary/{task.id}", task) for task in self.canaries]
        played = await manager.groups(jobs, replace(self.sampling, temperature=0.0), attempts=1)
        judged = [(group, rows[-1], rows[-1].reward) for group in played for rows in group.attempts]
        rewards = [reward for _, _, reward in judged if reward is not None]
        if rewards:
            findings.metrics["canary"] = {"reward": fmean(rewards)}
            findings.shown[CANARY] = [
                Exhibit(reward, group, row) for group, row, reward in judged if reward is not None
            ]


async def _judged(second: Reward, rows: Sequence[Trajectory], task: Task) -> list[float | None]:
    """What it gives each attempt; None for those that it fails to judge, which costs the run
    nothing."""
    unjudged = [replace(row, outcome=Truncated() if row.truncated else None) for row in rows]
    try:
        outcomes = list(await guarded(lambda: second.score(unjudged, task))) if rows else []
    except UserCodeFailed:
        return [None] * len(rows)
    given = [
        outcome.reward if isinstance(outcome, Scored | Truncated) else None for outcome in outcomes
    ]
    given += [None] * (len(rows) - len(given))
    return [
        float(reward) if reward is not None and finite(reward) else None
        for reward in given[: len(rows)]
    ]
