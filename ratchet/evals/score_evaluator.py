"""Held-out loss of a model that is trained to score, on rows of the kind that it is trained on.

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
    """tasks: judged. loss: the algorithm's own. measured: what its terms measure (accuracy,
    margin). correlation: Pearson's, of the scores with the rewards that rows were given; None where
    there are none, or either is the same for all."""

    tasks: int
    loss: float
    measured: Mapping[str, float]
    correlation: float | None

    def numbers(self) -> dict[str, float]:
        more = {} if self.correlation is None else {"correlation": self.correlation}
        return {"loss": self.loss, **self.measured, **more}


class ScoreEvaluator:
    """source: makes the groups that the algorithm learns from."""

    managers: Sequence[RolloutManager] = ()

    def __init__(
        self, learner: Learner, source: StreamSource, tasks: Sequence[Task], algorithm: Algorithm
    ) -> None:
        self.learner, self.source, self.tasks, self.algorithm = learner, source, tasks, algorithm
        self.measures = f"scores of {algorithm.source}"

    async def run(self) -> ScoreLoss:
        """Raises DataError for a held-out task without what the algorithm learns from."""
        groups = await self.source.make(
            [(f"eval/{task.id}", task) for task in self.tasks], version=0
        )
        batch = self.algorithm.weigh(pack(groups), AlgoState())
        terms = self.algorithm.losses["policy"]
        needs = needed(terms)
        found = await self.learner.score(batch, sorted(needs))
        columns = {name: column.double() for name, column in found.items()}
        out = Outputs(sequence_sum=batch.sequence_sum, **columns)
        loss, measured = 0.0, dict[str, float]()
        for term in terms:
            value, metrics = term(out, batch)
            loss += float(value)
            measured |= {name: float(metric) for name, metric in metrics.items()}
        judged_S = batch.train_S & batch.scored_S
        related = (
            correlation(columns["scores"][judged_S], batch.rewards_S[judged_S])
            if "scores" in columns
            else None
        )
        return ScoreLoss(len(groups), loss, measured, related)


def correlation(a: Tensor, b: Tensor) -> float | None:
    """Pearson's, None where either is the same throughout, or has no entry."""
    if len(a) == 0 or bool((a == a[0]).all()) or bool((b == b[0]).all()):
        return None
    a, b = a - a.mean(), b - b.mean()
    return float((a * b).sum() / (a.square().sum() * b.square().sum()).sqrt())
