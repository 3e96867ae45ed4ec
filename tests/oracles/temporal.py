"""Advantages along a row: generalised advantage estimation, returns by turn, GiGPO, and
distillation on the policy's tokens.

A row's steps are its trained tokens in order; whatever an environment wrote between two of them is
part of the state.
"""

from __future__ import annotations

import math

from oracles.advantages import group_relative, mean_of, on_tokens, standardised
from oracles.ragged import Ragged, Row


def attempts(rows: list[Row]) -> list[list[int]]:
    """Indices of the rows of each attempt, in order: the stretches of a history that forked."""
    found: dict[tuple[str, int, str], list[int]] = {}
    for i, row in enumerate(rows):
        found.setdefault((row.group, row.attempt, row.use), []).append(i)
    return list(found.values())


def step_rewards(rows: list[Row]) -> list[float]:
    """One reward per step of an attempt. A turn's own reward falls on its last step; the last step
    of all pays what is left, so that the whole is the attempt's reward and its dense rewards."""
    rewards, paid = [], []
    for row in rows:
        own = [row.token_rewards[t] if row.token_rewards else 0.0 for t in row.steps]
        for span in row.spans:
            if span.reward is not None:
                own[row.steps.index(span.end - 1)] += span.reward
                paid.append(span.reward)
        rewards += own
    if rewards:
        assert rows[-1].reward is not None
        rewards[-1] += rows[-1].reward - math.fsum(paid)
    return rewards


def gae(
    rows: list[Row],
    *,
    gamma: float,
    lam: float,
    value_lam: float | None,
    length_alpha: float | None,
) -> tuple[Ragged, Ragged]:
    """arXiv:1506.02438, eq. 11-16, as the double sum A_t = sum_l (gamma lam)^l delta_{t+l}:
    (advantages, returns)."""
    advantages = [[0.0] * len(row.tokens) for row in rows]
    returns = [[0.0] * len(row.tokens) for row in rows]
    for own in attempts(rows):
        steps = [(i, t) for i in own for t in rows[i].steps]
        values = [rows[i].values[t] for i, t in steps]
        last = rows[own[-1]]
        if not last.learns_from_reward or not steps:
            for i, t in steps:
                # nothing to learn: the target is what is predicted already
                returns[i][t] = rows[i].values[t]
            continue
        rewards = step_rewards([rows[i] for i in own])
        after = [*values[1:], last.bootstrap if last.truncated else 0.0]
        deltas = [r + gamma * nxt - v for r, nxt, v in zip(rewards, after, values, strict=True)]
        policy_lam = lam if length_alpha is None else max(0.0, 1 - 1 / (length_alpha * len(steps)))
        for k, (i, t) in enumerate(steps):
            advantages[i][t] = _discounted(deltas[k:], gamma * policy_lam)
            returns[i][t] = (
                _discounted(deltas[k:], gamma * (lam if value_lam is None else value_lam))
                + values[k]
            )
    return advantages, returns


def _discounted(numbers: list[float], by: float) -> float:
    return math.fsum(by**k * x for k, x in enumerate(numbers))


def turns_of(rows: list[Row], gamma: float) -> list[tuple[str, list[tuple[int, int]], str, float]]:
    """(group, its steps as (row, place), its state, its discounted return) of each turn of a judged
    training attempt that has a step."""
    found = []
    for attempt in attempts(rows):
        if not rows[attempt[0]].learns_from_reward:
            continue
        steps = [(i, t) for i in attempt for t in rows[i].steps]
        rewards = dict(zip(steps, step_rewards([rows[i] for i in attempt]), strict=True))
        spans = [(i, span) for i in attempt for span in rows[i].spans]
        by_turn = [
            [(i, t) for t in rows[i].steps if span.start <= t < span.end] for i, span in spans
        ]
        earned = [math.fsum(rewards[step] for step in own) for own in by_turn]
        for j, (own, (i, span)) in enumerate(zip(by_turn, spans, strict=True)):
            if own:
                found.append((rows[i].group, own, span.state, _discounted(earned[j:], gamma)))
    return found


def turn_returns(rows: list[Row], *, gamma: float, baseline: str) -> Ragged:
    out = [[0.0] * len(row.tokens) for row in rows]
    turns = turns_of(rows, gamma)
    for group, steps, _, value in turns:
        peers = [g for other, _, _, g in turns if other == group]
        equal = min(peers) == max(peers)
        for i, t in steps:
            out[i][t] = value if baseline == "none" else 0.0 if equal else value - mean_of(peers)
    return out


def gigpo(
    rows: list[Row], *, gamma: float, step_weight: float, scale: str, epsilon: float
) -> Ragged:
    """arXiv:2505.10978, eq. 3-9: the attempt's advantage in its group, and the turn's among all
    turns of the group that started in the same state."""
    out = on_tokens(rows, group_relative(rows, scale=scale, epsilon=epsilon))
    meetings: dict[tuple[str, str], list[tuple[list[tuple[int, int]], float]]] = {}
    for group, steps, state, value in turns_of(rows, gamma):
        if state:
            meetings.setdefault((group, state), []).append((steps, value))
    for met in meetings.values():
        relative = standardised([value for _, value in met], epsilon=epsilon, divide=scale == "std")
        for (steps, _), a in zip(met, relative, strict=True):
            for i, t in steps:
                out[i][t] += step_weight * a
    return out


def on_policy_distillation(rows: list[Row]) -> Ragged:
    """A sample of the negative reverse KL at each step: log p_teacher - log p_policy of the token
    that was drawn."""
    return [
        [
            row.teacher_logprobs[t] - row.old_logprobs[t] if trains else 0.0
            for t, trains in enumerate(row.mask)
        ]
        for row in rows
    ]
