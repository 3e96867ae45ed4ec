"""Losses that many algorithms share: pure functions `(out, batch, *, options) -> (x, metrics)`.

x is minimised. It has one value per token or row (the term's level) and is not yet weighted.
Metrics are detached. They have the same level as x, and are later averaged with x's weights.

T = tokens, S = sequences (rows). Entry t of a [T] column belongs to the prediction of token t.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ratchet.batch import Batch
from ratchet.protocols import Outputs

Metrics = dict[str, Tensor]


def nll(out: Outputs, batch: Batch) -> tuple[Tensor, Metrics]:
    """Return -log p(token), the cross-entropy loss of supervised fine-tuning. Token level."""
    return -out.need("logprobs"), {}


def entropy_bonus(out: Outputs, batch: Batch) -> tuple[Tensor, Metrics]:
    """Return -H(policy), the negative entropy of each token's prediction in nats. Token level.

    H is exact over the vocabulary, under the row's sampling temperature. Minimising -H raises the
    entropy.
    """
    entropy_T = out.need("entropy")
    return -entropy_T, {"entropy": entropy_T.detach()}


def value_loss(out: Outputs, batch: Batch, *, clip: float | None = None) -> tuple[Tensor, Metrics]:
    """Return (V - returns)^2 / 2, the loss of PPO's critic. Token level.

    With `clip` = c, V' is V clipped to within c of the values before the update, and the loss is
    max((V - returns)^2, (V' - returns)^2) / 2: value clipping (arXiv:2005.12729, section 3).
    Metric `clipped`: the share of tokens where the clipped error is the larger one.
    """
    values_T = out.need("values")
    returns_T = batch.need("returns")
    errors_T = (values_T - returns_T).square()
    metrics = {"value": values_T.detach(), "return": returns_T}
    if clip is not None:
        old_values_T = batch.need("values")
        clipped_values_T = torch.minimum(
            torch.maximum(values_T, old_values_T - clip), old_values_T + clip
        )
        clipped_errors_T = (clipped_values_T - returns_T).square()
        metrics["clipped"] = (clipped_errors_T > errors_T).to(errors_T.dtype)
        errors_T = torch.maximum(errors_T, clipped_errors_T)
    return errors_T / 2, metrics


def row_mean(out: Outputs, batch: Batch, x_T: Tensor) -> Tensor:
    """Return the mean of a token column over the trainable tokens of each row. [T] -> [S]

    A row without trainable tokens gets 0. The result is differentiable.
    """
    return row_sum(out, batch, x_T) / count_trainable(out, batch).clamp(min=1)


def row_sum(out: Outputs, batch: Batch, x_T: Tensor) -> Tensor:
    """Return the sum of a token column over the trainable tokens of each row. [T] -> [S]

    The result is differentiable.
    """
    return out.sequence_sum(torch.where(batch.trainable_T, x_T, 0.0))


def count_trainable(out: Outputs, batch: Batch) -> Tensor:
    """Return the number of trainable tokens of each row, [S]."""
    return out.sequence_sum(batch.trainable_T.to(batch.rewards_S.dtype))
