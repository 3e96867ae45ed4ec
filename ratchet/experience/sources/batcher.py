"""Draw the groups of a step from a source, and stop a run in which most attempts fail."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence

from ratchet.errors import TrainingError, link_symptom
from ratchet.experience.rollout.failures import describe_failures
from ratchet.protocols import Source
from ratchet.types import Failed, Group

log = logging.getLogger(__name__)

WINDOW = 8  # steps over which failures are counted, so that a run survives an outage of one step


class Batcher:
    """A reader of a stage's source. It returns the groups of each step and counts failures.

    Args:
        source: Draws groups.
        groups_per_step: Number of groups of a step.
        max_failed_share: Maximum share of failures among the attempts of the last WINDOW steps.
            Above it the run stops and shows the most frequent failure.
        post_process: Returns a step's groups as they train (`Environment.post_process`).
    """

    def __init__(
        self,
        source: Source,
        *,
        groups_per_step: int,
        max_failed_share: float = 0.5,
        post_process: Callable[[Sequence[Group]], Sequence[Group]] = list,
    ) -> None:
        self.source = source
        self.groups_per_step = groups_per_step
        self.max_failed_share = max_failed_share
        self.post_process = post_process
        # For each step, its failures and its number of attempts.
        self._recent: deque[tuple[list[Failed], int]] = deque(maxlen=WINDOW)
        self._warned = False

    async def next(self, step: int) -> list[Group]:
        """Return the groups of a step.

        Raises:
            TrainingError: Too many attempts failed.
        """
        groups = await self.source.draw(self.groups_per_step, version=step)
        # Replayed groups (`n_uses` above 0) were counted when they were new.
        outcomes = [
            attempt[-1].outcome
            for group in groups
            if not group.n_uses
            for attempt in group.attempts
        ]
        failures = [outcome for outcome in outcomes if isinstance(outcome, Failed)]
        self._recent.append((failures, len(outcomes)))
        if failures:
            self._report(step, failures, len(outcomes))
        return list(self.post_process(groups))

    def ack(self, groups: Sequence[Group], step: int) -> None:
        self.source.ack([group.id for group in groups], step)

    def measure(self, groups: Sequence[Group]) -> dict[str, float]:
        return dict(self.source.measure(groups))

    def adapt(self, groups: Sequence[Group], step: int, measured: Mapping[str, float]) -> None:
        """Pass the results of the step to a source that adapts to them."""
        self.source.adapt(groups, step, measured)

    def _report(self, step: int, failures: Sequence[Failed], n_attempts: int) -> None:
        """Raise TrainingError if too many attempts failed recently; otherwise log the failures."""
        recent_failures = [failure for failed, _ in self._recent for failure in failed]
        n_recent_attempts = sum(n_step_attempts for _, n_step_attempts in self._recent)
        if len(recent_failures) > self.max_failed_share * n_recent_attempts:
            period = (
                f"steps {step + 2 - len(self._recent)} to {step + 1}"
                if len(self._recent) > 1
                else f"step {step + 1}"
            )
            raise TrainingError(
                f"{period}: {len(recent_failures)} of {n_recent_attempts} attempts failed "
                f"(rollouts.max_failed_share is {self.max_failed_share:.0%}); "
                f"{describe_failures(recent_failures)}\n{link_symptom('attempts-fail')}"
            )
        # The terminal shows one warning. For later steps, the metrics have the counts, and the log
        # has the most frequent failure.
        level = logging.INFO if self._warned else logging.WARNING
        log.log(
            level,
            "step %d: %d of %d attempts failed and are left out; %s",
            step + 1,
            len(failures),
            n_attempts,
            describe_failures(failures),
        )
        self._warned = True
