"""Held-out accuracy on pairs: how often the better of two answers scores higher, or is likelier."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from ratchet.data.packing import pack
from ratchet.experience.given import Pairs
from ratchet.experience.manager import RolloutManager
from ratchet.interfaces import Learner
from ratchet.types import Task


@dataclass(frozen=True)
class PairAccuracy:
    """pairs: compared. accuracy: share of them in which the chosen answer wins; a tie is half right, so that scores that say
    nothing are right half of the time. margin: mean difference."""

    pairs: int
    accuracy: float
    margin: float

    def numbers(self) -> dict[str, float]:
        return {"accuracy": self.accuracy, "margin": self.margin}


class PairEvaluator:
    """pairs: makes groups of two, the better answer first. column: what is compared: "scores", of a model that is trained to
    score, or "logprobs", summed over the answer."""

    managers: Sequence[RolloutManager] = ()

    def __init__(self, learner: Learner, pairs: Pairs, tasks: Sequence[Task], column: Literal["scores", "logprobs"]) -> None:
        self.learner, self.pairs, self.tasks = learner, pairs, tasks
        self.column: Literal["scores", "logprobs"] = column

    async def run(self) -> PairAccuracy:
        groups = await self.pairs.make([(f"eval/{task.id}", task) for task in self.tasks], version=0)
        batch = pack(groups)
        found = (await self.learner.score(batch, [self.column]))[self.column].double()
        scores_S = found if self.column == "scores" else batch.sequence_sum(found)
        margins_G = scores_S[0::2] - scores_S[1::2]
        right_G = (margins_G > 0).double() + (margins_G == 0).double() / 2
        return PairAccuracy(len(groups), float(right_G.mean()), float(margins_G.mean()))
