"""Estimators that combine other estimators, and transforms that may follow any estimator.

T = tokens, N = trainable tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from ratchet.algorithms.advantages.common import standardise
from ratchet.algorithms.base import AlgoState
from ratchet.batch import Batch

Transform = Callable[[Batch, AlgoState], Batch]


def mixture(
    batch: Batch, state: AlgoState, *, weighted_estimators: Sequence[tuple[Transform, float]]
) -> Batch:
    """Fill advantages with the weighted sum of several estimators' advantages.

    Other columns that an estimator fills, such as `returns`, are kept.
    """
    total_T = torch.zeros(batch.n_tokens, dtype=torch.float64)
    for estimator, weight in weighted_estimators:
        batch = estimator(batch, state)
        total_T = total_T + weight * batch.need("advantages")
    return batch.fill_tokens(advantages=torch.where(batch.trainable_T, total_T, 0.0))


def clip_advantages(batch: Batch, state: AlgoState, *, low: float, high: float) -> Batch:
    """Clip advantages to [low, high]."""
    return batch.fill_tokens(advantages=batch.need("advantages").clamp(low, high))


def whiten(batch: Batch, state: AlgoState, *, epsilon: float = 1e-8) -> Batch:
    """Advantage normalization: (A - mean) / (std + epsilon) over all trainable tokens of the batch.

    std has ddof 0. Equal advantages become exactly 0.
    """
    mask_T = batch.trainable_T
    advantages_T = torch.zeros(batch.n_tokens, dtype=torch.float64)
    advantages_T[mask_T] = standardise(batch.need("advantages")[mask_T], epsilon=epsilon)
    return batch.fill_tokens(advantages=advantages_T)


def pipeline(batch: Batch, state: AlgoState, *, transforms: Sequence[Transform]) -> Batch:
    """Apply the transforms in order.

    Reports the metric "advantage/zero_share", the share of trainable tokens with advantage 0. At 1
    the batch has no policy gradient.
    """
    for transform in transforms:
        batch = transform(batch, state)
    has_signal_N = batch.need("advantages")[batch.trainable_T] != 0
    return batch.with_metrics(
        **{"advantage/zero_share": 1 - int(has_signal_N.sum()) / max(1, len(has_signal_N))}
    )
