"""Judge each domain of a run by its own rewards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, ClassVar

from pydantic import Field, SerializeAsAny

from ratchet.config.base import Section
from ratchet.config.resolve import Slot
from ratchet.protocols import Reward
from ratchet.rewards.weighted_sum import compose_rewards
from ratchet.types import Cancelled, Failed, Outcome, Scored, Task, Trajectory, Truncated, Unjudged

Rewards = Annotated[tuple[SerializeAsAny[Section], ...], Slot("rewards", is_list=True)]


class ByTagConfig(Section):
    """Rewards for each domain of tasks. A task's `tag` names its domain."""

    builds: ClassVar[str] = "ratchet.rewards.by_domain:ByTag"

    domains: dict[str, Rewards] = Field(min_length=1)
    """Rewards for each tag, written as under `rewards`. The list is empty if the environment
    rewards turns. The key "*" is for all other tags."""

    def check_keys(self) -> None:
        for tag, sections in self.domains.items():
            names = [section.metric_name for section in sections]
            if len(set(names)) < len(names):
                raise ValueError(
                    f"domain '{tag}' has rewards {', '.join(names)}: give each name once"
                )


ANY_TAG = "*"


class ByTag(Reward):
    """A reward that judges a group by the rewards of its task's tag.

    Parts are logged as "tag/name", so that each domain has its own curve.
    """

    def __init__(self, config: ByTagConfig) -> None:
        self._domains = {
            tag: compose_rewards(sections) if sections else TurnRewardsOnly()
            for tag, sections in config.domains.items()
        }

    @property
    def compares_attempts(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return any(reward.compares_attempts for reward in self._domains.values())

    def use_judges(self, judges: Mapping[str, Any]) -> None:
        for reward in self._domains.values():
            reward.use_judges(judges)

    def find_answer_extractor(self, task: Task) -> Reward | None:
        reward = self._domains.get(task.tag, self._domains.get(ANY_TAG))
        return None if reward is None else reward.find_answer_extractor(task)

    async def score(self, trajectories: Sequence[Trajectory], task: Task) -> Sequence[Outcome]:
        """Return the outcomes by the rewards of the task's tag, or of "*" if the tag is not listed.

        Return Failed("reward") if there are rewards neither for the tag nor for "*".
        """
        reward = self._domains.get(task.tag, self._domains.get(ANY_TAG))
        if reward is None:
            names = ", ".join(sorted(self._domains))
            reason = Failed(
                "reward",
                f"by_tag: task '{task.id}' has the tag '{task.tag}', but there are rewards only "
                f"for {names}",
            )
            return [
                t.outcome if isinstance(t.outcome, Failed | Cancelled) else reason
                for t in trajectories
            ]
        return [
            _prefix_parts(task.tag, outcome) for outcome in await reward.score(trajectories, task)
        ]


class TurnRewardsOnly(Reward):
    """A reward that adds nothing, for a domain whose environment rewards single turns.

    It fails a finished attempt without turn rewards.
    """

    compares_attempts = False

    async def score(self, trajectories: Sequence[Trajectory], task: Task) -> Sequence[Outcome]:
        return [_keep_turn_rewards(trajectory, task) for trajectory in trajectories]


def _keep_turn_rewards(trajectory: Trajectory, task: Task) -> Outcome:
    if isinstance(trajectory.outcome, Failed | Cancelled):
        return trajectory.outcome
    if isinstance(trajectory.outcome, Truncated):
        return Truncated(0.0)
    if any(turn.reward is not None for turn in trajectory.turns):
        return Scored(0.0)
    return Failed(
        "reward",
        f"by_tag: domain '{task.tag}' has no rewards, and its environment rewarded no turn of task "
        f"'{task.id}'",
    )


def _prefix_parts(tag: str, outcome: Outcome) -> Outcome:
    if isinstance(outcome, Failed | Cancelled | Unjudged):
        return outcome
    return replace(outcome, parts={f"{tag}/{name}": value for name, value in outcome.parts.items()})
