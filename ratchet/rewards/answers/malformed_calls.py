"""Tool calls that could not be read cost something."""

from __future__ import annotations

from typing import ClassVar

from ratchet.config.base import Section
from ratchet.errors import DataError
from ratchet.rewards.base import PerTrajectory
from ratchet.types import Task, Trajectory


class MalformedToolCallsConfig(Section):
    """Minus the number of tool calls in the attempt that could not be read; `weight` is what each
    of them costs."""

    builds: ClassVar[str] = "ratchet.rewards.answers.malformed_calls:MalformedToolCalls"


COUNT = "malformed_tool_calls"  # the metric of an attempt to which tools were offered


class MalformedToolCalls(PerTrajectory):
    """Minus their number, over all turns of the attempt. One that was cut off is judged as it
    stands."""

    name = COUNT

    def __init__(self, config: MalformedToolCallsConfig) -> None:
        self.config = config

    def judge(self, trajectory: Trajectory, task: Task) -> float:
        """Return 0 if no tools were offered. Raises DataError for given text, whose calls were not
        counted."""
        if not trajectory.metrics:
            raise DataError(
                "this is text, not an attempt that was played: its tool calls were not counted; "
                "leave this reward out"
            )
        return -float(trajectory.metrics.get(COUNT, 0.0))
