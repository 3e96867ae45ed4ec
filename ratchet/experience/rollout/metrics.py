"""Numbers that describe the groups of a step, one definition each. docs/metrics.md lists them."""

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

# Bins are fixed, so that steps, ranks and runs compare: of lengths by powers of two, of rewards by
# tenths around 0 and 1.
LENGTHS = Bins((0.0, *(2.0**i for i in range(21))))
REWARDS = Bins(tuple(i / 10 for i in range(-20, 31)))
SPREADS: Mapping[str, Reducer] = {  # over the attempts of a step
    "length_p50": Percentile(50),
    "length_p95": Percentile(95),
    "length_histogram": LENGTHS,
    "reward_histogram": REWARDS,
    "turns_p95": Percentile(95),
}
Labels = Mapping[str, str]


def measure_groups(groups: Sequence[Group]) -> dict[str, float]:
    """Token counts, of all rows; of attempts, which somebody sampled, also what they earned. Of
    these only the rows that train count: a greedy baseline has numbers of its own. Given text has
    neither lengths nor rewards that say how a run goes, and those of a group that is replayed said
    it when it was new."""
    rows = [t for group in groups for t in group.trajectories]
    trains = _joined([t.trainable for t in rows if t.counts and t.use == "train"], np.bool_)
    numbers = {
        "tokens": float(sum(map(len, rows))),
        "trained_tokens": float(np.count_nonzero(trains)),
    }
    groups = [group for group in groups if not group.uses]
    sampled = [
        t
        for group in groups
        if any(_is_sampled(t) for t in group.trajectories)
        for t in group.trajectories
    ]
    attempts = [t for t in sampled if t.use == "train"]
    greedy = [t for t in sampled if t.use == "baseline"]
    if sampled:
        numbers["generated_tokens"] = float(sum(t.completion_length for t in sampled))
    if attempts:
        numbers |= _measure_play(groups)
        numbers |= _measure_attempts(attempts) | _measure_rewards(
            [t for t in attempts if t.reward is not None]
        )
        scored = [
            [r for t in group.trajectories if t.use == "train" and (r := t.reward) is not None]
            for group in groups
        ]
        if any(scored):
            numbers["equal_rewards_share"] = fmean(max(row) == min(row) for row in scored if row)
    if greedy:
        numbers["greedy_unscored_share"] = fmean(t.reward is None for t in greedy)
        if rewards := [reward for t in greedy if (reward := t.reward) is not None]:
            numbers["greedy_reward"] = fmean(rewards)
    return numbers


def spread_attempts(groups: Sequence[Group]) -> Iterator[tuple[Labels, dict[str, list[float]]]]:
    """What each attempt that somebody sampled was like, one number for each: those of all groups,
    how they are spread; then by domain (`tag`) and by environment (`env`), where that is not the
    domain too, their reward, length, end and turns. Of an attempt whose history forked all rows
    count together."""
    found = [(group, _samples(group)) for group in groups if not group.uses]
    by: dict[tuple[str, str], dict[str, list[float]]] = {}
    for group, samples in found:
        tag, environment = group.task.tag, group.task.environment
        for label in (("", ""), ("tag", tag), ("env", "" if environment == tag else environment)):
            if samples["length_mean"] and (label[1] or not label[0]):
                known = by.setdefault(label, {name: [] for name in samples})
                for name, values in samples.items():
                    known[name] += values
    if everything := by.pop(("", ""), None):
        lengths = dict.fromkeys(
            ("length_p50", "length_p95", "length_histogram"), everything["length_mean"]
        )
        yield (
            {},
            {**lengths, "reward_histogram": everything["reward"], "turns_p95": everything["turns"]},
        )
    for (label, name), samples in by.items():
        yield {label: name}, samples


def _samples(group: Group) -> dict[str, list[float]]:
    """Of the attempts that train, where the group was sampled."""
    found: dict[str, list[float]] = {
        "reward": [],
        "length_mean": [],
        "truncated_share": [],
        "turns": [],
    }
    if not any(_is_sampled(row) for row in group.trajectories):
        return found
    for rows in group.attempts:
        last = rows[-1]
        if last.use != "train":
            continue
        found["length_mean"].append(float(sum(row.completion_length for row in rows)))
        found["truncated_share"].append(float(last.truncated))
        if (reward := last.reward) is not None:
            found["reward"].append(reward)
        if "turns" in last.metrics:
            found["turns"].append(last.metrics["turns"])
    return found


def measure_staleness(groups: Sequence[Group], step: int) -> dict[str, float]:
    """By how many versions the weights that drew a token lie behind those that it trains, over the
    tokens that train; where none does, nothing."""
    rows = [t for group in groups for t in group.trajectories if t.counts and t.use == "train"]
    versions, trains = (
        _joined([t.versions for t in rows], np.int32),
        _joined([t.trainable for t in rows], np.bool_),
    )
    known = step - versions[trains & (versions >= 0)]
    if not known.any():
        return {}
    return {"staleness_mean": float(known.mean()), "staleness_max": float(known.max())}


def _joined(columns: Sequence[NDArray[Any]], dtype: type[np.generic]) -> NDArray[Any]:
    """End to end; of no columns, none of that type."""
    return np.concatenate([np.zeros(0, dtype), *columns])


def measure_redundancy(groups: Sequence[Group], begun: int) -> dict[str, float]:
    """By how much the attempts that ended first are shorter than all, of which so many a group were
    begun."""
    ended = [[rows[-1] for rows in group.attempts if rows[-1].use == "train"] for group in groups]
    kept = [
        [row.completion_length for row in rows if not isinstance(row.outcome, Failed)]
        for rows in ended
    ]
    cancelled = [begun - len(rows) for rows in ended]
    if not any(kept):
        return {}
    length, mean = (
        mean_length(kept, cancelled),
        fmean(length for lengths in kept for length in lengths),
    )
    share = sum(cancelled) / (begun * len(groups))
    return {
        "redundancy/cancelled_share": share,
        "redundancy/length_mean": length,
        "redundancy/length_share": mean / length,
    }


def mean_length(kept: Sequence[Sequence[float]], cancelled: Sequence[int]) -> float:
    """Of all attempts of several groups, those included that were cancelled, so many a group: each
    is taken to be longer than those of its group that were kept, which ended first. By Kaplan and
    Meier (https://doi.org/10.2307/2281868): what a cancelled one counts goes in equal parts to all
    that are longer; the longest of all takes what is left, so that with a heavy tail the mean is
    rather too small."""
    ends = [(length, False) for lengths in kept for length in lengths]
    ends += [
        (max(lengths), True)
        for lengths, count in zip(kept, cancelled, strict=True)
        if lengths
        for _ in range(count)
    ]
    mean, longer = 0.0, 1.0  # the share of all that is longer than what was seen so far
    for seen, (length, cut) in enumerate(sorted(ends)):
        if not cut:
            share = longer / (len(ends) - seen)
            mean += share * length
            longer -= share
    return mean + longer * max(ends)[0]


def _is_sampled(row: Trajectory) -> bool:
    """Or was to be: given text neither fails nor breaks off."""
    return row.sampled or not isinstance(row.outcome, Scored | None)


def _measure_attempts(attempts: Sequence[Trajectory]) -> dict[str, float]:
    lengths = [t.completion_length for t in attempts]
    kinds = Counter(t.outcome.kind for t in attempts if isinstance(t.outcome, Failed))
    return {
        "length_mean": fmean(lengths),
        "length_max": float(max(lengths)),
        **measure_repetition(attempts),
        "truncated_share": fmean(t.truncated for t in attempts),
        "failed_share": sum(kinds.values()) / len(attempts),
        **{f"failed/{kind}": float(count) for kind, count in kinds.items()},
    }


def _measure_play(groups: Sequence[Group]) -> dict[str, float]:
    """What attempts measured of themselves, which each of their rows carries, over those that
    did."""
    played = [
        rows[-1].metrics for group in groups for rows in group.attempts if rows[-1].use == "train"
    ]
    names = dict.fromkeys(chain.from_iterable(played))
    return {
        f"attempt/{name}": fmean([metrics[name] for metrics in played if name in metrics])
        for name in names
    }


def _measure_rewards(scored: Sequence[Trajectory]) -> dict[str, float]:
    """And of each named part, over the attempts that have it."""
    values = {"": [reward for t in scored if (reward := t.reward) is not None]} if scored else {}
    parts = [t.reward_parts for t in scored]
    for name in dict.fromkeys(chain.from_iterable(parts)):
        values[f"/{name}"] = [own[name] for own in parts if name in own]
    means = {f"reward{name}": fmean(found) for name, found in values.items()}
    return means | {f"reward_std{name}": pstdev(found) for name, found in values.items()}
