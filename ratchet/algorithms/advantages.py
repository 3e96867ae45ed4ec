"""Advantage estimators: pure functions from a packed batch to one with `advantages` filled.

T = tokens, S = sequences, A = attempts, G = groups. All statistics are float64 and count *attempts*: an attempt whose history
forked is several sequences, but one draw from the policy.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from ratchet.algorithms.base import AlgoState
from ratchet.batch import Batch
from ratchet.errors import DataError


def group_relative(
    batch: Batch,
    state: AlgoState,
    *,
    scale: Literal["std", "none"] = "std",
    epsilon: float = 1e-6,
    equal_rewards: Literal["keep", "drop"] = "keep",
) -> Batch:
    """A = (r - mean(r of the group)) / (std(r of the group) + epsilon), the same for every trainable token of a sequence.

    GRPO (arXiv:2402.03300) section 4.1.2, with the sample standard deviation (ddof 1); `scale="none"` drops the division:
    Dr. GRPO (arXiv:2503.20783). Only scored training attempts enter the statistics; a sequence without a score gets 0. Equal
    rewards, a lone attempt among them, give exactly 0; `equal_rewards="drop"` takes such groups out of the final mask, so that
    no term trains on them and no mean is diluted by them (the filter of DAPO, arXiv:2503.14476, section 3.2, without its
    resampling).
    """
    counted_S = batch.train_S & batch.scored_S
    attempt_S, group_A, rewards_A = _attempts(batch, counted_S)
    ones_A = torch.ones_like(rewards_A)
    count_G = _sum_by(group_A, ones_A, batch.n_groups)
    mean_G = _sum_by(group_A, rewards_A, batch.n_groups) / count_G.clamp(min=1)
    centred_A = rewards_A - mean_G[group_A]
    low_G = torch.full_like(mean_G, torch.inf).scatter_reduce(0, group_A, rewards_A, "amin")
    high_G = torch.full_like(mean_G, -torch.inf).scatter_reduce(0, group_A, rewards_A, "amax")
    equal_G = high_G <= low_G
    if scale == "std":
        variance_G = _sum_by(group_A, centred_A.square(), batch.n_groups) / (count_G - 1).clamp(min=1)
        centred_A = centred_A / (variance_G.sqrt() + epsilon)[group_A]
    # Rounding leaves the mean of equal rewards a hair off; a division by a tiny std would blow that up into a signal.
    advantages_A = torch.where(equal_G[group_A], 0.0, centred_A)
    advantages_S = torch.zeros(batch.n_sequences, dtype=torch.float64)
    advantages_S[counted_S] = advantages_A[attempt_S]
    if equal_rewards == "drop":
        kept_S = ~equal_G[batch.group_S]
        batch = replace(batch, train_S=batch.train_S & kept_S, trainable_T=batch.trainable_T & kept_S[batch.sequence_T])
    return spread(batch, advantages_S)


def spread(batch: Batch, advantages_S: Tensor) -> Batch:
    """One advantage a sequence, given to each of its trainable tokens; 0 elsewhere."""
    advantages_T = torch.where(batch.trainable_T, advantages_S[batch.sequence_T], 0.0)
    return batch.fill_sequences(advantages_S=advantages_S).fill_tokens(advantages=advantages_T)


def _attempts(batch: Batch, counted_S: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(attempt index of each counted sequence, group [A], reward [A]) over distinct (group, attempt) pairs.

    Raises DataError where the sequences of one attempt carry different rewards: there would be no telling which is its own.
    """
    keys = torch.stack([batch.group_S[counted_S], batch.attempt_S[counted_S]], dim=1)
    pairs, attempt_S = torch.unique(keys, dim=0, return_inverse=True)
    rewards_S = batch.rewards_S[counted_S]
    rewards_A = torch.zeros(len(pairs), dtype=torch.float64)
    rewards_A[attempt_S] = rewards_S
    differs = rewards_A[attempt_S] != rewards_S
    if bool(differs.any()):
        group, attempt = keys[differs][0].tolist()
        raise DataError(
            f"group {batch.group_ids[group]}: the sequences of attempt {attempt} carry different rewards; "
            "an attempt has one reward, however many sequences its history forked into"
        )
    return attempt_S, pairs[:, 0], rewards_A


def _sum_by(index: Tensor, x: Tensor, size: int) -> Tensor:
    return torch.zeros(size, dtype=x.dtype).index_add(0, index, x)
