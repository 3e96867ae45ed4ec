"""Advantages along a row: generalised advantage estimation, returns by turn, GiGPO, and distillation on the policy's tokens.

A row's steps are its trained tokens in order; whatever an environment wrote between two of them is part of the state.
"""

from __future__ import annotations

import math

from oracles.advantages import group_relative, mean_of, on_tokens, standardised
from oracles.ragged import Ragged, Row


def step_rewards(row: Row) -> list[float]:
    """One reward per step. A turn's own reward falls on its last step; the last step of all pays what is left, so that
    the whole is the row's reward and its dense rewards."""
    steps = row.steps
    rewards = [row.token_rewards[t] if row.token_rewards else 0.0 for t in steps]
    paid = []
    for span in row.spans:
        if span.reward is not None:
            rewards[steps.index(span.end - 1)] += span.reward
            paid.append(span.reward)
    if steps:
        assert row.reward is not None
        rewards[-1] += row.reward - math.fsum(paid)
    return rewards


def gae(
    rows: list[Row], *, gamma: float, lam: float, value_lam: float | None, length_alpha: float | None
) -> tuple[Ragged, Ragged]:
    """arXiv:1506.02438, eq. 11-16, as the double sum A_t = sum_l (gamma lam)^l delta_{t+l}: (advantages, returns)."""
    advantages = [[0.0] * len(row.tokens) for row in rows]
    returns = [[0.0] * len(row.tokens) for row in rows]
    for i, row in enumerate(rows):
        steps = row.steps
        values = [row.values[t] for t in steps]
        if not row.learns_from_reward or not steps:
            for t in steps:
                returns[i][t] = row.values[t]  # nothing to learn: the target is what is predicted already
            continue
        rewards = step_rewards(row)
        after = [*values[1:], row.bootstrap if row.truncated else 0.0]
        deltas = [r + gamma * nxt - v for r, nxt, v in zip(rewards, after, values, strict=True)]
        policy_lam = lam if length_alpha is None else max(0.0, 1 - 1 / (length_alpha * len(steps)))
        for k, t in enumerate(steps):
            advantages[i][t] = _discounted(deltas[k:], gamma * policy_lam)
            returns[i][t] = _discounted(deltas[k:], gamma * (lam if value_lam is None else value_lam)) + values[k]
    return advantages, returns


def _discounted(numbers: list[float], by: float) -> float:
    return math.fsum(by**k * x for k, x in enumerate(numbers))


def turns_of(row: Row, gamma: float) -> list[tuple[list[int], str, float]]:
    """(its steps, its state, its discounted return) of each turn of a judged training row that has a step."""
    steps = row.steps
    rewards = dict(zip(steps, step_rewards(row), strict=True))
    by_turn = [[t for t in steps if span.start <= t < span.end] for span in row.spans]
    earned = [math.fsum(rewards[t] for t in own) for own in by_turn]
    return [
        (own, span.state, _discounted(earned[j:], gamma))
        for j, (own, span) in enumerate(zip(by_turn, row.spans, strict=True))
        if own
    ]


def turn_returns(rows: list[Row], *, gamma: float, baseline: str) -> Ragged:
    out = [[0.0] * len(row.tokens) for row in rows]
    for i, row in enumerate(rows):
        if not row.learns_from_reward:
            continue
        peers = [
            g for other in rows if other.group == row.group and other.learns_from_reward for _, _, g in turns_of(other, gamma)
        ]
        equal = bool(peers) and min(peers) == max(peers)
        for steps, _, value in turns_of(row, gamma):
            for t in steps:
                out[i][t] = value if baseline == "none" else 0.0 if equal else value - mean_of(peers)
    return out


def gigpo(rows: list[Row], *, gamma: float, step_weight: float, scale: str, epsilon: float) -> Ragged:
    """arXiv:2505.10978, eq. 3-9: the attempt's advantage in its group, and the turn's among all turns of the group that
    started in the same state."""
    out = on_tokens(rows, group_relative(rows, scale=scale, epsilon=epsilon))
    meetings: dict[tuple[str, str], list[tuple[int, list[int], float]]] = {}
    for i, row in enumerate(rows):
        if row.learns_from_reward:
            for steps, state, value in turns_of(row, gamma):
                if state:
                    meetings.setdefault((row.group, state), []).append((i, steps, value))
    for met in meetings.values():
        relative = standardised([value for _, _, value in met], epsilon=epsilon, divide=scale == "std")
        for (i, steps, _), a in zip(met, relative, strict=True):
            for t in steps:
                out[i][t] += step_weight * a
    return out


def on_policy_distillation(rows: list[Row]) -> Ragged:
    """A sample of the negative reverse KL at each step: log p_teacher - log p_policy of the token that was drawn."""
    return [
        [row.teacher_logprobs[t] - row.old_logprobs[t] if trains else 0.0 for t, trains in enumerate(row.mask)] for row in rows
    ]
