"""What shaping makes of rewards: one number a row, None where the row has no reward."""

from __future__ import annotations

import math
from dataclasses import replace

from oracles.advantages import attempt_rewards, mean_of, std_of
from oracles.ragged import Row, in_order

Rewards = list[float | None]


def written(rows: list[Row], row: Row) -> int:
    """|y|: what the policy wrote in the attempt, over all rows that it left, whether it trains or not."""
    same = [
        other
        for other in rows
        if (other.group, other.attempt, other.use) == (row.group, row.attempt, row.use)
    ]
    return sum(span.end - span.start for other in same for span in other.spans)


def overlong_penalty(rows: list[Row], *, max_length: int, buffer: int, factor: float) -> Rewards:
    """DAPO, arXiv:2503.14476, eq. 13."""

    def penalty(length: int) -> float:
        if length <= max_length - buffer:
            return 0.0
        if length <= max_length:
            return ((max_length - buffer) - length) / buffer
        return -1.0

    return [
        None if row.reward is None else row.reward + factor * penalty(written(rows, row))
        for row in rows
    ]


def stop_properly(rows: list[Row], *, coef: float) -> Rewards:
    return [
        min(row.reward, coef * row.reward)
        if row.truncated and row.reward is not None
        else row.reward
        for row in rows
    ]


def length_penalty(rows: list[Row], *, coef: float, free: int) -> Rewards:
    return [
        None if row.reward is None else row.reward - coef * max(0, written(rows, row) - free)
        for row in rows
    ]


def effort_length(rows: list[Row], *, max_length: int, bonus: float, penalty: float) -> Rewards:
    """NeMo RL's formula for a level of reasoning effort."""

    def changed(row: Row) -> float | None:
        if row.reward is None:
            return row.reward
        x = min(1.0, bonus * (1.0 - written(rows, row) / max_length))
        return row.reward + row.reward * max(x, 0.0) + penalty * min(x, 0.0)

    return [changed(row) for row in rows]


def clip_rewards(rows: list[Row], *, low: float | None, high: float | None) -> Rewards:
    def clipped(reward: float) -> float:
        reward = reward if low is None else max(low, reward)
        return reward if high is None else min(high, reward)

    return [None if row.reward is None else clipped(row.reward) for row in rows]


def scale_rewards(rows: list[Row], *, factor: float, shift: float) -> list[Row]:
    """The rows themselves: rewards of turns are scaled too, and not shifted."""
    return [
        replace(
            row,
            reward=None if row.reward is None else factor * row.reward + shift,
            turns=[
                replace(s, reward=None if s.reward is None else factor * s.reward)
                for s in row.spans
            ],
        )
        for row in rows
    ]


def normalise(rewards: Rewards, samples: list[float], *, center: bool, epsilon: float) -> Rewards:
    """By the statistics of `samples`; where they have no spread, nothing is divided."""
    if not samples:
        return rewards
    mean = mean_of(samples)
    if min(samples) == max(samples):
        mean, scale = samples[0], 1.0
    else:
        scale = std_of(samples, 1) + epsilon
    return [None if r is None else (r - mean if center else r) / scale for r in rewards]


def samples_of(rows: list[Row]) -> list[float]:
    """One reward an attempt of the training rows."""
    return [reward for group in in_order(rows) for reward in attempt_rewards(rows, group).values()]


def normalise_over_groups(rows: list[Row], *, center: bool, epsilon: float) -> Rewards:
    found: Rewards = [None] * len(rows)
    for group in in_order(rows):
        own = [i for i, row in enumerate(rows) if row.group == group]
        samples = samples_of([rows[i] for i in own])
        for i, reward in zip(
            own,
            normalise([rows[i].reward for i in own], samples, center=center, epsilon=epsilon),
            strict=True,
        ):
            found[i] = reward
    return found


def component_weights(rows: list[Row], weights: dict[str, float]) -> Rewards:
    return [
        None
        if row.reward is None
        else math.fsum(w * row.parts.get(k, 0.0) for k, w in weights.items())
        for row in rows
    ]


def kl_in_reward(rows: list[Row], *, coef: float) -> list[list[float]]:
    """The dense rewards afterwards: RLHF's per-token penalty (arXiv:1909.08593, section 2), a
    sample of the reverse KL."""
    return [
        [
            (row.token_rewards[t] if row.token_rewards else 0.0)
            - (coef * (row.old_logprobs[t] - row.ref_logprobs[t]) if trains else 0.0)
            for t, trains in enumerate(row.mask)
        ]
        for row in rows
    ]


# --- which rows are still in the final mask after a filter


def drop_groups_without_signal(rows: list[Row]) -> list[bool]:
    """By the rows' `teacher_logprobs`, taken for advantages: any numbers will do."""
    loud = {
        row.group
        for row in rows
        if row.counts
        and any(trains and a != 0 for trains, a in zip(row.mask, row.teacher_logprobs, strict=True))
    }
    return [row.takes_part and row.group in loud for row in rows]


def keep_by_mean_reward(rows: list[Row], low: float, high: float) -> list[bool]:
    """Whether a row stays, by the mean of the rewards of its group's attempts."""
    stays = {}
    for group in {row.group for row in rows}:
        rewards = list(attempt_rewards(rows, group).values())
        stays[group] = not rewards or low < sum(rewards) / len(rewards) < high
    return [row.takes_part and stays[row.group] for row in rows]


def drop_truncated(rows: list[Row]) -> list[bool]:
    return [row.takes_part and not row.truncated for row in rows]
