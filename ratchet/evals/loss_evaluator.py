"""Measure an algorithm's own loss on held-out tasks.

T = tokens, N = trainable tokens, S = sequences.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ratchet.algorithms.base import Algorithm, AlgoState, no_advantage
from ratchet.algorithms.scoring import fill_columns
from ratchet.batch import Batch
from ratchet.data.packing import pack
from ratchet.experience.rollout.manager import RolloutManager
from ratchet.experience.sources.rollouts import StreamSource
from ratchet.protocols import Learner, Outputs, list_needed_outputs
from ratchet.types import Task

# Tokens that are scored at a time: columns of teachers have up to 4,096 numbers for each.
PART_TOKENS = 2**15


@dataclass(frozen=True)
class HeldOutLoss:
    """The loss on held-out tasks.

    Attributes:
        tasks: Number of tasks.
        loss: The algorithm's loss on them; NaN if none of their tokens trains.
        measured: The metrics of the loss terms, such as accuracy and margin, and for the likelihood
            of given text perplexity and token_accuracy.
        correlation: Pearson's correlation of scores and rewards; None without scores or rewards, or
            if either is constant.
    """

    tasks: int
    loss: float
    measured: Mapping[str, float]
    correlation: float | None = None

    def numbers(self) -> dict[str, float]:
        numbers = {"loss": self.loss, **self.measured}
        if self.correlation is not None:
            numbers["correlation"] = self.correlation
        return numbers


class LossEvaluator:
    """An evaluation that computes the training loss on held-out tasks.

    It is the loss of one optimizer step on all of them, by the algorithm's own terms, weights and
    mask, without an update:

        loss = sum over terms of coef * sum_t w_t x_t

    Of supervised fine-tuning x_t = -log p(y_t | y_<t), and w_t = 1 / N on the N tokens that train,
    so that it is the mean NLL in nats (`weighting: sequence_mean` averages within each row first).
    Beside it stand, of the same N tokens:

        perplexity     = exp((1 / N) sum_t -log p(y_t | y_<t))
        token_accuracy = (1 / N) sum_t [y_t is the likeliest token]

    Of distillation it is the divergence between teacher and student; of a policy gradient that a
    teacher alone guides, the mean of log student - log teacher on sampled tokens.

    Args:
        roles: The stage's learners. Passes may read others than the policy.
        source: Makes groups from the tasks, as in training.
        managers: Rollout managers of the source, which are closed with the run.
    """

    def __init__(
        self,
        roles: Mapping[str, Learner],
        source: StreamSource,
        tasks: Sequence[Task],
        algorithm: Algorithm,
        managers: Sequence[RolloutManager] = (),
    ) -> None:
        self.roles = roles
        self.source = source
        self.tasks = tasks
        self.algorithm = algorithm
        self.managers = managers
        # A later stage has another loss, so its first value is never taken from this stage.
        self.measures = frozenset({f"loss of stage {source.name}"})

    async def run(self) -> HeldOutLoss:
        """Score all held-out tasks and return their loss.

        Raises:
            DataError: A held-out task lacks data that the algorithm trains on.
        """
        groups = await self.source.make(
            [(f"eval/{task.id}", task) for task in self.tasks], version=0
        )
        algorithm, state = self.algorithm, AlgoState()
        fills_later = algorithm.advantage is no_advantage
        batch = pack(groups)
        if not fills_later:
            batch = algorithm.advantage(await fill_columns(batch, algorithm, self.roles), state)
        batch = algorithm.weigh(batch, state)
        sums = _Sums()
        for part in batch.split(_split_groups(batch)):
            filled = await fill_columns(part, algorithm, self.roles) if fills_later else part
            await self._add(sums, filled)
        trains = bool(batch.trainable_T.any())
        measured = {**sums.metrics, **(sums.text_numbers() if trains else {})}
        correlation = (
            compute_correlation(torch.cat(sums.scores), torch.cat(sums.rewards))
            if sums.scores
            else None
        )
        return HeldOutLoss(len(groups), sums.loss if trains else math.nan, measured, correlation)

    async def _add(self, sums: _Sums, part: Batch) -> None:
        """Add the loss and the metrics of a part, whose weights are those of the whole."""
        terms = self.algorithm.losses["policy"]
        needs = list_needed_outputs(terms)
        # The probabilities of text before an update are those of the passes, or the present ones.
        wanted = needs - {"old_logprobs"} | ({"logprobs"} if "old_logprobs" in needs else set())
        of_text = self.algorithm.source == "rows" and "logprobs" in needs
        names = sorted(wanted | ({"topk_ids"} if of_text else set()))
        scored = dict(await self.roles["policy"].score(part, names, top_k=1 if of_text else 0))
        if of_text:
            likeliest_T = scored.pop("topk_ids")[:, 0]
            sums.add_text(part, scored["logprobs"], likeliest_T)
        columns = {name: column.double() for name, column in scored.items()}
        if "old_logprobs" in needs:
            is_recorded = part.has("old_logprobs")
            columns["old_logprobs"] = (
                part.need("old_logprobs").double() if is_recorded else columns["logprobs"]
            )
        outputs = Outputs(sequence_sum=part.sequence_sum, **columns)
        for term in terms:
            value, metrics = term(outputs, part)
            sums.loss += float(value)
            # Without an update the ratio of new and old probabilities says nothing.
            for name, metric in () if "old_logprobs" in term.needs else metrics.items():
                sums.metrics[name] = sums.metrics.get(name, 0.0) + float(metric)
        if "scores" in columns:
            judged_S = part.train_S & part.scored_S
            sums.scores.append(columns["scores"][judged_S])
            sums.rewards.append(part.rewards_S[judged_S])


class _Sums:
    """Sums over the parts of an evaluation."""

    def __init__(self) -> None:
        self.loss = 0.0
        self.metrics: dict[str, float] = {}
        self.scores: list[Tensor] = []
        self.rewards: list[Tensor] = []
        self.text_tokens = 0
        self.nll = 0.0
        self.likeliest = 0

    def add_text(self, part: Batch, logprobs_T: Tensor, likeliest_T: Tensor) -> None:
        mask_T = part.trainable_T
        self.text_tokens += int(mask_T.sum())
        self.nll -= float(logprobs_T[mask_T].double().sum())
        self.likeliest += int((likeliest_T == part.tokens_T)[mask_T].sum())

    def text_numbers(self) -> dict[str, float]:
        if not self.text_tokens:
            return {}
        mean_nll = torch.tensor(self.nll / self.text_tokens, dtype=torch.float64)
        return {
            "perplexity": float(mean_nll.exp()),  # inf where `math.exp` would raise
            "token_accuracy": self.likeliest / self.text_tokens,
        }


def _split_groups(batch: Batch) -> Iterator[list[int]]:
    """Yield the rows of consecutive whole groups with about `PART_TOKENS` tokens at a time."""
    rows: list[int] = []
    tokens, last = 0, -1
    for row, (group, length) in enumerate(
        zip(batch.group_S.tolist(), batch.lengths_S.tolist(), strict=True)
    ):
        if rows and group != last and tokens + length > PART_TOKENS:
            yield rows
            rows, tokens = [], 0
        rows.append(row)
        tokens, last = tokens + length, group
    if rows:
        yield rows


def compute_correlation(a: Tensor, b: Tensor) -> float | None:
    """Return Pearson's correlation, or None if either is constant or empty."""
    if len(a) == 0 or bool((a == a[0]).all()) or bool((b == b[0]).all()):
        return None
    a, b = a - a.mean(), b - b.mean()
    return float((a * b).sum() / (a.square().sum() * b.square().sum()).sqrt())
