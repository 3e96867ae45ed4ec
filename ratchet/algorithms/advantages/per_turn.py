"""Advantage estimators that use the order of an attempt's steps: GAE, returns by turn, and GiGPO.

The steps of an attempt are the trainable tokens of its rows, in order. Tokens that an environment
wrote between them are skipped.

T = tokens, S = sequences, A = attempts, N = steps (trainable tokens), L = largest number of steps
of an attempt, U = policy turns with at least one step, K = those of the U turns with a state key.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ratchet.algorithms.advantages.common import (
    AttemptSteps,
    collect_attempts,
    discounted_sums,
    index_attempts,
    normalise_by,
    sum_by,
)
from ratchet.algorithms.base import AlgoState
from ratchet.algorithms.config.advantages import Scale
from ratchet.batch import MALFORMED_CALLS, MALFORMED_THINKING, Batch


def compute_step_rewards(batch: Batch) -> Tensor:
    """Return the reward of every step, float64 [T], and 0 for all other tokens.

    A step's reward is the sum of:
    - its token reward, if the batch has token rewards;
    - the turn's reward, if the step is the last of a turn that has one;
    - the attempt's reward minus the rewards of its turns, if the step is the attempt's last.

    So without token rewards the steps of an attempt sum to the attempt's reward. An attempt without
    a reward gets token rewards only.
    """
    mask_T = batch.trainable_T
    attempt_S, size = index_attempts(batch)
    turn_rewards_T = torch.where(mask_T, batch.turn_rewards_T.nan_to_num(0.0), 0.0)
    turn_rewards_A = sum_by(attempt_S, batch.sequence_sum(turn_rewards_T), size)
    token_N = mask_T.nonzero()[:, 0]
    sequence_T = batch.sequence_T
    last_token_A = torch.full((size,), -1).scatter_reduce(
        0, attempt_S[sequence_T[token_N]], token_N, "amax"
    )
    last_tokens = last_token_A[last_token_A >= 0]  # of the attempts that have a step
    rewards_T = torch.where(batch.scored_S[sequence_T], turn_rewards_T, 0.0)
    remainder_S = torch.where(batch.scored_S, batch.rewards_S - turn_rewards_A[attempt_S], 0.0)
    rewards_T[last_tokens] += remainder_S[sequence_T[last_tokens]]
    if batch.has("token_rewards"):
        rewards_T = rewards_T + torch.where(mask_T, batch.need("token_rewards"), 0.0)
    return rewards_T


def gae(
    batch: Batch,
    state: AlgoState,
    *,
    gamma: float = 1.0,
    lam: float = 0.95,
    value_lam: float | None = None,
    length_alpha: float | None = None,
    bootstrap: bool = True,
) -> Batch:
    """Fill `advantages` and `returns` by generalised advantage estimation (GAE).

    Over the steps k of an attempt: delta_k = r_k + gamma V_{k+1} - V_k and
    A_k = delta_k + gamma lam A_{k+1}. GAE (arXiv:1506.02438) eq. 11 to 16. `returns` = A + V is the
    critic's target, with `value_lam` as the lambda of A (default: lam). The column `valued` marks
    the steps that train the critic.

    After the last step of a truncated attempt, V is `bootstrap_values`, because the episode would
    have gone on. After any other attempt it is 0. Set `bootstrap=False` if a limit is part of the
    task, so that reaching it ends the episode: V is then 0 after truncated attempts too. A row that
    was not scored gets advantage 0, and its values as returns.

    The metric "value/explained_variance" tells how good the critic was before its update: 1 -
    Var(returns - values) / Var(returns) over the steps of scored rows. It is 1 for a perfect
    critic, 0 for one that is no better than a constant, and missing if all returns are equal.

    `length_alpha` = a is the length-adaptive GAE of VAPO (arXiv:2504.05118): for an attempt of l
    steps, the policy's lambda is 1 - 1 / (a l), but at least 0.
    """
    steps = AttemptSteps.from_batch(batch)
    values_AL = steps.pad(batch.need("values").double())
    end_S = torch.where(batch.truncated_S & bootstrap, batch.need("bootstrap_values").double(), 0.0)
    deltas_AL = (
        steps.pad(compute_step_rewards(batch))
        + gamma * steps.shift(values_AL, end_S[_find_last_rows(batch)])
        - values_AL
    )
    lam_A = torch.full_like(steps.count_A, lam, dtype=torch.float64)
    if length_alpha is not None:
        lam_A = (1 - 1 / (length_alpha * steps.count_A.double().clamp(min=1))).clamp(min=0)
    scored_T = batch.scored_S[batch.sequence_T]
    advantages_T = steps.unpad(discounted_sums(deltas_AL, gamma * lam_A))
    value_lam_A = torch.full_like(lam_A, lam if value_lam is None else value_lam)
    values_T = batch.need("values").double()
    returns_T = values_T + torch.where(
        scored_T, steps.unpad(discounted_sums(deltas_AL, gamma * value_lam_A)), 0.0
    )
    valued_T = batch.trainable_T & scored_T
    batch = batch.with_metrics(
        **_measure_explained_variance(values_T[valued_T], returns_T[valued_T])
    )
    advantages_T = torch.where(scored_T, advantages_T, 0.0)
    return batch.fill_tokens(advantages=advantages_T, returns=returns_T, valued=valued_T)


def _find_last_rows(batch: Batch) -> Tensor:
    """Return the index of the last sequence of each attempt, int64 [A]."""
    attempt_S, size = index_attempts(batch)
    return torch.full((size,), -1).scatter_reduce(
        0, attempt_S, torch.arange(batch.n_sequences), "amax"
    )


def _measure_explained_variance(values_N: Tensor, returns_N: Tensor) -> dict[str, float]:
    """Return the metric "value/explained_variance", or nothing if all returns are equal."""
    if len(returns_N) == 0:
        return {}
    # Returns are sums of values and advantages, so equal returns may differ by rounding errors,
    # which are no variance.
    if float(returns_N.max() - returns_N.min()) <= 1e-12 * float(
        torch.cat([values_N, returns_N]).abs().max()
    ):
        return {}
    unexplained = (returns_N - values_N).var(correction=0) / returns_N.var(correction=0)
    return {"value/explained_variance": 1 - float(unexplained)}


@dataclass(frozen=True)
class _TurnReturns:
    """The policy turns that have at least one step, and their discounted returns.

    A turn's return is the discounted sum of the attempt's step rewards from the turn's start on.
    """

    token_N: Tensor  # index in the batch of each step that lies in a turn
    turn_N: Tensor  # the turn of each of those steps
    row_U: Tensor  # the sequence of each turn
    state_U: Tensor  # the state in which each turn began; -1 if it has no state key
    returns_U: Tensor

    @classmethod
    def from_batch(cls, batch: Batch, *, gamma: float) -> _TurnReturns:
        """Return the turns of all scored attempts of a batch."""
        in_turn_T = batch.trainable_T & (batch.turn_T >= 0) & batch.scored_S[batch.sequence_T]
        token_N = in_turn_T.nonzero()[:, 0]
        sequence_N = batch.sequence_T[token_N]
        # Number the turns consecutively over all rows of an attempt.
        number_N = batch.turn_T[token_N].long() + _count_earlier_turns(batch)[sequence_N]
        keys_N = torch.stack([index_attempts(batch)[0][sequence_N], number_N], dim=1)
        # torch.unique sorts the turns by attempt, then by their number.
        keys_U, turn_N = torch.unique(keys_N, dim=0, return_inverse=True)
        rewards_U = sum_by(turn_N, compute_step_rewards(batch)[token_N], len(keys_U))
        state_U, row_U = (
            torch.zeros_like(keys_U[:, 0]).scatter(0, turn_N, x_N)
            for x_N in (batch.state_T[token_N], sequence_N)
        )
        # Accumulate returns from the last turn to the first.
        keys = keys_U.tolist()
        returns = rewards_U.tolist()
        for u in range(len(keys) - 2, -1, -1):
            attempt, turn = keys[u]
            next_attempt, next_turn = keys[u + 1]
            # A turn without a step has no entry, but still discounts by gamma.
            if next_attempt == attempt:
                returns[u] += gamma ** (next_turn - turn) * returns[u + 1]
        return cls(token_N, turn_N, row_U, state_U, torch.tensor(returns, dtype=torch.float64))

    def fill_advantages(self, batch: Batch, x_U: Tensor) -> Batch:
        """Return the batch with the value of each turn as the advantage of all its steps."""
        advantages_T = torch.zeros(batch.n_tokens, dtype=torch.float64)
        advantages_T[self.token_N] = x_U[self.turn_N]
        return batch.fill_tokens(advantages=advantages_T)


def penalise_malformed_turns(
    batch: Batch, state: AlgoState, *, calls: float | None, thinking: float | None
) -> Batch:
    """Set the advantage of malformed turns: A_t = `calls` or `thinking` for their trainable tokens.

    Other tokens keep their advantages. A turn with a malformed tool call and malformed thinking
    gets `calls`, and None leaves advantages as they are. NeMo RL, algorithms/grpo.py,
    `_apply_message_level_advantage_penalties`.

    Reports the metric "advantage/malformed_share", the share of trainable tokens whose advantage is
    set.
    """
    advantages_T = batch.need("advantages")
    set_T = torch.zeros_like(batch.trainable_T)
    for name, value in ((MALFORMED_THINKING, thinking), (MALFORMED_CALLS, calls)):
        if value is not None and batch.has(name):
            malformed_T = batch.need(name) & batch.trainable_T
            advantages_T = torch.where(malformed_T, value, advantages_T)
            set_T |= malformed_T
    share = int(set_T.sum()) / max(1, int(batch.trainable_T.sum()))
    return batch.fill_tokens(advantages=advantages_T).with_metrics(
        **{"advantage/malformed_share": share}
    )


def _count_earlier_turns(batch: Batch) -> Tensor:
    """Return the number of turns in earlier rows of each sequence's attempt, int64 [S]."""
    turns_S = torch.zeros(batch.n_sequences, dtype=torch.int64)
    turns_S = turns_S.scatter_reduce(0, batch.sequence_T, batch.turn_T.long() + 1, "amax")
    earlier: list[int] = []
    turns_so_far: dict[int, int] = {}  # by attempt
    for attempt, turns in zip(index_attempts(batch)[0].tolist(), turns_S.tolist(), strict=True):
        earlier.append(turns_so_far.get(attempt, 0))
        turns_so_far[attempt] = earlier[-1] + turns
    return torch.tensor(earlier, dtype=torch.int64)


def turn_returns(
    batch: Batch,
    state: AlgoState,
    *,
    gamma: float = 1.0,
    baseline: Literal["none", "group"] = "none",
) -> Batch:
    """Fill the discounted return of each turn: A = G_j = r_j + gamma G_{j+1} for steps of turn j.

    r_j is the sum of the turn's step rewards. The discount applies once per turn, not per token.
    `baseline="group"` subtracts the mean G over all turns of the group. This is REINFORCE with
    turns as actions (Sutton and Barto, 2nd edition, section 13.3).
    """
    turns = _TurnReturns.from_batch(batch, gamma=gamma)
    advantages_U = turns.returns_U
    if baseline == "group":
        groups = (batch.group_S[turns.row_U], batch.n_groups)
        advantages_U = normalise_by(groups, advantages_U, scale="none", epsilon=0.0)
    return turns.fill_advantages(batch, advantages_U)


def gigpo(
    batch: Batch,
    state: AlgoState,
    *,
    gamma: float = 0.95,
    step_weight: float = 1.0,
    scale: Scale = "std",
    epsilon: float = 1e-6,
) -> Batch:
    """Fill GiGPO's advantages: A = A_episode + step_weight A_step.

    GiGPO (arXiv:2505.10978) eq. 3 to 9. A_episode is the advantage of `group_relative`. The paper
    calls a turn a step: A_step is the discounted return of a turn, normalised over all turns of the
    group that began in the same state (`Turn.state_key`). A_step is 0 for turns without a state
    key, and for turns whose state occurs only once.
    """
    attempts = collect_attempts(batch)
    episode_S = attempts.to_sequences(
        normalise_by(attempts.groups, attempts.returns_A, scale=scale, epsilon=epsilon)
    )
    turns = _TurnReturns.from_batch(batch, gamma=gamma)
    step_U = torch.zeros_like(turns.returns_U)
    has_state_U = turns.state_U >= 0
    states, state_K = torch.unique(turns.state_U[has_state_U], return_inverse=True)
    step_U[has_state_U] = normalise_by(
        (state_K, len(states)), turns.returns_U[has_state_U], scale=scale, epsilon=epsilon
    )
    step_T = turns.fill_advantages(batch, step_weight * step_U).need("advantages")
    episode_T = torch.where(batch.trainable_T, episode_S[batch.sequence_T], 0.0)
    return batch.fill_tokens(advantages=step_T + episode_T)
