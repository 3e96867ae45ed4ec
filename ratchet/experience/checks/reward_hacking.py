"""Detect reward hacking.

A second reward judges some attempts again. Canaries are tasks that can't be solved: an attempt that
earns a reward on a canary has exploited the reward.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean

from ratchet.experience.rollout.manager import RolloutManager
from ratchet.observe.sentinels import Exhibit
from ratchet.protocols import Reward
from ratchet.types import Group, Sampling, Scored, Task, Trajectory, Truncated, is_finite_number
from ratchet.utils.user_code import UserCodeFailed, run_guarded

DISAGREEMENT, CANARY_REWARD = "second_opinion/disagreement", "canary/reward"


@dataclass(frozen=True)
class ProbeFindings:
    """The results of a check."""

    metrics: dict[str, dict[str, float]] = field(default_factory=dict)
    """Metrics by prefix and key."""
    exhibits: dict[str, list[Exhibit]] = field(default_factory=dict)
    """Example attempts, by the metric that they explain."""


@dataclass
class RewardHackingProbes:
    """The checks for reward hacking."""

    every: int
    """Steps between two checks."""
    sample: int
    """Number of attempts that are judged again at each check."""
    second_reward: Reward | None = None
    """The reward that judges attempts again; nothing trains on it."""
    manager: RolloutManager | None = None
    """Plays the canaries and judges them by the training reward."""
    canaries: Sequence[Task] = ()
    """Tasks that must not earn a reward."""
    sampling: Sampling = field(default_factory=Sampling)
    """Sampling of the canaries, apart from the temperature, which is 0."""

    @property
    def managers(self) -> tuple[RolloutManager, ...]:
        return () if self.manager is None else (self.manager,)

    def is_due(self, steps_done: int) -> bool:
        return steps_done % self.every == 0

    async def check(self, groups: Sequence[Group]) -> ProbeFindings:
        """Run both checks. The canaries are played greedily with the generator's weights."""
        findings = ProbeFindings()
        if self.second_reward is not None:
            await self._compare_rewards(self.second_reward, groups, findings)
        if self.manager is not None and self.canaries:
            await self._play_canaries(self.manager, findings)
        return findings

    async def _compare_rewards(
        self, second_reward: Reward, groups: Sequence[Group], findings: ProbeFindings
    ) -> None:
        """Judge whole groups again until `sample` attempts are judged.

        Groups stay whole because some rewards compare their attempts.
        """
        reward_pairs: list[tuple[float, float]] = []
        for group in groups:
            if len(reward_pairs) >= self.sample:
                break
            rows = [
                attempt[-1]
                for attempt in group.attempts
                if attempt[-1].use == "train" and attempt[-1].reward is not None
            ]
            for row, reward in zip(
                rows, await _judge_again(second_reward, rows, group.task), strict=True
            ):
                if reward is not None and row.reward is not None:
                    reward_pairs.append((row.reward, reward))
                    exhibit = Exhibit(abs(row.reward - reward), group, row)
                    findings.exhibits.setdefault(DISAGREEMENT, []).append(exhibit)
        if reward_pairs:
            findings.metrics["second_opinion"] = {
                "reward": fmean(reward for _, reward in reward_pairs),
                "disagreement": fmean(abs(first - reward) for first, reward in reward_pairs),
            }

    async def _play_canaries(self, manager: RolloutManager, findings: ProbeFindings) -> None:
        jobs = [(f"canary/{task.id}", task) for task in self.canaries]
        groups = await manager.groups(jobs, replace(self.sampling, temperature=0.0), attempts=1)
        judged = [(group, rows[-1], rows[-1].reward) for group in groups for rows in group.attempts]
        rewards = [reward for _, _, reward in judged if reward is not None]
        if rewards:
            findings.metrics["canary"] = {"reward": fmean(rewards)}
            findings.exhibits[CANARY_REWARD] = [
                Exhibit(reward, group, row) for group, row, reward in judged if reward is not None
            ]


async def _judge_again(
    second_reward: Reward, rows: Sequence[Trajectory], task: Task
) -> list[float | None]:
    """Return the second reward of each attempt; None if the second reward fails or is missing."""
    unjudged = [replace(row, outcome=Truncated() if row.truncated else None) for row in rows]
    try:
        outcomes = (
            list(await run_guarded(lambda: second_reward.score(unjudged, task))) if rows else []
        )
    except UserCodeFailed:
        return [None] * len(rows)
    rewards = [
        outcome.reward if isinstance(outcome, Scored | Truncated) else None for outcome in outcomes
    ]
    rewards += [None] * (len(rows) - len(rewards))
    return [
        float(reward) if reward is not None and is_finite_number(reward) else None
        for reward in rewards[: len(rows)]
    ]
