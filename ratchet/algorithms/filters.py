"""Filters: remove rows from the final mask, so that the loss's numerator and denominator skip them.

Filters run after the advantage estimator, which uses all rows. S = sequences, G = groups.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ratchet.algorithms.advantages.common import collect_attempts, count_by, mean_by
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


def fill_has_signal(batch: Batch, state: AlgoState, *, transforms: Sequence[Transform]) -> Batch:
    """Fill `has_signal`, bool [S]: True if `transforms` give the group any advantage other than 0.

    The transforms run on copies of the batch and of the state, which are then dropped.
    """
    scratch_state = AlgoState(state.step, dict(state.numbers))
    transformed = batch
    for transform in transforms:
        transformed = transform(transformed, scratch_state)
    return batch.fill_sequences(has_signal=_has_signal(transformed))


def drop_groups_without_signal(batch: Batch, state: AlgoState) -> Batch:
    """Remove groups without a signal, such as those of equal rewards, from the final mask.

    They would only dilute means over the batch. This is dynamic sampling of DAPO
    (arXiv:2503.14476, eq. 8) without its resampling: groups whose answers are all right or all
    wrong do not train.

    A group has a signal if any of its advantages is not 0. If the batch has the column
    `has_signal`, the column decides instead. With gdpo, which normalises each part of the reward by
    itself, a group lacks a signal if each part is equal over all attempts of the group. Removed
    rows get advantage 0.
    """
    signal_S = batch.need("has_signal") if batch.has("has_signal") else _has_signal(batch)
    return _keep_groups(batch, signal_S)


def drop_by_mean_reward(batch: Batch, state: AlgoState, *, low: float, high: float) -> Batch:
    """Remove groups from the final mask unless low < mean reward < high.

    The mean is that of the column `judged_rewards`, over the scored training attempts of the group.
    It tells how difficult a prompt is for the policy. A group without such attempts stays. Removed
    rows get advantage 0.
    """
    attempts = collect_attempts(replace(batch, rewards_S=batch.need("judged_rewards")))
    mean_G = mean_by(attempts.groups, attempts.rewards_A)
    is_kept_G = ((mean_G > low) & (mean_G < high)) | (count_by(attempts.groups) == 0)
    return _keep_groups(batch, is_kept_G[batch.group_S])


def _keep_groups(batch: Batch, kept_S: Tensor) -> Batch:
    """Remove the rows outside `kept_S` from the final mask, and set their advantages to 0."""
    advantages_T = torch.where(kept_S[batch.sequence_T], batch.need("advantages"), 0.0)
    return keep_rows(batch, kept_S).fill_tokens(advantages=advantages_T)


def _has_signal(batch: Batch) -> Tensor:
    """Return bool [S]: True in groups with an advantage other than 0."""
    nonzero_S = batch.sequence_sum((batch.need("advantages") != 0).double())
    return (batch.group_sum(nonzero_S) > 0)[batch.group_S]


def drop_truncated(batch: Batch, state: AlgoState) -> Batch:
    """Remove attempts whose last answer was cut off by a token limit from the final mask.

    This is overlong filtering of DAPO (arXiv:2503.14476, section 3.4): the reward of a cut-off
    answer does not tell if its reasoning was right. An attempt that reached its limit of turns
    stays if its last answer is complete.
    """
    return keep_rows(batch, ~batch.cut_S)
