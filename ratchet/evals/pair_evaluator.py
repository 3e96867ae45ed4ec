"""Measure held-out accuracy: the share of preference pairs whose chosen answer is likelier.

T = tokens, S = sequences, G = pairs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from ratchet.data.packing import pack
from ratchet.evals.loss_evaluator import split_groups
from ratchet.evals.stage_evaluator import ignore_progress
from ratchet.experience.rollout.manager import RolloutManager
from ratchet.experience.sources.offline import PairSource
from ratchet.protocols import Learner
from ratchet.types import Task


@dataclass(frozen=True)
class PairAccuracy:
    """The result of an evaluation on pairs."""

    n_pairs: int
    """Number of compared pairs."""
    accuracy: float
    """Share of pairs whose chosen answer is likelier; a tie counts one half."""
    margin: float
    """Mean over pairs of log p(chosen) - log p(rejected), summed over tokens, in nats."""

    def get_metrics(self) -> dict[str, float]:
        return {"accuracy": self.accuracy, "margin": self.margin}


class PairEvaluator:
    """An evaluator that compares the likelihood of two existing answers to each held-out task.

    Args:
        learner: The policy, which scores the answers.
        source: The source of groups of two answers, the chosen one first.
        tasks: The held-out tasks.
    """

    managers: Sequence[RolloutManager] = ()
    measured_quantities = frozenset({"likelier answers"})

    def __init__(self, learner: Learner, source: PairSource, tasks: Sequence[Task]) -> None:
        self.learner = learner
        self.source = source
        self.tasks = tasks

    @property
    def count(self) -> int:
        return len(self.tasks)

    async def run(self, advance: Callable[[int], None] = ignore_progress) -> PairAccuracy:
        """Score all pairs with the learner and return their accuracy."""
        groups = await self.source.make(
            [(f"eval/{task.id}", task) for task in self.tasks], version=0
        )
        batch = pack(groups)
        logprobs_by_part = []
        for part in batch.split(split_groups(batch)):
            logprobs_T = (await self.learner.score(part, ["logprobs"]))["logprobs"].double()
            logprobs_by_part.append(part.sequence_sum(logprobs_T))
            advance(part.n_groups)
        logprobs_S = torch.cat(logprobs_by_part)
        # Sequences alternate between the chosen and the rejected answer of each pair.
        margins_G = logprobs_S[0::2] - logprobs_S[1::2]
        right_G = (margins_G > 0).double() + (margins_G == 0).double() / 2
        return PairAccuracy(len(groups), float(right_G.mean()), float(margins_G.mean()))
