"""Compute the metrics of a step's groups (docs/metrics.md lists them)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from statistics import fmean, pstdev
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ratchet.observe.reducers import Bins, Percentile, Reducer
from ratchet.observe.sentinels import measure_repetition
from ratchet.types import Failed, Group, Scored, Trajectory

# Bins are fixed so that steps, ranks and runs can be compared: powers of two for lengths, and
# tenths around 0 and 1 for rewards.
LENGTHS = Bins((0.0, *(2.0**i for i in range(21))))
REWARDS = Bins(tuple(i / 10 for i in range(-20, 31)))
DISTRIBUTION_REDUCERS: Mapping[str, Reducer] = {  # over the attempts of a step
    "length_p50": Percentile(50),
    "length_p95": Percentile(95),
    "length_histogram": LENGTHS,
    "reward_histogram": REWARDS,
    "turns_p95": Percentile(95),
}
Labels = Mapping[str, str]


def measure_groups(groups: Sequence[Group]) -> dict[str, float]:
    """Return token counts of all rows, and lengths and rewards of the sampled attempts.

    All rows of an attempt count as one attempt. Only attempts that train count; a greedy baseline
    has metrics of its own. Lengths and rewards leave out supervised text and replayed groups.
    Replayed groups were measured when they were new.
    """
    rows = [t for group in groups for t in group.trajectories]
    trainable = _concatenate(
        [t.trainable for t in rows if t.is_usable and t.use == "train"], np.bool_
    )
    metrics = {
        "tokens": float(sum(map(len, rows))),
        "trained_tokens": float(np.count_nonzero(trainable)),
    }
    groups = [group for group in groups if not group.n_uses]
    sampled = [
        rows
        for group in groups
        if any(_is_sampled(t) for t in group.trajectories)
        for rows in group.attempts
    ]
    attempts = [rows for rows in sampled if rows[-1].use == "train"]
    baselines = [rows[-1] for rows in sampled if rows[-1].use == "baseline"]
    if sampled:
        metrics["generated_tokens"] = float(sum(map(_count_completion, sampled)))
    if attempts:
        metrics |= _measure_attempt_metrics(groups)
        metrics |= _measure_attempts(attempts) | _measure_rewards(
            [rows[-1] for rows in attempts if rows[-1].reward is not None]
        )
        rewards_by_group = [group.rewards for group in groups]
        if any(rewards_by_group):
            metrics["equal_rewards_share"] = fmean(
                max(rewards) == min(rewards) for rewards in rewards_by_group if rewards
            )
    if baselines:
        metrics["greedy_unscored_share"] = fmean(t.reward is None for t in baselines)
        if rewards := [reward for t in baselines if (reward := t.reward) is not None]:
            metrics["greedy_reward"] = fmean(rewards)
    return metrics


def iterate_attempt_samples(
    groups: Sequence[Group],
) -> Iterator[tuple[Labels, dict[str, list[float]]]]:
    """Yield the values of sampled attempts: over all groups first, then per domain and environment.

    A domain has the label `tag`, and an environment the label `env`; an environment with the name
    of its domain is left out. All rows of an attempt whose history forked count as one attempt.
    """
    samples_by_group = [(group, _collect_samples(group)) for group in groups if not group.n_uses]
    collected_by_label: dict[tuple[str, str], dict[str, list[float]]] = {}
    for group, samples in samples_by_group:
        tag, environment = group.task.tag, group.task.environment
        for label in (("", ""), ("tag", tag), ("env", "" if environment == tag else environment)):
            if samples["length_mean"] and (label[1] or not label[0]):
                collected = collected_by_label.setdefault(label, {name: [] for name in samples})
                for name, values in samples.items():
                    collected[name] += values
    if all_samples := collected_by_label.pop(("", ""), None):
        lengths = dict.fromkeys(
            ("length_p50", "length_p95", "length_histogram"), all_samples["length_mean"]
        )
        yield (
            {},
            {
                **lengths,
                "reward_histogram": all_samples["reward"],
                "turns_p95": all_samples["turns"],
            },
        )
    for (label, name), samples in collected_by_label.items():
        yield {label: name}, samples


def _collect_samples(group: Group) -> dict[str, list[float]]:
    """Return the values of the attempts that train, if the group was sampled."""
    samples: dict[str, list[float]] = {
        "reward": [],
        "length_mean": [],
        "truncated_share": [],
        "turns": [],
    }
    if not any(_is_sampled(row) for row in group.trajectories):
        return samples
    for rows in group.attempts:
        last = rows[-1]
        if last.use != "train":
            continue
        samples["length_mean"].append(float(_count_completion(rows)))
        samples["truncated_share"].append(float(last.truncated))
        if (reward := last.reward) is not None:
            samples["reward"].append(reward)
        if "turns" in last.metrics:
            samples["turns"].append(last.metrics["turns"])
    return samples


def measure_staleness(groups: Sequence[Group], step: int) -> dict[str, float]:
    """Return mean and maximum staleness, in versions, of trained tokens; {} if none is stale."""
    rows = [t for group in groups for t in group.trajectories if t.is_usable and t.use == "train"]
    versions = _concatenate([t.versions for t in rows], np.int32)
    trainable = _concatenate([t.trainable for t in rows], np.bool_)
    staleness = step - versions[trainable & (versions >= 0)]
    if not staleness.any():
        return {}
    return {"staleness_mean": float(staleness.mean()), "staleness_max": float(staleness.max())}


def _concatenate(columns: Sequence[NDArray[Any]], dtype: type[np.generic]) -> NDArray[Any]:
    """Return the columns end to end; an empty array of `dtype` for none."""
    return np.concatenate([np.zeros(0, dtype), *columns])


def measure_redundancy(groups: Sequence[Group], n_attempts_begun: int) -> dict[str, float]:
    """Return the share of cancelled attempts, and the length bias of keeping the first to end.

    `length_mean` is the estimated mean length of all attempts, cancelled ones included.
    `length_share` is the mean length of the kept attempts, divided by that estimate.

    Args:
        groups: The groups of a step.
        n_attempts_begun: Number of attempts begun for each group.
    """
    finished_attempts = [
        [rows for rows in group.attempts if rows[-1].use == "train"] for group in groups
    ]
    lengths_by_group = [
        [_count_completion(rows) for rows in attempts if not isinstance(rows[-1].outcome, Failed)]
        for attempts in finished_attempts
    ]
    n_cancelled = [n_attempts_begun - len(attempts) for attempts in finished_attempts]
    if not any(lengths_by_group):
        return {}
    estimated_mean = estimate_mean_length(lengths_by_group, n_cancelled)
    kept_mean = fmean(length for lengths in lengths_by_group for length in lengths)
    share = sum(n_cancelled) / (n_attempts_begun * len(groups))
    return {
        "redundancy/cancelled_share": share,
        "redundancy/length_mean": estimated_mean,
        "redundancy/length_share": kept_mean / estimated_mean,
    }


def estimate_mean_length(kept: Sequence[Sequence[float]], n_cancelled: Sequence[int]) -> float:
    """Estimate the mean length of all attempts of several groups, cancelled ones included.

    A cancelled attempt is known to be longer than the kept attempts of its group. The estimator is
    by Kaplan and Meier (https://doi.org/10.2307/2281868): the weight of a cancelled attempt is
    shared by all longer ones, and the longest gets what remains. With a heavy tail the estimate
    tends to be too small.

    Args:
        kept: The lengths of the kept attempts of each group.
        n_cancelled: The number of cancelled attempts of each group.
    """
    observations = [(length, False) for lengths in kept for length in lengths]
    observations += [
        (max(lengths), True)
        for lengths, count in zip(kept, n_cancelled, strict=True)
        if lengths
        for _ in range(count)
    ]
    mean = 0.0
    remaining_share = 1.0  # the share of attempts that are longer than the lengths seen so far
    for index, (length, is_cancelled) in enumerate(sorted(observations)):
        if not is_cancelled:
            share = remaining_share / (len(observations) - index)
            mean += share * length
            remaining_share -= share
    return mean + remaining_share * max(observations)[0]


def _is_sampled(row: Trajectory) -> bool:
    """True if the row is an attempt, even a failed one; supervised text never fails."""
    return row.sampled or not isinstance(row.outcome, Scored | None)


def _count_completion(rows: Sequence[Trajectory]) -> int:
    """Return the number of tokens that the policy wrote in all rows of an attempt."""
    return sum(row.completion_length for row in rows)


def _measure_attempts(attempts: Sequence[Sequence[Trajectory]]) -> dict[str, float]:
    """Return the lengths, repetition, truncation and failures of sampled attempts."""
    lengths = list(map(_count_completion, attempts))
    outcomes = [rows[-1].outcome for rows in attempts]
    failure_counts = Counter(outcome.kind for outcome in outcomes if isinstance(outcome, Failed))
    return {
        "length_mean": fmean(lengths),
        "length_max": float(max(lengths)),
        **measure_repetition([row for rows in attempts for row in rows]),
        "truncated_share": fmean(rows[-1].truncated for rows in attempts),
        "failed_share": sum(failure_counts.values()) / len(attempts),
        **{f"failed/{kind}": float(count) for kind, count in failure_counts.items()},
    }


def _measure_attempt_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """Return the mean of each of `Trajectory.metrics`, over the attempts that have it."""
    attempt_metrics = [
        rows[-1].metrics for group in groups for rows in group.attempts if rows[-1].use == "train"
    ]
    names = dict.fromkeys(chain.from_iterable(attempt_metrics))
    return {
        f"attempt/{name}": fmean([metrics[name] for metrics in attempt_metrics if name in metrics])
        for name in names
    }


def _measure_rewards(scored: Sequence[Trajectory]) -> dict[str, float]:
    """Return mean and standard deviation of the reward and of its named parts.

    The statistics of a part are over the attempts that have it.
    """
    values = {"": [reward for t in scored if (reward := t.reward) is not None]} if scored else {}
    parts = [t.reward_parts for t in scored]
    for name in dict.fromkeys(chain.from_iterable(parts)):
        values[f"/{name}"] = [row_parts[name] for row_parts in parts if name in row_parts]
    means = {f"reward{name}": fmean(rewards) for name, rewards in values.items()}
    return means | {f"reward_std{name}": pstdev(rewards) for name, rewards in values.items()}
