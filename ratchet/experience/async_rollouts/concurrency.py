"""Adapt the concurrency of asynchronous rollouts.

Enough groups are in flight that the learner does not wait, and few enough that staleness stays
below its target.
"""

from __future__ import annotations

import math

RATE = 1 / 8  # maximum change per step, as a share of groups_per_step


class ConcurrencyController:
    """A controller of the number of groups in flight.

    After each step the number falls if a measure (staleness, mismatch) exceeds its target. It rises
    if all measures are below their targets and the learner had to wait. The change is proportional
    to the smallest headroom, 1 - measure / target. Groups that begin now are trained on a few steps
    later, so a faster controller would oscillate.

    Args:
        groups_per_step: Number of groups in a step; at least as many are in flight.
        max_groups: The maximum number in flight that the staleness bound allows.
        staleness: Target for the mean staleness, in versions, of a step's new tokens. None sets no
            target.
        mismatch: Target for the KL from sampler to learner, in nats per token. None sets no target.
    """

    def __init__(
        self,
        *,
        groups_per_step: int,
        max_groups: int,
        staleness: float | None = None,
        mismatch: float | None = None,
    ) -> None:
        self.groups_per_step = groups_per_step
        self.max_groups = max_groups
        self.staleness = staleness
        self.mismatch = mismatch
        # The unrounded number of groups, between groups_per_step and max_groups.
        self.level = float(groups_per_step)

    @property
    def groups(self) -> int:
        """Return the maximum number of groups in flight or waiting to be trained on."""
        return round(self.level)

    def update(self, *, waited: bool, staleness: float, mismatch: float | None = None) -> None:
        """Adapt the number after a step.

        Nothing changes if a measure that has a target was not measured.

        Args:
            waited: True if the learner had to wait for groups.
            staleness: The mean staleness of the step's tokens.
            mismatch: The KL of the step.
        """
        headrooms = [
            _get_headroom(self.staleness, staleness),
            _get_headroom(self.mismatch, mismatch),
        ]
        if any(headroom is not None and math.isnan(headroom) for headroom in headrooms):
            return
        headroom = min(headroom for headroom in headrooms if headroom is not None)
        if headroom < 0 or waited:
            level = self.level + RATE * self.groups_per_step * max(-1.0, headroom)
            self.level = min(max(level, float(self.groups_per_step)), float(self.max_groups))


def _get_headroom(target: float | None, measured: float | None) -> float | None:
    """Return the remaining share of the target; it is negative if the target is exceeded.

    Return None without a target, and NaN if the measure of a target was not measured.
    """
    if target is None:
        return None
    return math.nan if measured is None else 1 - measured / target
