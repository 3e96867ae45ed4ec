"""Remove rows from the final mask, and so from numerators and denominators alike.

Filters run after the estimator has seen all rows. S = sequences, G = groups.
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
    """Remove the rows outside `kept_S`, bool [S], from the final mask."""
    return replace(
        batch,
        train_S=batch.train_S & kept_S,
        trainable_T=batch.trainable_T & kept_S[batch.sequence_T],
    )


def note_signal(batch: Batch, state: AlgoState, *, transforms: Sequence[Transform]) -> Batch:
    """Fill `has_signal`, bool [S]: True in groups with an advantage other than 0 after
    `transforms`.

    The transforms see a copy of the state, and all of their result but `has_signal` is dropped.
    """
    scratch_state = AlgoState(state.step, dict(state.numbers))
    transformed = batch
    for transform in transforms:
        transformed = transform(transformed, scratch_state)
    return batch.fill_sequences(has_signal=_has_signal(transformed))


def drop_silent_groups(batch: Batch, state: AlgoState) -> Batch:
    """Remove groups without a signal, such as those of equal rewards, from the final mask.

    They would only dilute means over the batch. This is the constraint of DAPO (arXiv:2503.14476,
    eq. 8, by which neither all answers are right nor all wrong) without its resampling. The column
    `has_signal` says which groups have a signal; without that column a group has one if an
    advantage is not 0. With several rewards, all of them must be equal for a group to have none.
    Removed rows get advantage 0.
    """
    signal_S = batch.need("has_signal") if batch.has("has_signal") else _has_signal(batch)
    advantages_T = torch.where(signal_S[batch.sequence_T], batch.need("advantages"), 0.0)
    return keep_rows(batch, signal_S).fill_tokens(advantages=advantages_T)


def _has_signal(batch: Batch) -> Tensor:
    """Return bool [S]: True in groups with an advantage other than 0."""
    nonzero_S = batch.sequence_sum((batch.need("advantages") != 0).double())
    return (batch.group_sum(nonzero_S) > 0)[batch.group_S]


def drop_truncated(batch: Batch, state: AlgoState) -> Batch:
    """Remove answers that were cut off from the final mask.

    Overlong filtering of DAPO (section 3.4): an answer that was cut off says nothing about its
    reasoning. An attempt that ended at its limit of turns with a whole answer stays.
    """
    return keep_rows(batch, ~batch.cut_S)
