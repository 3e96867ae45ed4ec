"""Penalise tool calls that could not be parsed."""

from __future__ import annotations

from typing import ClassVar

from ratchet.config.base import Section
from ratchet.errors import DataError
from ratchet.rewards.base import PerTrajectory
from ratchet.types import Task, Trajectory


class MalformedToolCallsConfig(Section):
    """A penalty for tool calls that could not be parsed; `weight` is the cost of each."""

    builds: ClassVar[str] = "ratchet.rewards.answers.malformed_calls:MalformedToolCalls"


METRIC_NAME = "malformed_tool_calls"  # a metric of attempts that are offered tools


class MalformedToolCalls(PerTrajectory):
    """A reward of minus the number of malformed tool calls in all turns of the attempt.

    An attempt that was cut off is judged like any other.
    """

    name = METRIC_NAME

    def __init__(self, config: MalformedToolCallsConfig) -> None:
        self.config = config

    def judge(self, trajectory: Trajectory, task: Task) -> float:
        """Return minus the number of malformed calls, 0 if no tools were offered.

        Raises DataError for text that was not played as an attempt: its calls were not counted.
        """
        if not trajectory.metrics:
            raise DataError(
                "this is text and not a played attempt, so its tool calls were not counted: leave "
                "this reward out"
            )
        return -float(trajectory.metrics.get(METRIC_NAME, 0.0))
