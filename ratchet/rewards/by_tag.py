"""Several domains in one run, each with its own rewards."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ratchet.rewards.compose import composed
from ratchet.rewards.config import ByTagConfig
from ratchet.types import Cancelled, Failed, Outcome, Task, Trajectory

ANY = "*"


class ByTag:
    """Hands a group to the rewards of its task's tag. Parts are logged as "tag/name", so that each domain has its own curve."""

    def __init__(self, config: ByTagConfig) -> None:
        self._domains = {tag: composed(sections) for tag, sections in config.domains.items()}

    async def score(self, trajectories: Sequence[Trajectory], task: Task) -> Sequence[Outcome]:
        """Failed("reward") for a task whose tag has no rewards."""
        reward = self._domains.get(task.tag, self._domains.get(ANY))
        if reward is None:
            known = ", ".join(sorted(self._domains))
            reason = Failed("reward", f"by_tag: task '{task.id}' has the tag '{task.tag}', and there are rewards for {known}")
            return [t.outcome if isinstance(t.outcome, Failed | Cancelled) else reason for t in trajectories]
        return [_under(task.tag, outcome) for outcome in await reward.score(trajectories, task)]


def _under(tag: str, outcome: Outcome) -> Outcome:
    if isinstance(outcome, Failed | Cancelled):
        return outcome
    return replace(outcome, parts={f"{tag}/{name}": value for name, value in outcome.parts.items()})
