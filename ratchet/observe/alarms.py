"""Warns while a run goes on that its rewards teach nothing, are no numbers, or fail."""

from __future__ import annotations

import logging
from collections.abc import Mapping

logger = logging.getLogger(__name__)

ROLLOUT = "rollout/"


class RewardAlarms:
    """An observer of a run: called with each step's metrics, in which None stands for a number that was not finite.

    Each alarm is raised when it begins, and again only after it has ended: a run of a week doesn't fill its log.
    """

    def __init__(self, identical_steps: int = 10) -> None:
        """identical_steps: for how many steps in a row all rewards may be the same before that is worth a warning."""
        self.identical_steps = identical_steps
        self._identical = 0
        self._raised: set[str] = set()

    def __call__(self, step: int, metrics: Mapping[str, float | None]) -> None:
        numbers = {name.rpartition(ROLLOUT)[2]: value for name, value in metrics.items() if ROLLOUT in f"/{name}"}
        rewards = {name: value for name, value in numbers.items() if name == "reward" or name.startswith("reward/")}
        if not rewards and "failed/reward" not in numbers:
            return  # nothing was judged
        # Of parts too: those that differ can teach though their sums are equal.
        spreads = [value for name, value in numbers.items() if name == "reward_std" or name.startswith("reward_std/")]
        self._identical = self._identical + 1 if spreads and not any(value != 0.0 for value in spreads) else 0
        self._alarm(
            "identical",
            self._identical >= self.identical_steps,
            f"step {step}: all rewards have been {rewards.get('reward')} for {self._identical} steps, which teaches nothing: "
            "look at a few answers (is their format what the reward reads? are the tasks too easy, or too hard?)",
        )
        # A mean that is no number, beside its note "reward/nan"
        broken = [name for name, value in rewards.items() if value is None]
        self._alarm(
            "nan", bool(broken), f"step {step}: {', '.join(broken)} is not finite: an attempt's reward is NaN or infinite"
        )
        failed = numbers.get("failed/reward") or 0.0
        self._alarm(
            "failed",
            failed > 0,
            f"step {step}: {failed:.0f} attempts could not be judged, and do not count: a reward raised, or gave no finite "
            "number, or one outside its declared bounds",
        )

    def _alarm(self, name: str, on: bool, message: str) -> None:
        if on and name not in self._raised:
            logger.warning(message)
        (self._raised.add if on else self._raised.discard)(name)
