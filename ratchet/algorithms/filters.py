"""Filters take rows out of the final mask, in numerators and denominators alike, after the estimator has seen all of them.

S = sequences, G = groups.
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from ratchet.algorithms.advantages.common import attempts_of, equal_by
from ratchet.algorithms.base import AlgoState
from ratchet.batch import Batch


def keep_rows(batch: Batch, kept_S: Tensor) -> Batch:
    return replace(batch, train_S=batch.train_S & kept_S, trainable_T=batch.trainable_T & kept_S[batch.sequence_T])


def drop_equal_rewards(batch: Batch, state: AlgoState) -> Batch:
    """Groups whose attempts all earned the same have no group-relative signal, and would only dilute means over the batch (the
    filter of DAPO, arXiv:2503.14476, section 3.2, without its resampling)."""
    attempts = attempts_of(batch)
    return keep_rows(batch, ~equal_by(attempts.groups, attempts.returns_A)[batch.group_S])


def drop_truncated(batch: Batch, state: AlgoState) -> Batch:
    """Overlong filtering of DAPO (section 3.4): an answer that was cut off says nothing about its reasoning."""
    return keep_rows(batch, ~batch.truncated_S)
