"""Several domains in one run, each with its own rewards."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ratchet.protocols import HasFinalAnswers
from ratchet.rewards.base import voter
from ratchet.rewards.config import ByTagConfig
from ratchet.rewards.weighted_sum import composed
from ratchet.types import Cancelled, Failed, Outcome, Scored, Task, Trajectory, Truncated, Unjudged

ANY = "*"


class ByTag:
    """Hands a group to the rewards of its task's tag. Parts are logged as "tag/name", so that each
    domain has its own curve."""

    def __init__(self, config: ByTagConfig) -> None:
        self._domains = {
            tag: composed(sections) if sections else OwnSteps()
            for tag, sections in config.domains.items()
        }

    @property
    def together(self) -> bool:
        return any(reward.together for reward in self._domains.values())

    def voter(self, task: Task) -> HasFinalAnswers | None:
        return voter(self._domains.get(task.tag, self._domains.get(ANY)), task)

    async def score(self, trajectories: Sequence[Trajectory], task: Task) -> Sequence[Outcome]:
        """Failed("reward") for a task whose tag has no rewards."""
        reward = self._domains.get(task.tag, self._domains.get(ANY))
        if reward is None:
            names = ", ".join(sorted(self._domains))
            reason = Failed(
                "reward",
                f"by_tag: task '{task.id}' has the tag '{task.tag}', and there are rewards for "
                f"{names}",
            )
            return [
                t.outcome if isinstance(t.outcome, Failed | Cancelled) else reason
                for t in trajectories
            ]
        return [_under(task.tag, outcome) for outcome in await reward.score(trajectories, task)]


class OwnSteps:
    """The reward of a domain whose environment judges turn by turn: it adds nothing."""

    together = False

    async def score(self, trajectories: Sequence[Trajectory], task: Task) -> Sequence[Outcome]:
        return [_nothing_more(trajectory, task) for trajectory in trajectories]


def _nothing_more(trajectory: Trajectory, task: Task) -> Outcome:
    if isinstance(trajectory.outcome, Failed | Cancelled):
        return trajectory.outcome
    if isinstance(trajectory.outcome, Truncated):
        return Truncated(0.0)
    if any(turn.reward is not None for turn in trajectory.turns):
        return Scored(0.0)
    return Failed(
        "reward",
        f"by_tag: domain '{task.tag}' has no rewards, and its environment gave none at task "
        f"'{task.id}'",
    )


def _under(tag: str, outcome: Outcome) -> Outcome:
    if isinstance(outcome, Failed | Cancelled | Unjudged):
        return outcome
    return replace(outcome, parts={f"{tag}/{name}": value for name, value in outcome.parts.items()})
