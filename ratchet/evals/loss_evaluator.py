"""Measure an algorithm's own loss on held-out tasks.

T = tokens, N = trainable tokens, S = sequences.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ratchet.algorithms.base import Algorithm, AlgoState, no_advantage
from ratchet.algorithms.scoring import fill_columns
from ratchet.batch import Batch
from ratchet.data.packing import pack
from ratchet.evals.stage_evaluator import ignore_progress
from ratchet.experience.rollout.manager import RolloutManager
from ratchet.experience.sources.rollouts import StreamSource
from ratchet.protocols import Learner, Outputs, list_needed_outputs
from ratchet.types import Task

# Maximum number of tokens that are scored at a time. It limits memory, because a teacher's columns
# have up to 4,096 numbers for each token.
MAX_PART_TOKENS = 2**15


@dataclass(frozen=True)
class HeldOutLoss:
    """The loss on held-out tasks."""

    n_tasks: int
    """Number of tasks."""
    loss: float
    """The algorithm's loss on them; NaN if none of their tokens trains."""
    term_metrics: Mapping[str, float]
    """The metrics of the loss terms, such as accuracy and margin. An algorithm that learns from
    given text also has perplexity and token_accuracy."""
    correlation: float | None = None
    """Pearson's correlation of scores and rewards; None without scores or rewards, or if one of
    them is constant."""

    def get_metrics(self) -> dict[str, float]:
        metrics = {"loss": self.loss, **self.term_metrics}
        if self.correlation is not None:
            metrics["correlation"] = self.correlation
        return metrics


class LossEvaluator:
    """An evaluation that computes the training loss on held-out tasks.

    The loss is computed as in one optimizer step over all held-out tasks. It has the algorithm's
    own terms, weights and mask, and nothing is updated:

        loss = sum over terms of coef * sum_t w_t x_t

    For supervised fine-tuning, x_t = -log p(y_t | y_<t), and w_t = 1 / N on the N tokens that
    train. The loss is then the mean NLL in nats (`weighting: sequence_mean` averages within each
    row first). Two more metrics are computed from the same N tokens:

        perplexity     = exp((1 / N) sum_t -log p(y_t | y_<t))
        token_accuracy = (1 / N) sum_t [y_t is the likeliest token]

    For distillation, the loss is the divergence between teacher and student, plus `sft_coef` times
    the mean NLL if the algorithm has that term. For on-policy distillation by a policy gradient, it
    is the mean of log student - log teacher on sampled tokens, which estimates the reverse KL.

    Args:
        roles: The stage's learners. Scoring passes may read roles other than the policy.
        source: The source that makes groups from the tasks, as in training.
        managers: Rollout managers of the source. The training run closes them when it ends.
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
        # A stage takes over the last metrics of the previous stage if both measure the same
        # quantities. The stage's name prevents this: losses of two stages can't be compared.
        self.measured_quantities = frozenset({f"loss of stage {source.name}"})

    @property
    def count(self) -> int:
        return len(self.tasks)

    async def run(self, advance: Callable[[int], None] = ignore_progress) -> HeldOutLoss:
        """Score all held-out tasks and return their loss.

        Raises:
            DataError: A held-out task lacks data that the algorithm trains on.
        """
        groups = await self.source.make(
            [(f"eval/{task.id}", task) for task in self.tasks], version=0
        )
        algorithm, state = self.algorithm, AlgoState()
        # An advantage estimator needs the columns of the whole batch. Without one, columns are
        # filled part by part, which takes less memory.
        fills_each_part = algorithm.advantage is no_advantage
        batch = pack(groups)
        if not fills_each_part:
            batch = algorithm.advantage(await fill_columns(batch, algorithm, self.roles), state)
        batch = algorithm.weigh(batch, state)
        sums = _Sums()
        for part in batch.split(split_groups(batch)):
            filled_part = (
                await fill_columns(part, algorithm, self.roles) if fills_each_part else part
            )
            await self._add_part(sums, filled_part)
            advance(part.n_groups)
        has_trained_tokens = bool(batch.trainable_T.any())
        term_metrics = {
            **sums.metrics,
            **(sums.compute_text_metrics() if has_trained_tokens else {}),
        }
        correlation = (
            compute_correlation(torch.cat(sums.scores), torch.cat(sums.rewards))
            if sums.scores
            else None
        )
        return HeldOutLoss(
            len(groups), sums.loss if has_trained_tokens else math.nan, term_metrics, correlation
        )

    async def _add_part(self, sums: _Sums, part: Batch) -> None:
        """Add the loss and metrics of a part, whose loss weights are normalised over the batch."""
        terms = self.algorithm.losses["policy"]
        needs = list_needed_outputs(terms)
        # The old logprobs come from a scoring pass. Without one, the current logprobs are used.
        scored_names = needs - {"old_logprobs"} | (
            {"logprobs"} if "old_logprobs" in needs else set()
        )
        # A comparison with a teacher's likeliest tokens leaves no room for the policy's own.
        measures_likelihood = (
            self.algorithm.source == "rows" and "logprobs" in needs and "topk_logprobs" not in needs
        )
        output_names = sorted(scored_names | ({"topk_ids"} if measures_likelihood else set()))
        scored_outputs = dict(
            await self.roles["policy"].score(
                part, output_names, top_k=1 if measures_likelihood else 0
            )
        )
        if measures_likelihood:
            likeliest_T = scored_outputs.pop("topk_ids")[:, 0]
            sums.add_text(part, scored_outputs["logprobs"], likeliest_T)
        columns = {name: column.double() for name, column in scored_outputs.items()}
        if "old_logprobs" in needs:
            is_recorded = part.has("old_logprobs")
            columns["old_logprobs"] = (
                part.need("old_logprobs").double() if is_recorded else columns["logprobs"]
            )
        outputs = Outputs(sequence_sum=part.sequence_sum, **columns)
        for term in terms:
            value, metrics = term(outputs, part)
            sums.loss += float(value)
            # Metrics of the ratio of new and old probabilities are meaningless without an update.
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
        self.n_text_tokens = 0
        self.nll = 0.0
        self.n_likeliest = 0

    def add_text(self, part: Batch, logprobs_T: Tensor, likeliest_T: Tensor) -> None:
        mask_T = part.trainable_T
        self.n_text_tokens += int(mask_T.sum())
        self.nll -= float(logprobs_T[mask_T].double().sum())
        self.n_likeliest += int((likeliest_T == part.tokens_T)[mask_T].sum())

    def compute_text_metrics(self) -> dict[str, float]:
        if not self.n_text_tokens:
            return {}
        mean_nll = torch.tensor(self.nll / self.n_text_tokens, dtype=torch.float64)
        return {
            "perplexity": float(mean_nll.exp()),  # inf where `math.exp` would raise
            "token_accuracy": self.n_likeliest / self.n_text_tokens,
        }


def split_groups(batch: Batch) -> Iterator[list[int]]:
    """Yield the rows of consecutive whole groups, with at most MAX_PART_TOKENS tokens at a time.

    A group with more tokens comes alone.
    """
    rows_by_group: dict[int, list[int]] = {}
    for row, group in enumerate(batch.group_S.tolist()):
        rows_by_group.setdefault(group, []).append(row)
    part: list[int] = []
    n_part_tokens = 0
    for rows in rows_by_group.values():
        n_tokens = int(batch.lengths_S[rows].sum())
        if part and n_part_tokens + n_tokens > MAX_PART_TOKENS:
            yield part
            part, n_part_tokens = [], 0
        part += rows
        n_part_tokens += n_tokens
    if part:
        yield part


def compute_correlation(a: Tensor, b: Tensor) -> float | None:
    """Return Pearson's correlation, or None if one of the tensors is constant or empty."""
    if len(a) == 0 or bool((a == a[0]).all()) or bool((b == b[0]).all()):
        return None
    a, b = a - a.mean(), b - b.mean()
    return float((a * b).sum() / (a.square().sum() * b.square().sum()).sqrt())
