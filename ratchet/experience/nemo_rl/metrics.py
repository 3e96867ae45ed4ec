"""Metrics of rollouts, one definition each, whichever function played them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from ratchet.types import Cancelled, Failed, Owner, Trajectory, Truncated


def measure_sample(trajectory: Trajectory) -> dict[str, Any]:
    """Return the metrics of one attempt; tokens are those after its prompt.

    Exactly one of `terminated` (by the environment), `truncated` (by a token budget),
    `max_turns_reached` and `failed` is True. A failed attempt has no reward: its `total_reward` is
    NaN.
    """
    failed = isinstance(trajectory.outcome, Failed | Cancelled)
    limit = not failed and trajectory.metrics.get("turn_limit", 0) > 0
    generated = [turn.end - turn.start for turn in trajectory.turns]
    policy = int((trajectory.owner == Owner.POLICY).sum())
    environment = int((trajectory.owner == Owner.ENVIRONMENT).sum())
    return {
        "turn_count": int(trajectory.metrics.get("turns", len(generated))),
        "total_tokens": policy + environment,
        "assistant_tokens": policy,
        "env_tokens": environment,
        "terminated": trajectory.outcome is None,
        "truncated": isinstance(trajectory.outcome, Truncated) and not limit,
        "max_turns_reached": limit,
        "failed": failed,
        "total_reward": math.nan
        if failed
        else math.fsum(turn.reward or 0.0 for turn in trajectory.turns),
        "turn_gen_tokens": generated,
        "turn_input_tokens": [turn.start for turn in trajectory.turns],
        "turn_total_tokens": [turn.end for turn in trajectory.turns],
        "max_gen_tokens_per_turn": max(generated, default=0),
    }


def measure_samples(samples: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the metrics of a batch from those of its rows; {} for none.

    Rewards are averaged over the rows that did not fail.
    """
    if not samples:
        return {}
    turns = [sample["turn_count"] for sample in samples]
    longest = [sample["max_gen_tokens_per_turn"] for sample in samples]
    rewards = [sample["total_reward"] for sample in samples if not sample["failed"]]
    numbers: dict[str, Any] = {
        "total_turns": sum(turns),
        "avg_turns_per_sample": fmean(turns),
        "max_turns_per_sample": max(turns),
        "turns_per_sample/p95": compute_percentile(turns, 95),
        "turns_per_sample/p99": compute_percentile(turns, 99),
        "natural_termination_rate": fmean(sample["terminated"] for sample in samples),
        "truncation_rate": fmean(sample["truncated"] for sample in samples),
        "max_turns_reached_rate": fmean(sample["max_turns_reached"] for sample in samples),
        "failed_rate": fmean(sample["failed"] for sample in samples),
        "mean_total_tokens_per_sample": fmean(sample["total_tokens"] for sample in samples),
        "mean_gen_tokens_per_sample": fmean(sample["assistant_tokens"] for sample in samples),
        "max_gen_tokens_per_sample": max(sample["assistant_tokens"] for sample in samples),
        "mean_env_tokens_per_sample": fmean(sample["env_tokens"] for sample in samples),
        "max_gen_tokens_per_turn/mean": fmean(longest),
        "max_gen_tokens_per_turn/max": max(longest),
        "max_gen_tokens_per_turn/p95": compute_percentile(longest, 95),
    }
    if rewards:
        numbers |= {
            "mean_total_reward": fmean(rewards),
            "max_total_reward": max(rewards),
            "min_total_reward": min(rewards),
        }
    for name, column in HISTOGRAMS.items():
        numbers[name] = [count for sample in samples for count in sample[column]]
    return numbers


# Token counts of all turns of all rows: generated, read before, and both.
HISTOGRAMS = {
    "histogram/gen_tokens_length": "turn_gen_tokens",
    "histogram/input_tokens_length": "turn_input_tokens",
    "histogram/total_tokens_length": "turn_total_tokens",
}


def compute_percentile(values: Sequence[float], percent: float) -> float:
    """Return the smallest value that at least `percent` of all do not exceed (nearest rank)."""
    rank = max(1, math.ceil(percent / 100 * len(values)))
    return float(sorted(values)[rank - 1])
