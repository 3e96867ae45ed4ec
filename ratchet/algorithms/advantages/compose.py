"""Estimators made of others, and what may follow any of them. T = tokens, N = trainable tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from ratchet.algorithms.advantages.common import standardised
from ratchet.algorithms.base import AlgoState
from ratchet.batch import Batch

Transform = Callable[[Batch, AlgoState], Batch]


def mixture(batch: Batch, state: AlgoState, *, parts: Sequence[tuple[Transform, float]]) -> Batch:
    """A = sum of weight * A of each part. Other columns that a part fills (`returns`) stay."""
    total_T = torch.zeros(batch.n_tokens, dtype=torch.float64)
    for estimator, weight in parts:
        batch = estimator(batch, state)
        total_T = total_T + weight * batch.need("advantages")
    return batch.fill_tokens(advantages=torch.where(batch.trainable_T, total_T, 0.0))


def clip_advantages(batch: Batch, state: AlgoState, *, limit: float) -> Batch:
    """A into [-limit, limit]."""
    return batch.fill_tokens(advantages=batch.need("advantages").clamp(-limit, limit))


def whiten(batch: Batch, state: AlgoState, *, epsilon: float = 1e-8) -> Batch:
    """(A - mean) / (std + epsilon) over all trainable tokens of the batch (ddof 0); equal ones give
    exactly 0."""
    mask_T = batch.trainable_T
    advantages_T = torch.zeros(batch.n_tokens, dtype=torch.float64)
    advantages_T[mask_T] = standardised(batch.need("advantages")[mask_T], epsilon=epsilon)
    return batch.fill_tokens(advantages=advantages_T)


def pipeline(batch: Batch, state: AlgoState, *, transforms: Sequence[Transform]) -> Batch:
    """One after the other. Measures "advantage/zero_share" of the trainable tokens: at 1 the batch
    teaches nothing."""
    for transform in transforms:
        batch = transform(batch, state)
    teaches_N = batch.need("advantages")[batch.trainable_T] != 0
    return batch.note(**{"advantage/zero_share": 1 - int(teaches_N.sum()) / max(1, len(teaches_N))})
