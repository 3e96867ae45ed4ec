"""Compute the metrics of NeMo RL rollouts, in the same way for all rollout functions."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from ratchet.types import Cancelled, Failed, Owner, Trajectory, Truncated


def measure_sample(trajectory: Trajectory) -> dict[str, Any]:
    """Return the metrics of one attempt.

    `total_tokens` does not count the prompt; `turn_input_tokens` and `turn_total_tokens` do.

    Exactly one of `terminated` (by the environment), `truncated` (by a token budget),
    `max_turns_reached` and `failed` is True. A failed attempt has no reward: its `total_reward` is
    NaN.
    """
    failed = isinstance(trajectory.outcome, Failed | Cancelled)
    hit_turn_limit = not failed and trajectory.metrics.get("turn_limit", 0) > 0
    tokens_per_turn = [turn.end - turn.start for turn in trajectory.turns]
    policy_tokens = int((trajectory.owner == Owner.POLICY).sum())
    environment_tokens = int((trajectory.owner == Owner.ENVIRONMENT).sum())
    return {
        "turn_count": int(trajectory.metrics.get("turns", len(tokens_per_turn))),
        "total_tokens": policy_tokens + environment_tokens,
        "assistant_tokens": policy_tokens,
        "env_tokens": environment_tokens,
        "terminated": trajectory.outcome is None,
        "truncated": isinstance(trajectory.outcome, Truncated) and not hit_turn_limit,
        "max_turns_reached": hit_turn_limit,
        "failed": failed,
        "total_reward": math.nan
        if failed
        else math.fsum(turn.reward or 0.0 for turn in trajectory.turns),
        "turn_gen_tokens": tokens_per_turn,
        "turn_input_tokens": [turn.start for turn in trajectory.turns],
        "turn_total_tokens": [turn.end for turn in trajectory.turns],
        "max_gen_tokens_per_turn": max(tokens_per_turn, default=0),
    }


def measure_samples(samples: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the metrics of a batch from the metrics of its rows; {} for an empty batch.

    Rewards are averaged over the rows that did not fail.
    """
    if not samples:
        return {}
    turn_counts = [sample["turn_count"] for sample in samples]
    longest_turns = [sample["max_gen_tokens_per_turn"] for sample in samples]
    rewards = [sample["total_reward"] for sample in samples if not sample["failed"]]
    metrics: dict[str, Any] = {
        "total_turns": sum(turn_counts),
        "avg_turns_per_sample": fmean(turn_counts),
        "max_turns_per_sample": max(turn_counts),
        "turns_per_sample/p95": compute_percentile(turn_counts, 95),
        "turns_per_sample/p99": compute_percentile(turn_counts, 99),
        "natural_termination_rate": fmean(sample["terminated"] for sample in samples),
        "truncation_rate": fmean(sample["truncated"] for sample in samples),
        "max_turns_reached_rate": fmean(sample["max_turns_reached"] for sample in samples),
        "failed_rate": fmean(sample["failed"] for sample in samples),
        "mean_total_tokens_per_sample": fmean(sample["total_tokens"] for sample in samples),
        "mean_gen_tokens_per_sample": fmean(sample["assistant_tokens"] for sample in samples),
        "max_gen_tokens_per_sample": max(sample["assistant_tokens"] for sample in samples),
        "mean_env_tokens_per_sample": fmean(sample["env_tokens"] for sample in samples),
        "max_gen_tokens_per_turn/mean": fmean(longest_turns),
        "max_gen_tokens_per_turn/max": max(longest_turns),
        "max_gen_tokens_per_turn/p95": compute_percentile(longest_turns, 95),
    }
    if rewards:
        metrics |= {
            "mean_total_reward": fmean(rewards),
            "max_total_reward": max(rewards),
            "min_total_reward": min(rewards),
        }
    tokens_by_worker: Counter[int] = Counter()
    for sample in samples:
        tokens_by_worker.update(sample.get("per_worker_token_counts", {}))
    if tokens_by_worker:
        metrics["per_worker_token_counts"] = dict(tokens_by_worker)
    for name, column in HISTOGRAMS.items():
        metrics[name] = [count for sample in samples for count in sample[column]]
    return metrics


# Lists of token counts, one per turn of every row: of the generated tokens, of the context before
# the turn, and of both together.
HISTOGRAMS = {
    "histogram/gen_tokens_length": "turn_gen_tokens",
    "histogram/input_tokens_length": "turn_input_tokens",
    "histogram/total_tokens_length": "turn_total_tokens",
}


def compute_percentile(values: Sequence[float], percent: float) -> float:
    """Return the value at index floor(percent / 100 * n) of the sorted values, or the last one.

    This is the percentile of NeMo RL (nemo_rl/experience/metric_utils.py); 0.0 without values.
    """
    if not values:
        return 0.0
    rank = int(percent / 100 * len(values))
    return float(sorted(values)[min(rank, len(values) - 1)])
