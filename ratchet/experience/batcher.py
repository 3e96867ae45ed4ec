"""Draws one step's groups from a source, and stops a run that mostly fails."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from ratchet.errors import TrainingError
from ratchet.interfaces import Source
from ratchet.types import Failed, Group

log = logging.getLogger(__name__)


class Batcher:
    """max_failed_share: of a step's attempts; above it the run stops with the first failure's detail."""

    def __init__(self, source: Source, *, groups_per_step: int, max_failed_share: float = 0.5) -> None:
        self.source, self.groups_per_step, self.max_failed_share = source, groups_per_step, max_failed_share
        self._warned = False

    async def next(self, step: int) -> list[Group]:
        groups = await self.source.draw(self.groups_per_step, version=step)
        failures = [t.outcome for group in groups for t in group.trajectories if isinstance(t.outcome, Failed)]
        attempts = sum(len(group.trajectories) for group in groups)
        if failures:
            first = f"the first: {failures[0].kind}\n{failures[0].detail.strip()}"
            share = f"step {step + 1}: {len(failures)} of {attempts} attempts failed"
            if len(failures) > self.max_failed_share * attempts:
                raise TrainingError(f"{share} (limit {self.max_failed_share:.0%}); {first}")
            # On the screen once; every step's count is in the metrics, every first traceback in the log.
            log.log(logging.INFO if self._warned else logging.WARNING, "%s and are left out; %s", share, first)
            self._warned = True
        return groups

    def ack(self, groups: Sequence[Group], step: int) -> None:
        self.source.ack([group.id for group in groups], step)
