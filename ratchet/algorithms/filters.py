"""Filters take rows out of the final mask, in numerators and denominators alike, after the
estimator has seen all of them.

S = sequences, G = groups.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ratchet.algorithms.advantages.compose import Transform
from ratchet.algorithms.base import AlgoState
from ratchet.batch import Batch


def keep_rows(batch: Batch, kept_S: Tensor) -> Batch:
    return replace(
        batch,
        train_S=batch.train_S & kept_S,
        trainable_T=batch.trainable_T & kept_S[batch.sequence_T],
    )


def note_signal(batch: Batch, state: AlgoState, *, transforms: Sequence[Transform]) -> Batch:
    """Fill `has_signal`, bool [S]: True in groups with an advantage other than 0 after
    `transforms`.

    The transforms see a copy of the state; of the batch that they return nothing else is kept.
    """
    scratch, judged = AlgoState(state.step, dict(state.numbers)), batch
    for transform in transforms:
        judged = transform(judged, scratch)
    return batch.fill_sequences(has_signal=_with_signal(judged))


def drop_silent_groups(batch: Batch, state: AlgoState) -> Batch:
    """Take groups without a signal, as those of equal rewards, out of the final mask.

    They would only dilute means over the batch. This is the constraint of DAPO (arXiv:2503.14476,
    eq. 8: not all answers right, not all wrong) without its resampling. A group has a signal where
    the column `has_signal` says so, or without that column where an advantage is not 0. Of several
    rewards, each has to be equal. What is dropped has advantages of 0.
    """
    signal_S = batch.need("has_signal") if batch.has("has_signal") else _with_signal(batch)
    advantages_T = torch.where(signal_S[batch.sequence_T], batch.need("advantages"), 0.0)
    return keep_rows(batch, signal_S).fill_tokens(advantages=advantages_T)


def _with_signal(batch: Batch) -> Tensor:
    """True for the sequences of groups with an advantage other than 0. bool [S]"""
    loud_S = batch.sequence_sum((batch.need("advantages") != 0).double())
    return (batch.group_sum(loud_S) > 0)[batch.group_S]


def drop_truncated(batch: Batch, state: AlgoState) -> Batch:
    """Overlong filtering of DAPO (section 3.4): an answer that was cut off says nothing about its
    reasoning.

    An attempt that ended at its limit of turns, behind a whole answer, stays.
    """
    return keep_rows(batch, ~batch.cut_S)
