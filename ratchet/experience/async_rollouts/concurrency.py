"""How many groups may be under way: as many as keep the learner from waiting, as long as what that
costs is within bounds."""

from __future__ import annotations

import math

RATE = 1 / 8  # of a step's groups, which the number changes by in a step at most


class Concurrency:
    """per_step: groups of a step, the fewest that may be under way. most: what the bound on
    staleness leaves.

    staleness: versions by which the tokens of a step's new groups may be older in the mean than the
    weights that they train. mismatch: the KL from sampler to learner in a step, nats a token.
    Either may be None, and is not looked at then.

    After each step the number goes up where the learner had to wait and both are below their
    targets, and down where one is above. By how much is in proportion to how far the nearer target,
    or the one that is most exceeded, is away: what begins now is trained on a few steps later, so a
    controller that took more of the difference at once would swing.
    """

    def __init__(
        self,
        *,
        per_step: int,
        most: int,
        staleness: float | None = None,
        mismatch: float | None = None,
    ) -> None:
        self.per_step, self.most, self.staleness, self.mismatch = (
            per_step,
            most,
            staleness,
            mismatch,
        )
        self.level = float(per_step)  # between per_step and most

    @property
    def groups(self) -> int:
        """That may be under way, or ready and not yet trained on."""
        return round(self.level)

    def heed(self, *, waited: bool, staleness: float, mismatch: float | None = None) -> None:
        """After a step. waited: whether the learner had to wait for its groups. A step in which
        something was not measured that has a target changes nothing."""
        rooms = [_room(self.staleness, staleness), _room(self.mismatch, mismatch)]
        if any(room is not None and math.isnan(room) for room in rooms):
            return
        room = min(room for room in rooms if room is not None)
        if room < 0 or waited:
            level = self.level + RATE * self.per_step * max(-1.0, room)
            self.level = min(max(level, float(self.per_step)), float(self.most))


def _room(target: float | None, measured: float | None) -> float | None:
    """The share of the target that is left, below 0 where it is exceeded."""
    if target is None:
        return None
    return math.nan if measured is None else 1 - measured / target
