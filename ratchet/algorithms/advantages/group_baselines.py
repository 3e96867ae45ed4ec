"""Advantage estimators with a group or batch baseline: GRPO, RLOO, OPO, ReMax, REINFORCE++, GDPO.

The advantage of an attempt is its return R minus a baseline (REINFORCE++: one advantage per token).
R is the reward of the attempt plus its token rewards, if it has any. Sequences without a reward and
sequences that don't train get advantage 0, and do not count in any statistic.

A = attempts, S = sequences, T = tokens, G = groups.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor

from ratchet.algorithms.advantages.common import (
    Attempts,
    AttemptSteps,
    broadcast_to_tokens,
    collect_attempts,
    count_by,
    discounted_sums,
    is_equal_by,
    mean_by,
    normalise_by,
    put_all_in_one_bin,
    standardise,
    std_by,
    sum_by,
)
from ratchet.algorithms.base import AlgoState
from ratchet.algorithms.config.advantages import Scale
from ratchet.algorithms.filters import keep_rows
from ratchet.batch import Batch
from ratchet.errors import ConfigError

KNOWN_PART = "known_part/"  # state: begins the names of parts that a batch has had


def group_relative(
    batch: Batch,
    state: AlgoState,
    *,
    scale: Literal["std", "batch_std", "none"] = "std",
    epsilon: float = 1e-6,
) -> Batch:
    """Fill GRPO's advantages: A = (R - mean(R of the group)) / (std(R of the group) + epsilon).

    Every trainable token of an attempt gets the attempt's advantage. GRPO (arXiv:2402.03300)
    section 4.1.2, with the sample standard deviation (ddof 1). `scale="none"` leaves out the
    division: Dr. GRPO (arXiv:2503.20783). `scale="batch_std"` divides by the standard deviation of
    R over the batch, so that groups of almost equal returns are not amplified: LitePPO
    (arXiv:2508.08221). A is exactly 0 in groups of equal returns and in groups of one attempt.
    """
    attempts = collect_attempts(batch)
    returns_A = attempts.returns_A
    group_scale = "std" if scale == "std" else "none"
    advantages_A = normalise_by(attempts.groups, returns_A, scale=group_scale, epsilon=epsilon)
    if scale == "batch_std" and len(returns_A):
        advantages_A = advantages_A / (std_by(put_all_in_one_bin(returns_A), returns_A) + epsilon)
    return broadcast_to_tokens(batch, attempts.to_sequences(advantages_A))


def rloo(batch: Batch, state: AlgoState, *, scale: Scale = "none", epsilon: float = 1e-6) -> Batch:
    """Fill leave-one-out advantages: A_i = R_i - mean of R over the other attempts of the group.

    RLOO (arXiv:2402.14740) section 2.3. If a group has only one attempt, it gets 0. scale="std"
    divides by the group's standard deviation (ddof 1) + epsilon. This division needs three attempts
    or more: with two, the size of A does not depend on the returns.
    """
    attempts = collect_attempts(batch)
    returns_A = attempts.returns_A
    n_others_A = (count_by(attempts.groups)[attempts.group_A] - 1).clamp(min=1)
    total_A = sum_by(attempts.group_A, returns_A, batch.n_groups)[attempts.group_A]
    advantages_A = returns_A - (total_A - returns_A) / n_others_A
    if scale == "std":
        advantages_A = (
            advantages_A / (std_by(attempts.groups, returns_A) + epsilon)[attempts.group_A]
        )
    return broadcast_to_tokens(batch, _zero_equal_groups(attempts, advantages_A))


def opo(batch: Batch, state: AlgoState) -> Batch:
    """Fill OPO's advantages: A_i = R_i - sum_j(l_j R_j) / sum_j(l_j), over attempts j of the group.

    l_j is the number of trainable tokens of attempt j. If gradients grow with the length of an
    answer, this baseline minimises their variance. OPO (arXiv:2505.23585) eq. 7.
    """
    attempts = collect_attempts(batch)
    lengths_A = attempts.sum_sequences(batch.sequence_sum(batch.trainable_T.double()))
    total_G = sum_by(attempts.group_A, lengths_A, batch.n_groups)
    weighted_G = sum_by(attempts.group_A, lengths_A * attempts.returns_A, batch.n_groups)
    baseline_G = weighted_G / total_G.clamp(min=1)
    return broadcast_to_tokens(
        batch, _zero_equal_groups(attempts, attempts.returns_A - baseline_G[attempts.group_A])
    )


def _zero_equal_groups(attempts: Attempts, advantages_A: Tensor) -> Tensor:
    """Return the advantage of each sequence, with exactly 0 in groups of equal returns. [A] -> [S]

    Without this rule, rounding would leave tiny advantages in those groups.
    """
    has_equal_returns_A = is_equal_by(attempts.groups, attempts.returns_A)[attempts.group_A]
    return attempts.to_sequences(torch.where(has_equal_returns_A, 0.0, advantages_A))


def remax(batch: Batch, state: AlgoState) -> Batch:
    """Fill ReMax's advantages: A_i = R_i - reward of the group's greedy attempt.

    The greedy attempt is the row with use="baseline". ReMax (arXiv:2310.10505) eq. 5. A group whose
    greedy attempt was not scored has no baseline, so its rows are removed from the final mask.
    """
    attempts = collect_attempts(batch)
    greedy_S = batch.baseline_S & batch.scored_S
    baseline_G = mean_by((batch.group_S[greedy_S], batch.n_groups), batch.rewards_S[greedy_S])
    has_baseline_G = count_by((batch.group_S[greedy_S], batch.n_groups)) > 0
    advantages_A = attempts.returns_A - baseline_G[attempts.group_A]
    return broadcast_to_tokens(
        keep_rows(batch, has_baseline_G[batch.group_S]), attempts.to_sequences(advantages_A)
    )


def reinforce_pp(
    batch: Batch,
    state: AlgoState,
    *,
    baseline: Literal["none", "group"] = "none",
    epsilon: float = 1e-8,
) -> Batch:
    """Fill REINFORCE++'s advantages: A_t = (G_t - mean(G)) / (std(G) + epsilon).

    G_t is the attempt's reward plus the token rewards from token t on. Mean and std are over the
    trainable tokens of all scored attempts (ddof 0). REINFORCE++ (arXiv:2501.03262) eq. 8 to 10.
    `baseline="group"` first subtracts the group's mean from the reward. If all G are equal, A is
    exactly 0.
    """
    attempts = collect_attempts(batch)
    rewards_A = attempts.rewards_A
    if baseline == "group":
        rewards_A = normalise_by(attempts.groups, rewards_A, scale="none", epsilon=0.0)
    returns_T = attempts.to_sequences(rewards_A)[batch.sequence_T]
    if batch.has("token_rewards"):
        steps = AttemptSteps.from_batch(batch)
        rewards_to_go_AL = discounted_sums(
            steps.pad(batch.need("token_rewards")), torch.ones(len(steps.count_A)).double()
        )
        returns_T = returns_T + steps.unpad(rewards_to_go_AL)
    is_scored_T = batch.trainable_T & attempts.is_counted_S[batch.sequence_T]
    advantages_T = torch.zeros_like(returns_T)
    advantages_T[is_scored_T] = standardise(returns_T[is_scored_T], epsilon=epsilon)
    return batch.fill_tokens(advantages=advantages_T)


def gdpo(
    batch: Batch,
    state: AlgoState,
    *,
    weights: Mapping[str, float] | None = None,
    epsilon: float = 1e-6,
) -> Batch:
    """Fill GDPO's advantages: normalise each named part of the reward by itself, then their sum.

    Each part is normalised within its group, as in `group_relative`. So a part of small scale or
    spread keeps its signal. The weighted sum of the parts is then normalised over the whole batch
    (ddof 1). An attempt that lacks a part gets 0 for it. GDPO (arXiv:2601.05242).

    weights: weight of each part, by name; default: 1 for every part.

    Raises ConfigError if the rewards have no parts, or if no batch so far has a part that `weights`
    names.
    """
    attempts = collect_attempts(batch)
    known_names = record_parts(batch, state)
    if batch.n_sequences:
        require_parts(known_names, weights)
    total_A = torch.zeros_like(attempts.rewards_A)
    for name, weight in (weights or dict.fromkeys(list_parts(batch), 1.0)).items():
        if not batch.has(f"reward/{name}"):
            continue
        part_A = torch.full_like(total_A, torch.nan)
        part_A[attempts.attempt_R] = batch.need(f"reward/{name}")[attempts.is_counted_S]
        has_part_A = ~part_A.isnan()
        groups = (attempts.group_A[has_part_A], batch.n_groups)
        total_A[has_part_A] += weight * normalise_by(
            groups, part_A[has_part_A], scale="std", epsilon=epsilon
        )
    # Each part sums to 0 over its group, so the mean over the batch differs from 0 by rounding
    # errors alone. A total of 0 must stay exactly 0.
    normalised_A = normalise_by(put_all_in_one_bin(total_A), total_A, scale="std", epsilon=epsilon)
    advantages_A = torch.where(total_A == 0, 0.0, normalised_A)
    return broadcast_to_tokens(batch, attempts.to_sequences(advantages_A))


def list_parts(batch: Batch) -> list[str]:
    """Return the names of the reward's parts that a row of the batch has."""
    prefix = "reward/"
    return [name.removeprefix(prefix) for name in batch.sequence_columns if name.startswith(prefix)]


def record_parts(batch: Batch, state: AlgoState) -> list[str]:
    """Record the names of the batch's parts of the reward in `state`, and return all recorded.

    A part may belong to some tasks only, of which a small batch may have none.
    """
    state.numbers |= {f"{KNOWN_PART}{name}": 1.0 for name in list_parts(batch)}
    return [name.removeprefix(KNOWN_PART) for name in state.numbers if name.startswith(KNOWN_PART)]


def require_parts(names: list[str], weights: Mapping[str, float] | None) -> None:
    """Raise ConfigError if a reward part named in `weights` is missing, or there are no parts."""
    missing = sorted(set(weights or {}) - set(names))
    if missing or not names:
        available = (
            f"the rewards have the parts {', '.join(names)}"
            if names
            else "the rewards have no named parts"
        )
        required = f"weights name {', '.join(missing)}" if missing else "parts are needed"
        raise ConfigError(
            f"{required}, but {available}: use names of the stage's rewards, or of the parts that "
            "they return; if only some tasks have such a part, raise batch_size"
        )
