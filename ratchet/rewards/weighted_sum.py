"""Combine several rewards into one, their weighted sum."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from ratchet.config.base import Section
from ratchet.config.resolve import build
from ratchet.errors import ConfigError
from ratchet.protocols import Reward
from ratchet.rewards.base import as_reward, copy_task
from ratchet.types import (
    Cancelled,
    Failed,
    Outcome,
    Scored,
    Task,
    Trajectory,
    Truncated,
    Unjudged,
    is_number_not_bool,
)
from ratchet.utils.user_code import run_guarded

# The outcome of an attempt that a reward does not apply to. It is neither a reward nor a failure.
NOT_APPLICABLE = Cancelled("no reward applies to this row")


class WeightedSum(Reward):
    """A reward that is the sum of others: `sum(weights[name] * reward[name])`.

    Its named parts are the unweighted rewards by name, and their own parts as "name/part". If one
    of the rewards fails on an attempt, the attempt fails, because a sum without one of its summands
    would be another reward.
    """

    def __init__(self, rewards: Mapping[str, Reward], weights: Mapping[str, float]) -> None:
        """Raise ConfigError if rewards and weights have different names, or are empty.

        A weight that is not a finite number raises it too.
        """
        if not rewards or set(rewards) != set(weights):
            raise ConfigError(
                f"rewards {sorted(rewards)} and weights {sorted(weights)} must have the same "
                "names, at least one"
            )
        for name, weight in weights.items():
            if not is_number_not_bool(weight):
                raise ConfigError(f"weights['{name}']={weight!r:.40} is not a finite number")
        self.rewards, self.weights = dict(rewards), dict(weights)

    @property
    def compares_attempts(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return any(reward.compares_attempts for reward in self.rewards.values())

    def use_judges(self, judges: Mapping[str, Any]) -> None:
        for reward in self.rewards.values():
            reward.use_judges(judges)

    def find_answer_extractor(self, task: Task) -> Reward | None:
        """Return the first reward that extracts final answers for this task, if any."""
        return next(
            (
                extractor
                for reward in self.rewards.values()
                if (extractor := reward.find_answer_extractor(task))
            ),
            None,
        )

    async def score(self, trajectories: Sequence[Trajectory], task: Task) -> Sequence[Outcome]:
        pending = [
            run_guarded(partial(reward.score, trajectories, _isolate_task(task, reward)))
            for reward in self.rewards.values()
        ]
        outcomes_by_reward = (
            [await pending[0]] if len(pending) == 1 else await asyncio.gather(*pending)
        )
        return [self._sum(outcomes) for outcomes in zip(*outcomes_by_reward, strict=True)]

    def _sum(self, outcomes: Sequence[Outcome]) -> Outcome:
        """Return the outcome of one attempt.

        Args:
            outcomes: The attempt's outcome by each reward, in the order of `self.rewards`.
        """
        total: float | None = 0.0
        is_truncated = False
        parts: dict[str, float] = {}
        if all(outcome == NOT_APPLICABLE for outcome in outcomes):
            return NOT_APPLICABLE
        for name, outcome in zip(self.rewards, outcomes, strict=True):
            if outcome == NOT_APPLICABLE:
                continue
            if isinstance(outcome, Failed):
                return Failed(outcome.kind, f"reward '{name}': {outcome.detail}")
            if isinstance(outcome, Cancelled | Unjudged):
                return outcome
            is_truncated = is_truncated or isinstance(outcome, Truncated)
            # This reward could not judge the unfinished attempt, so the sum has no value.
            if outcome.reward is None:
                total = None
                continue
            if not math.isfinite(outcome.reward):
                return Failed("reward", f"reward '{name}' is {outcome.reward}: it must be finite")
            total = None if total is None else total + self.weights[name] * outcome.reward
            parts[name] = outcome.reward
            # A reward that is a single number has one part, under its own name.
            for part, value in outcome.parts.items():
                if part != name:
                    parts[f"{name}/{part}"] = value
        return Truncated(total, parts) if is_truncated or total is None else Scored(total, parts)


def _isolate_task(task: Task, reward: Reward) -> Task:
    """Return the task; for a class of the user a copy, which its code may change in place."""
    is_builtin = type(reward).__module__.startswith("ratchet.")
    return task if is_builtin else copy_task(task)


def compose_rewards(sections: Sequence[Section]) -> WeightedSum:
    """Return the weighted sum of the rewards that sections of a recipe describe.

    A section's `metric_name` and `weight` are the name and the weight of its reward. Raises
    ConfigError if two sections have the same name, or if there are no sections.
    """
    names = [section.metric_name for section in sections]
    if len(set(names)) < len(names):
        raise ConfigError(
            f"rewards {', '.join(names)} repeat a name: their parts would share the name. Give "
            "each name once"
        )
    sections_by_name = dict(zip(names, sections, strict=True))
    rewards = {name: as_reward(build(section), name) for name, section in sections_by_name.items()}
    return WeightedSum(
        rewards, {name: _get_weight(section) for name, section in sections_by_name.items()}
    )


def _get_weight(section: Any) -> float:
    """Return a section's `weight`: 1 for a section made in Python without the key."""
    return section.weight if "weight" in type(section).model_fields else 1.0
