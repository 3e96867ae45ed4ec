"""Losses that many algorithms share: pure functions `(out, batch, *, options) -> (x, metrics)`.

x is minimised: one value per token or row (the term's level), not yet weighted. T = tokens. Entry t
of a [T] column belongs to the prediction of token t. Metrics are detached, at the level of x, and
weighted like it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ratchet.batch import Batch
from ratchet.protocols import Outputs

Metrics = dict[str, Tensor]


def nll(out: Outputs, batch: Batch) -> tuple[Tensor, Metrics]:
    """Return -log p(token): maximum likelihood, as in supervised fine-tuning. Token level."""
    return -out.need("logprobs"), {}


def entropy_bonus(out: Outputs, batch: Batch) -> tuple[Tensor, Metrics]:
    """Return -H(policy at token t), exact over the vocabulary, at the row's temperature. [T].

    Minimising it raises entropy.
    """
    entropy_T = out.need("entropy")
    return -entropy_T, {"entropy": entropy_T.detach()}


def value_loss(out: Outputs, batch: Batch, *, clip: float | None = None) -> tuple[Tensor, Metrics]:
    """Return (V - returns)^2 / 2, the loss of PPO's critic. Token level.

    With `clip` = c it is the larger of that and the same for V kept within c of the values before
    the update (https://arxiv.org/abs/2005.12729, section 3, "value function clipping"). Metric
    `clipped`: the share of tokens whose value the clip stops.
    """
    values_T = out.need("values")
    returns_T = batch.need("returns")
    errors_T = (values_T - returns_T).square()
    metrics = {"value": values_T.detach(), "return": returns_T}
    if clip is not None:
        old_T = batch.need("values")
        clipped_T = torch.minimum(torch.maximum(values_T, old_T - clip), old_T + clip)
        clipped_errors_T = (clipped_T - returns_T).square()
        metrics["clipped"] = (clipped_errors_T > errors_T).to(errors_T.dtype)
        errors_T = torch.maximum(errors_T, clipped_errors_T)
    return errors_T / 2, metrics


def row_mean(out: Outputs, batch: Batch, x_T: Tensor) -> Tensor:
    """Return the mean of a token column over the trainable tokens of each row.

    A row without trainable tokens gets 0. [T] -> [S], differentiable.
    """
    return row_sum(out, batch, x_T) / trainable_counts(out, batch).clamp(min=1)


def row_sum(out: Outputs, batch: Batch, x_T: Tensor) -> Tensor:
    """Return the sum of a token column over each row's trainable tokens.

    [T] -> [S], differentiable.
    """
    return out.sequence_sum(torch.where(batch.trainable_T, x_T, 0.0))


def trainable_counts(out: Outputs, batch: Batch) -> Tensor:
    """Return the number of trainable tokens of each row, [S]."""
    return out.sequence_sum(batch.trainable_T.to(batch.rewards_S.dtype))
