"""Evaluate a stage in one or several ways at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from ratchet.evals.results import EvalResults
from ratchet.experience.rollout.manager import RolloutManager


class EvaluationResult(Protocol):
    """The result of an evaluation of answers, of preference pairs, or of a loss."""

    def get_metrics(self) -> dict[str, float]:
        """Return the metrics by name, without the prefix eval/."""
        ...


def ignore_progress(count: int) -> None:
    """Do nothing with the number of things that were done."""


class StageEvaluator(Protocol):
    """An evaluator of the weights that a stage trains.

    Attributes:
        managers: Rollout managers to close with the run.
        count: The number of attempts, pairs or rows that an evaluation works on.
        measured_quantities: The names of the measured quantities. If the previous stage's evaluator
            measured them too, a stage begins with the last metrics of that evaluator.
    """

    @property
    def managers(self) -> Sequence[RolloutManager]: ...
    @property
    def measured_quantities(self) -> frozenset[str]: ...
    @property
    def count(self) -> int: ...
    async def run(self, advance: Callable[[int], None] = ignore_progress) -> EvaluationResult:
        """Evaluate, and call `advance` with the number of things that were just done."""
        ...


@dataclass(frozen=True)
class CombinedResult:
    """The results of several evaluators, whose metrics have different names."""

    parts: tuple[EvaluationResult, ...]

    def get_metrics(self) -> dict[str, float]:
        return {name: value for part in self.parts for name, value in part.get_metrics().items()}


@dataclass(frozen=True)
class CombinedEvaluator:
    """Evaluators that run one after another."""

    parts: tuple[StageEvaluator, ...]

    @property
    def managers(self) -> Sequence[RolloutManager]:
        return [manager for part in self.parts for manager in part.managers]

    @property
    def measured_quantities(self) -> frozenset[str]:
        return frozenset[str]().union(*(part.measured_quantities for part in self.parts))

    @property
    def count(self) -> int:
        return sum(part.count for part in self.parts)

    async def run(self, advance: Callable[[int], None] = ignore_progress) -> CombinedResult:
        return CombinedResult(tuple([await part.run(advance) for part in self.parts]))


def list_parts(result: EvaluationResult) -> Sequence[EvaluationResult]:
    """Return the results of the single evaluators."""
    return result.parts if isinstance(result, CombinedResult) else (result,)


def list_answer_results(result: EvaluationResult) -> list[EvalResults]:
    """Return the results that hold answers of the policy. Only these get a report."""
    return [part for part in list_parts(result) if isinstance(part, EvalResults)]
