"""Filters take rows out of the final mask, in numerators and denominators alike, after the estimator has seen all of them.

S = sequences, G = groups.
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from ratchet.algorithms.base import AlgoState
from ratchet.batch import Batch


def keep_rows(batch: Batch, kept_S: Tensor) -> Batch:
    return replace(batch, train_S=batch.train_S & kept_S, trainable_T=batch.trainable_T & kept_S[batch.sequence_T])


def drop_silent_groups(batch: Batch, state: AlgoState) -> Batch:
    """Groups whose advantages are all 0, as those of equal rewards, have no signal and would only dilute means over the batch
    (the filter of DAPO, arXiv:2503.14476, section 3.2, without its resampling). Of several rewards, each has to be equal."""
    loud_S = batch.sequence_sum((batch.need("advantages") != 0).double())
    return keep_rows(batch, (batch.group_sum(loud_S) > 0)[batch.group_S])


def drop_truncated(batch: Batch, state: AlgoState) -> Batch:
    """Overlong filtering of DAPO (section 3.4): an answer that was cut off says nothing about its reasoning."""
    return keep_rows(batch, ~batch.truncated_S)
