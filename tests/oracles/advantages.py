"""Group-relative advantages: DeepSeekMath, arXiv:2402.03300, section 4.1.2; without the std: Dr. GRPO, arXiv:2503.20783."""

from __future__ import annotations

import math

from oracles.ragged import Ragged, Row


def attempt_rewards(rows: list[Row], group: str) -> dict[int, float]:
    """Reward by attempt, over the attempts of a group that were sampled for training and judged. An attempt whose history
    forked is several rows and one reward."""
    rewards: dict[int, float] = {}
    for row in rows:
        if row.group == group and row.use == "train" and row.reward is not None:
            assert rewards.get(row.attempt, row.reward) == row.reward, "the rows of one attempt share its reward"
            rewards[row.attempt] = row.reward
    return rewards


def group_relative(rows: list[Row], *, scale: str, epsilon: float) -> list[float]:
    """One advantage per row: (r - mean) / (std + epsilon) with the sample std (ddof = 1), or r - mean where scale="none".

    0 for a row that was not judged or not sampled for training, for an attempt without a peer, and where all rewards of
    the group are equal (exactly: no rounding error may be divided by a tiny std).
    """
    advantages = []
    for row in rows:
        rewards = list(attempt_rewards(rows, row.group).values())
        if row.use != "train" or row.reward is None or min(rewards) == max(rewards):
            advantages.append(0.0)
            continue
        mean = math.fsum(rewards) / len(rewards)
        centred = row.reward - mean
        if scale == "none":
            advantages.append(centred)
            continue
        variance = math.fsum((r - mean) ** 2 for r in rewards) / (len(rewards) - 1)
        advantages.append(centred / (math.sqrt(variance) + epsilon))
    return advantages


def on_tokens(rows: list[Row], advantages: list[float]) -> Ragged:
    """Every trained token of a row carries the row's advantage; all others carry 0."""
    return [[a if trains else 0.0 for trains in row.mask] for row, a in zip(rows, advantages, strict=True)]
