"""Measure the held-out loss of a scoring model, such as a reward model.

T = tokens, S = sequences.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from ratchet.algorithms.base import Algorithm, AlgoState
from ratchet.data.packing import pack
from ratchet.experience.rollout.manager import RolloutManager
from ratchet.experience.sources.rollouts import StreamSource
from ratchet.protocols import Learner, Outputs, needed
from ratchet.types import Task


@dataclass(frozen=True)
class ScoreLoss:
    """The result of an evaluation of scores.

    Attributes:
        tasks: Number of tasks scored.
        loss: The algorithm's loss on them.
        measured: The metrics of the loss terms, such as accuracy and margin.
        correlation: Pearson's correlation of scores and rewards; None without rewards, or if either
            is constant.
    """

    tasks: int
    loss: float
    measured: Mapping[str, float]
    correlation: float | None

    def numbers(self) -> dict[str, float]:
        numbers = {"loss": self.loss, **self.measured}
        if self.correlation is not None:
            numbers["correlation"] = self.correlation
        return numbers


class ScoreEvaluator:
    """An evaluation that computes the training loss on held-out tasks.

    source: Makes groups from the tasks, as in training.
    """

    managers: Sequence[RolloutManager] = ()

    def __init__(
        self, learner: Learner, source: StreamSource, tasks: Sequence[Task], algorithm: Algorithm
    ) -> None:
        self.learner = learner
        self.source = source
        self.tasks = tasks
        self.algorithm = algorithm
        self.measures = f"scores of {algorithm.source}"

    async def run(self) -> ScoreLoss:
        """Score all held-out tasks and return their loss.

        Raises:
            DataError: A held-out task lacks data that the algorithm trains on.
        """
        groups = await self.source.make(
            [(f"eval/{task.id}", task) for task in self.tasks], version=0
        )
        batch = self.algorithm.weigh(pack(groups), AlgoState())
        terms = self.algorithm.losses["policy"]
        scored = await self.learner.score(batch, sorted(needed(terms)))
        columns = {name: column.double() for name, column in scored.items()}
        outputs = Outputs(sequence_sum=batch.sequence_sum, **columns)
        loss, measured = 0.0, dict[str, float]()
        for term in terms:
            value, metrics = term(outputs, batch)
            loss += float(value)
            measured |= {name: float(metric) for name, metric in metrics.items()}
        judged_S = batch.train_S & batch.scored_S
        correlation = (
            compute_correlation(columns["scores"][judged_S], batch.rewards_S[judged_S])
            if "scores" in columns
            else None
        )
        return ScoreLoss(len(groups), loss, measured, correlation)


def compute_correlation(a: Tensor, b: Tensor) -> float | None:
    """Return Pearson's correlation, or None if either is constant or empty."""
    if len(a) == 0 or bool((a == a[0]).all()) or bool((b == b[0]).all()):
        return None
    a, b = a - a.mean(), b - b.mean()
    return float((a * b).sum() / (a.square().sum() * b.square().sum()).sqrt())
