"""Merge rules by hand-worked numbers; names that stay."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from ratchet.observe.metrics import MetricsManager
from ratchet.observe.reducers import Bins, Merge, Percentile


@pytest.mark.parametrize(
    ("merge", "expected"),
    [("mean", 2.5), ("sum", 10.0), ("last", 0.0), ("min", -1.0), ("max", 8.0)],
)
def test_merge_rules(merge: Merge, expected: float) -> None:
    metrics = MetricsManager()
    for value in (3.0, -1.0, 8.0, 0.0):
        metrics.add("rollout", {"x": value}, merge=merge)
    assert metrics.flush(1) == {"rollout/x": expected}


def test_the_mean_is_weighted() -> None:
    metrics = MetricsManager()
    metrics.add("policy", {"loss": 1.0}, weight=3.0)
    metrics.add("policy", {"loss": 5.0}, weight=1.0)
    metrics.add("policy", {"loss": math.inf}, weight=0.0)
    assert metrics.flush(1) == {"policy/loss": 2.0}


def test_all_weights_zero_is_no_number() -> None:
    metrics = MetricsManager()
    metrics.add("policy", {"loss": 1.0}, weight=0.0)
    assert metrics.flush(1) == {"policy/loss": None, "policy/loss/nan": 1.0}


def test_names_are_sorted_and_carry_the_stage() -> None:
    metrics = MetricsManager(stage="rl")
    metrics.add("rollout", {"reward": 0.5, "reward/format": 1.0})
    metrics.add("policy", {"loss": 0.1})
    assert list(metrics.flush(1)) == [
        "rl/policy/loss",
        "rl/rollout/reward",
        "rl/rollout/reward/format",
    ]


def test_a_step_starts_empty() -> None:
    metrics = MetricsManager()
    metrics.add("a", {"x": 1.0}, merge="sum")
    metrics.flush(1)
    assert metrics.flush(2) == {}
    metrics.add("a", {"x": 2.0}, merge="sum")
    assert metrics.flush(3) == {"a/x": 2.0}


@pytest.mark.parametrize(
    ("values", "merge", "note"),
    [
        ([math.nan], "last", "nan"),
        ([math.inf, 1.0], "mean", "inf"),
        ([-math.inf], "sum", "-inf"),
        ([math.inf, -math.inf], "sum", "nan"),
        ([1.0, math.nan], "max", "nan"),
        ([math.nan, 1.0], "min", "nan"),
        ([1e308, 1e308], "sum", "inf"),
    ],
)
def test_what_is_not_finite_becomes_null_with_a_note(
    values: list[float], merge: Merge, note: str
) -> None:
    metrics = MetricsManager()
    for value in values:
        metrics.add("policy", {"kl": value}, merge=merge)
    flushed = metrics.flush(1)
    assert flushed == {"policy/kl": None, f"policy/kl/{note}": 1.0}
    assert json.loads(json.dumps(flushed, allow_nan=False)) == flushed


def test_one_name_has_one_origin() -> None:
    metrics = MetricsManager()
    metrics.add("a", {"b/c": 1.0})
    with pytest.raises(ValueError, match=r"'a/b/c'.*'b/c' under 'a'.*'c' under 'a/b'.*rename"):
        metrics.add("a/b", {"c": 1.0})
    with pytest.raises(ValueError, match=r"the mean of 'b/c' .* the sum of 'b/c'"):
        metrics.add("a", {"b/c": 1.0}, merge="sum")


def test_a_clash_is_seen_across_steps() -> None:
    metrics = MetricsManager()
    metrics.add("a", {"x": 1.0})
    metrics.flush(1)
    with pytest.raises(ValueError, match="'a/x'"):
        metrics.add("a", {"x": 1.0}, merge="max")


@pytest.mark.parametrize("value", ["1.0", None, ["1.0"], [1.0, None]])
def test_only_numbers(value: object) -> None:
    with pytest.raises(TypeError):
        MetricsManager().add("a", {"x": value})  # pyright: ignore[reportArgumentType]


def test_samples_by_domain_merge_as_they_were_declared() -> None:
    metrics = MetricsManager()
    metrics.declare("rollout", {"reward": "mean", "length_p50": Percentile(50)})
    metrics.add(
        "rollout", {"reward": [1.0, 0.0, 0.5], "length_p50": (7, 1, 3)}, labels={"tag": "maths"}
    )
    metrics.add("rollout", {"reward": np.array([0.0])}, labels={"tag": "maths"})
    metrics.add("rollout", {"reward": [], "length_p50": 4}, labels={"tag": "code"})
    assert metrics.flush(1) == {
        "rollout/tag/code/length_p50": 4.0,
        "rollout/tag/maths/length_p50": 3.0,
        "rollout/tag/maths/reward": 0.375,
    }


def test_a_metric_is_declared_once() -> None:
    metrics = MetricsManager()
    metrics.declare("rollout", {"reward": "max"})
    metrics.declare("rollout", {"reward": "max"})
    with pytest.raises(ValueError, match="declared as max and as mean"):
        metrics.declare("rollout", {"reward": "mean"})
    with pytest.raises(ValueError, match="is declared as max and reported as the min"):
        metrics.add("rollout", {"reward": 1.0}, merge="min")


def test_histograms_are_beside_the_numbers() -> None:
    metrics = MetricsManager()
    metrics.add("rollout", {"length": [0.0, 1.0, 3.0, 9.0, -1.0]}, merge=Bins((0.0, 1.0, 4.0)))
    flushed = metrics.flush(1)
    found = flushed.histograms["rollout/length"]
    assert flushed == {}
    assert found.counts == (2, 3)
    assert (found.count, found.lowest, found.highest, found.total, found.squares) == (
        5,
        -1.0,
        9.0,
        12.0,
        92.0,
    )
