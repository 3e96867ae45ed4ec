"""The seed that a full run has today: one a day, so that a few days show them all."""

from __future__ import annotations

from support.rotation import count_days


def seed_of_today(seeds: int) -> int:
    """Return one of 0 to seeds - 1, the next one each day (UTC)."""
    return count_days() % seeds
