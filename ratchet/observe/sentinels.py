"""Warn about a run or pause it by rules over its metrics (sentinels), and keep the evidence.

A rule is a pure function of a value and its predecessors. A sentinel's memory is saved in the
checkpoint, so that a resumed run gives the same warnings as an uninterrupted one.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from itertools import accumulate, pairwise
from pathlib import Path
from statistics import fmean, median
from typing import Any, NamedTuple

import numpy as np

from ratchet.config.sentinels import SentinelConfig, SentinelsConfig
from ratchet.errors import Symptom, link_symptom
from ratchet.observe.metrics import MACHINE_PREFIXES
from ratchet.observe.write_files import replace_text
from ratchet.types import POLICY, Failed, Group, Trajectory

log = logging.getLogger(__name__)

Metrics = Mapping[str, float | None]

MAX_EXHIBITS = 8  # maximum number of attempts in a file of evidence
NGRAM = 8  # tokens per n-gram; shorter ones repeat in any text
# standard deviation / median absolute deviation, for a normal distribution
STD_PER_MEDIAN_DEVIATION = 1.4826


# --- rules


@dataclass(frozen=True)
class MetricMemory:
    """The past values of a metric that a sentinel's rule needs; only finite ones are kept."""

    first_values: tuple[float, ...] = ()  # the first `window` values
    recent_values: tuple[float, ...] = ()  # up to `window` latest values after those
    streak: int = 0  # number of latest values for which the rule held, without a break

    def latest(self, n: int) -> tuple[float, ...]:
        return (*self.first_values, *self.recent_values)[-n:]


def holds(sentinel: SentinelConfig, memory: MetricMemory, value: float | None) -> bool:
    """Return True if the rule holds for a value that follows those in memory.

    value: None stands for a value that is not finite.
    """
    if value is None:
        return sentinel.rule in ("nonfinite", "above", "spike", "grows", "rises")
    return _RULES[sentinel.rule](value, memory, sentinel.threshold, sentinel.window)


def update_memory(
    sentinel: SentinelConfig, memory: MetricMemory, value: float | None
) -> MetricMemory:
    """Return the memory with one more value."""
    streak = memory.streak + 1 if holds(sentinel, memory, value) else 0
    if value is None:
        return replace(memory, streak=streak)
    if len(memory.first_values) < sentinel.window:
        return MetricMemory((*memory.first_values, value), (), streak)
    return MetricMemory(
        memory.first_values, (*memory.recent_values, value)[-sentinel.window :], streak
    )


def _spikes(value: float, memory: MetricMemory, threshold: float, window: int) -> bool:
    previous = memory.latest(window)
    if len(previous) < window:
        return False
    center = median(previous)
    # The lower bounds keep rounding noise of a nearly constant metric from counting as a spike.
    deviation = max(
        STD_PER_MEDIAN_DEVIATION * median(abs(x - center) for x in previous),
        1e-3 * abs(center),
        1e-6,
    )
    return value - center > threshold * deviation


def _compare_medians(value: float, memory: MetricMemory, window: int) -> tuple[float, float] | None:
    """Return the medians of the latest and of the first window, or None while they overlap."""
    latest = (*memory.recent_values, value)[-window:]
    return (
        (median(latest), median(memory.first_values))
        if len(memory.first_values) == len(latest) == window
        else None
    )


def _grows(value: float, memory: MetricMemory, threshold: float, window: int) -> bool:
    medians = _compare_medians(value, memory, window)
    return medians is not None and medians[0] > threshold * medians[1] > 0


def _shrinks(value: float, memory: MetricMemory, threshold: float, window: int) -> bool:
    medians = _compare_medians(value, memory, window)
    return medians is not None and medians[0] < threshold * medians[1]


def _rises(value: float, memory: MetricMemory, threshold: float, window: int) -> bool:
    medians = _compare_medians(value, memory, window)
    return medians is not None and medians[0] > medians[1] + threshold


_RULES: Mapping[str, Callable[[float, MetricMemory, float, int], bool]] = {
    "above": lambda value, memory, threshold, window: value > threshold,
    "below": lambda value, memory, threshold, window: value < threshold,
    "spike": _spikes,
    "grows": _grows,
    "shrinks": _shrinks,
    "rises": _rises,
    "reported": lambda value, memory, threshold, window: value != 0.0,
    "nonfinite": lambda value, memory, threshold, window: False,
}
_RULE_TEXTS = {
    "above": "is above {threshold:g}",
    "below": "is below {threshold:g}",
    "spike": "is over {threshold:g} deviations above the median of the {window} previous steps",
    "grows": "is over {threshold:g} times its first value (medians of {window} steps)",
    "shrinks": "is under {threshold:g} times its first value (medians of {window} steps)",
    "rises": "is over {threshold:g} above its first value (medians of {window} steps)",
    "reported": "is reported",
    "nonfinite": "is not finite",
}
# The section of docs/by-symptom.md about a built-in sentinel's alarm.
SYMPTOMS: Mapping[str, Symptom] = {
    "loss_spike": "the-kl-explodes",
    "nonfinite_step": "the-loss-or-the-gradient-is-not-finite",
    "entropy_collapse": "the-entropy-collapses",
    "kl_blowup": "the-kl-explodes",
    "policy_jump": "the-kl-explodes",
    "equal_rewards": "the-reward-is-flat",
    "failed_rewards": "attempts-fail",
    "cut_off": "the-reward-is-flat",
}


def get_watched_value(
    sentinel: SentinelConfig, metrics: Metrics
) -> tuple[str, float | None] | None:
    """Return the watched metric's name and value; None if the step does not report it.

    If several metrics match, one that is not finite is chosen, or else the greatest. Under the rule
    `reported`, a metric that the step does not report has the value 0.
    """
    matching = {
        name: value for name, value in metrics.items() if fnmatchcase(name, sentinel.metric)
    }
    if not matching:
        return (sentinel.metric, 0.0) if sentinel.rule == "reported" else None
    name = max(matching, key=lambda name: math.inf if (value := matching[name]) is None else value)
    return name, matching[name]


# --- evidence


class Exhibit(NamedTuple):
    """An attempt shown as evidence, and how strongly it bears on the alarm."""

    weight: float
    group: Group
    row: Trajectory


def compute_repetition(row: Trajectory) -> float | None:
    """Return the share of the policy's 8-token n-grams that occurred before in the attempt.

    None if the policy wrote fewer than 8 tokens.
    """
    tokens = row.tokens[row.owner == POLICY]
    return compute_repeated_share(tokens.tobytes(), tokens.itemsize, NGRAM)


def compute_repeated_share(token_bytes: bytes, size: int, ngram: int) -> float | None:
    """Return the share of repeated n-grams in tokens of `size` bytes each.

    None if there are fewer tokens than `ngram`.
    """
    count = len(token_bytes) // size - ngram + 1
    if count < 1:
        return None
    # Comparing n-grams as bytes is a hundred times as fast as comparing rows of numbers.
    distinct = {token_bytes[start : start + ngram * size] for start in range(0, count * size, size)}
    return 1.0 - len(distinct) / count


def _compute_mean_negative_logprob(row: Trajectory) -> float:
    """Return the mean of -log p over the tokens that the policy wrote."""
    logprobs = row.rollout_logprobs[row.owner == POLICY]
    return float(-logprobs.mean()) if len(logprobs) else 0.0


# The weight of an attempt as evidence, by the first pattern that matches the metric.
_EVIDENCE_WEIGHTS: Sequence[tuple[str, Callable[[Trajectory], float]]] = (
    ("rollout/repetition", lambda row: compute_repetition(row) or 0.0),
    ("rollout/length*", lambda row: float(row.completion_length)),
    ("rollout/truncated_share", lambda row: float(row.truncated)),
    ("rollout/failed/*", lambda row: float(isinstance(row.outcome, Failed))),
    ("policy/*", _compute_mean_negative_logprob),
    ("*", lambda row: row.reward or 0.0),
)


def make_exhibits(sentinel: SentinelConfig, groups: Sequence[Group]) -> Iterator[Exhibit]:
    """Yield the training attempts of a step as exhibits."""
    get_weight = next(
        get_weight
        for pattern, get_weight in _EVIDENCE_WEIGHTS
        if fnmatchcase(sentinel.metric, pattern)
    )
    sign = -1.0 if sentinel.rule in ("below", "shrinks") else 1.0
    for group in groups:
        yield from (
            Exhibit(sign * get_weight(row), group, row)
            for row in group.trajectories
            if row.use == "train"
        )


def _convert_to_json(exhibit: Exhibit) -> dict[str, Any]:
    row = exhibit.row
    return {
        "weight": exhibit.weight,
        "group": exhibit.group.id,
        "task": exhibit.group.task.id,
        "attempt": row.attempt,
        "outcome": type(row.outcome).__name__,
        "detail": row.outcome.detail if isinstance(row.outcome, Failed) else "",
        "reward": row.reward,
        "parts": dict(row.reward_parts),
        "length": row.completion_length,
        "messages": [{"role": message.role, "text": message.text} for message in row.messages],
        "tokens": row.tokens.tolist(),
    }


# --- the sentinels of a stage


def get_active_sentinels(config: SentinelsConfig) -> dict[str, SentinelConfig]:
    """Return the sentinels that are on, by name."""
    built_in = {name: getattr(config, name) for name in type(config).model_fields}
    named = {
        name: value for name, value in built_in.items() if isinstance(value, SentinelConfig)
    } | config.custom
    return {name: sentinel for name, sentinel in named.items() if sentinel.action != "off"}


@dataclass
class Sentinels:
    """The sentinels of a stage, with their memories."""

    config: SentinelsConfig
    # Evidence is written here as `step-N-NAME.json`; None: it is not kept.
    directory: Path | None = None
    memories: dict[str, MetricMemory] = field(default_factory=dict)

    def check(
        self,
        step: int,
        metrics: Metrics,
        groups: Sequence[Group] = (),
        evidence: Mapping[str, Sequence[Exhibit]] | None = None,
    ) -> bool:
        """Check the metrics of a step. Return True if the run must pause.

        evidence: exhibits from other checks, by metric. For other metrics they are chosen from
            `groups`.
        """
        must_pause = False
        for name, sentinel in get_active_sentinels(self.config).items():
            named_value = get_watched_value(sentinel, metrics)
            if named_value is None:
                continue
            metric, value = named_value
            previous = self.memories.get(name, MetricMemory())
            memory = self.memories[name] = update_memory(sentinel, previous, value)
            if memory.streak == sentinel.patience:
                chosen = (evidence or {}).get(metric) or list(make_exhibits(sentinel, groups))
                self._alarm(step, name, metric, value, metrics, chosen)
                must_pause |= sentinel.action == "pause"
        return must_pause

    def state(self) -> dict[str, Any]:
        """Return the memory of all sentinels as JSON values."""
        return {
            name: {
                "first": list(memory.first_values),
                "recent": list(memory.recent_values),
                "streak": memory.streak,
            }
            for name, memory in self.memories.items()
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        self.memories = {
            name: MetricMemory(tuple(saved["first"]), tuple(saved["recent"]), saved["streak"])
            for name, saved in state.items()
        }

    def _alarm(
        self,
        step: int,
        name: str,
        metric: str,
        value: float | None,
        metrics: Metrics,
        exhibits: Sequence[Exhibit],
    ) -> None:
        """Log the alarm of the sentinel `name`, and write its evidence to a file."""
        sentinel = get_active_sentinels(self.config)[name]
        rule_text = _RULE_TEXTS[sentinel.rule].format(
            threshold=sentinel.threshold, window=sentinel.window
        )
        duration = f" for {sentinel.patience} steps" if sentinel.patience > 1 else ""
        is_custom = name in self.config.custom
        meaning = "" if is_custom else self.config.describe_field(name)
        number = "not finite" if value is None else f"{value:.4g}"
        alarm = f"{metric} = {number} {rule_text}{duration}"
        message = f"step {step}: sentinel {name}: {alarm}: {meaning}".rstrip(": ")
        worst = sorted(exhibits, key=lambda exhibit: -exhibit.weight)[:MAX_EXHIBITS]
        evidence = {
            "sentinel": name,
            "step": step,
            "message": message,
            **dict(sentinel),
            "history": [*self.memories[name].latest(2 * sentinel.window)],
            # Timings are left out, so that a resumed run writes the same files.
            "metrics": {
                key: content
                for key, content in metrics.items()
                if not key.startswith(MACHINE_PREFIXES)
            },
            "attempts": [_convert_to_json(exhibit) for exhibit in worst],
        }
        evidence_note = self._write_evidence(f"step-{step:08d}-{name}.json", evidence)
        symptom = SYMPTOMS.get(name)
        link = "" if symptom is None else f". {link_symptom(symptom)}"
        log.warning("%s%s%s", message, evidence_note, link)

    def _write_evidence(self, name: str, evidence: Mapping[str, Any]) -> str:
        """Write evidence to a file, and return a note for the log that says where it is."""
        if self.directory is None:
            return ""
        path = self.directory / name
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            replace_text(path, json.dumps(evidence, indent=1))
        except OSError as error:  # a full disk must not end the run
            return f" (its evidence can't be written: {error})"
        return f" ({path})"


def measure_repetition(rows: Sequence[Trajectory]) -> dict[str, float]:
    """Return the mean of `compute_repetition` over the attempts; {} if no attempt has a value."""
    if not rows:
        return {}
    # One call for all rows, because the overhead of a numpy call exceeds its work on one row.
    tokens = np.concatenate([row.tokens for row in rows])
    token_bytes = tokens[np.concatenate([row.owner for row in rows]) == POLICY].tobytes()
    size = tokens.itemsize
    byte_lengths = [size * row.completion_length for row in rows]
    shares = [
        compute_repeated_share(token_bytes[start:end], size, NGRAM)
        for start, end in pairwise(accumulate(byte_lengths, initial=0))
    ]
    known_shares = [share for share in shares if share is not None]
    return {"repetition": fmean(known_shares)} if known_shares else {}
