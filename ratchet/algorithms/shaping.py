"""Reward shaping: pure functions that change rewards before advantages are estimated.

They change the rewards of all scored rows, including rows with use="baseline". S = sequences
(rows), A = attempts, |y| = number of policy tokens of an attempt, over all its rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from ratchet.algorithms.advantages.common import (
    collect_attempts,
    index_attempts,
    mean_by,
    put_all_in_one_bin,
    std_by,
    sum_by,
)
from ratchet.algorithms.advantages.group_baselines import record_parts, require_parts
from ratchet.algorithms.base import AlgoState
from ratchet.batch import Batch

# Name of the reward part that is the sum of the turns' rewards.
ENVIRONMENT = "environment"


def count_answer_tokens(batch: Batch) -> Tensor:
    """Return |y| of each row's attempt, float64 [S]."""
    attempt_S, size = index_attempts(batch)
    return sum_by(attempt_S, batch.sequence_sum((batch.turn_T >= 0).double()), size)[attempt_S]


def copy_judged_rewards(batch: Batch, state: AlgoState) -> Batch:
    """Copy the unshaped rewards to the column `judged_rewards` [S].

    `positive_mean` reads it to know if an answer was right.
    """
    return batch.fill_sequences(judged_rewards=batch.rewards_S)


def overlong_penalty(
    batch: Batch, state: AlgoState, *, max_length: int, buffer: int, factor: float = 1.0
) -> Batch:
    """Add factor * p to the reward: DAPO's soft overlong penalty.

    p is 0 for up to max_length - buffer tokens, falls linearly to -1 at max_length tokens, and
    stays at -1 beyond. DAPO (arXiv:2503.14476) eq. 13.
    """
    excess_S = (count_answer_tokens(batch) - (max_length - buffer)) / buffer
    return _replace_rewards(batch, batch.rewards_S - factor * excess_S.clamp(0, 1))


def stop_properly(batch: Batch, state: AlgoState, *, coef: float) -> Batch:
    """Set the reward r of attempts whose last answer was cut off to min(r, coef * r).

    With 0 <= coef < 1, a positive reward shrinks and a negative reward stays.
    """
    reduced_S = torch.minimum(batch.rewards_S, coef * batch.rewards_S)
    return _replace_rewards(batch, torch.where(batch.cut_S, reduced_S, batch.rewards_S))


def length_penalty(batch: Batch, state: AlgoState, *, coef: float, free: int = 0) -> Batch:
    """Subtract coef * max(0, |y| - free) from the reward."""
    return _replace_rewards(
        batch, batch.rewards_S - coef * (count_answer_tokens(batch) - free).clamp(min=0)
    )


def effort_length(
    batch: Batch,
    state: AlgoState,
    *,
    max_length: int,
    bonus: float = 1.0,
    penalty: float = 1.0,
    tags: Sequence[str] = (),
) -> Batch:
    """Set the reward r to r + r max(x, 0) + penalty min(x, 0), x = min(1, bonus (1 - |y| / L)).

    L is max_length. Rows whose task has none of `tags` keep r; without tags, all rows change.
    Source: NeMo RL 7ea279a, `effort_levels` (low_weight is bonus, low_penalty penalty, low_ub L).
    """
    x_S = (bonus * (1 - count_answer_tokens(batch) / max_length)).clamp(max=1)
    shaped_S = batch.rewards_S * (1 + x_S.clamp(min=0)) + penalty * x_S.clamp(max=0)
    if tags:
        chosen = [i for i, tag in enumerate(batch.tags) if tag in tags]
        applies_S = torch.isin(batch.tag_S, batch.tag_S.new_tensor(chosen))
        shaped_S = torch.where(applies_S, shaped_S, batch.rewards_S)
    return _replace_rewards(batch, shaped_S)


def scale_rewards(batch: Batch, state: AlgoState, *, factor: float, shift: float = 0.0) -> Batch:
    """Set the reward of each attempt to factor * reward + shift.

    The rewards of turns are multiplied by the factor too; the last step of an attempt gets the
    shift (see `compute_step_rewards`).
    """
    return replace(
        _replace_rewards(batch, factor * batch.rewards_S + shift),
        turn_rewards_T=factor * batch.turn_rewards_T,
    )


def clip_rewards(
    batch: Batch, state: AlgoState, *, low: float | None = None, high: float | None = None
) -> Batch:
    """Clip the reward of each attempt to [low, high]. None: no bound.

    The rewards of turns do not change. The last step of an attempt gets the remainder (see
    `compute_step_rewards`), so the steps still sum to the attempt's reward.
    """
    return _replace_rewards(batch, batch.rewards_S.clamp(low, high))


def component_weights(batch: Batch, state: AlgoState, *, weights: Mapping[str, float]) -> Batch:
    """Set the reward to the sum of weight * part over the named parts of the reward.

    A part that a row lacks counts as 0. The rewards of turns are multiplied by the weight of the
    part "environment", or by 0 if `weights` does not name it. Raises ConfigError if no row of
    this batch or an earlier one has a part that `weights` names.
    """
    if not batch.n_sequences:
        return batch
    require_parts(record_parts(batch, state), weights)
    parts = [
        weight * batch.need(f"reward/{name}").nan_to_num(0.0)
        for name, weight in weights.items()
        if batch.has(f"reward/{name}")
    ]
    weighted = replace(batch, turn_rewards_T=weights.get(ENVIRONMENT, 0.0) * batch.turn_rewards_T)
    return _replace_rewards(weighted, sum(parts, torch.zeros_like(batch.rewards_S)))


def normalise_rewards(
    batch: Batch,
    state: AlgoState,
    *,
    over: Literal["group", "batch", "running"],
    center: bool = True,
    epsilon: float = 1e-6,
) -> Batch:
    """Set the reward to (r - mean) / (std + epsilon), ddof 1.

    Args:
        over: the statistics cover the scored training attempts of the row's group, of the batch, or
            of all batches so far (Welford, in `state`).
        center: if False, subtract no mean.

    If the standard deviation is 0, rewards are only centred. The rewards of turns are divided by
    the same divisor, but no mean is subtracted from them: the attempt's last step gets the
    remainder.
    """
    attempts = collect_attempts(batch)
    rewards_A = attempts.rewards_A
    if over == "running":
        mean, std = _update_running(state, rewards_A)
        mean_S = torch.full_like(batch.rewards_S, mean)
        std_S = torch.full_like(batch.rewards_S, std)
    else:
        bins = attempts.groups
        bin_S = batch.group_S
        if over == "batch":
            bins = put_all_in_one_bin(rewards_A)
            bin_S = torch.zeros_like(batch.group_S)
        mean_S = mean_by(bins, rewards_A)[bin_S]
        std_S = std_by(bins, rewards_A)[bin_S]
    divisor_S = torch.where(std_S > 0, std_S + epsilon, 1.0)
    scaled = replace(batch, turn_rewards_T=batch.turn_rewards_T / divisor_S[batch.sequence_T])
    return _replace_rewards(scaled, (batch.rewards_S - (mean_S if center else 0.0)) / divisor_S)


def _update_running(state: AlgoState, rewards_A: Tensor) -> tuple[float, float]:
    """Return (mean, std) of all rewards so far, by Welford's update.

    Rewards are added one by one, so that the std of equal rewards is exactly 0. "m2" is the sum of
    squared differences from the mean.
    """
    count, mean, m2 = (state.numbers.get(f"reward_{name}", 0.0) for name in ("count", "mean", "m2"))
    for reward in rewards_A.tolist():
        count += 1
        difference = reward - mean
        mean += difference / count
        m2 += difference * (reward - mean)
    state.numbers |= {"reward_count": count, "reward_mean": mean, "reward_m2": m2}
    return mean, (m2 / (count - 1)) ** 0.5 if count > 1 else 0.0


def _replace_rewards(batch: Batch, rewards_S: Tensor) -> Batch:
    """Return the batch with these rewards in scored rows, and NaN in all others."""
    return replace(batch, rewards_S=torch.where(batch.scored_S, rewards_S, torch.nan))
