"""Reducers merge the samples of a metric into a number or a histogram.

Except for `last`, the result does not depend on the order of the samples: sums are rounded once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from typing import Literal

import numpy as np

Merge = Literal["mean", "sum", "last", "min", "max", "rate"]


@dataclass(frozen=True, slots=True)
class Percentile:
    """The exact percentile of the samples, by linear interpolation between two of them.

    A weight of 0 leaves a sample out; other weights do not matter.
    """

    percent: float

    def __post_init__(self) -> None:
        assert 0 <= self.percent <= 100, self.percent


@dataclass(frozen=True, slots=True)
class Bins:
    """A histogram of k bins [low, high) between k + 1 increasing edges.

    The last bin includes its upper edge. Finite samples beyond the edges count in the nearest bin.
    A weight of 0 leaves a sample out; other weights do not matter.
    """

    edges: tuple[float, ...]

    def __post_init__(self) -> None:
        assert len(self.edges) > 1, self.edges
        assert all(low < high for low, high in pairwise(self.edges)), self.edges


Reducer = Merge | Percentile | Bins


@dataclass(frozen=True, slots=True)
class Histogram:
    """A histogram of samples.

    counts: number of samples in each bin between two edges.
    lowest, highest, total, squares: minimum, maximum, sum and sum of squares of the samples.
    """

    edges: tuple[float, ...]
    counts: tuple[int, ...]
    lowest: float
    highest: float
    total: float
    squares: float

    @property
    def count(self) -> int:
        return sum(self.counts)


def reduce_samples(
    reducer: Reducer, values: Sequence[float], weights: Sequence[float]
) -> float | Histogram:
    """Return the result of a metric's samples, NaN if none counts.

    A mean leaves samples of weight 0 out, even if they are not finite. A rate is the sum of the
    samples over the sum of the weights, such as tokens over seconds.
    """
    counted = [value for value, weight in zip(values, weights, strict=True) if weight != 0]
    if isinstance(reducer, Percentile):
        return _interpolate_percentile(counted, reducer.percent)
    if isinstance(reducer, Bins):
        return _count_in_bins(counted, reducer.edges)
    if reducer == "sum":
        return _sum_exactly(values)
    if reducer == "rate":
        return _divide(_sum_exactly(values), _sum_exactly(weights))
    if reducer == "mean":
        weighted = [v * weight for v, weight in zip(values, weights, strict=True) if weight != 0]
        return _divide(_sum_exactly(weighted), _sum_exactly(weights))
    # With Python's min and max, the result of a NaN would depend on the order.
    if not values or (reducer != "last" and any(map(math.isnan, values))):
        return math.nan
    return {"last": values[-1], "min": min(values), "max": max(values)}[reducer]


def _divide(total: float, weight: float) -> float:
    return total / weight if weight else math.nan


def _sum_exactly(values: Sequence[float]) -> float:
    """Return the sum, rounded once; that of the infinite and NaN values if there are any."""
    if nonfinite := [value for value in values if not math.isfinite(value)]:
        return sum(nonfinite)
    try:
        return math.fsum(values)
    except OverflowError:  # an intermediate sum overflows, though perhaps not the final one
        exact = sum(map(Fraction, values), Fraction())
    try:
        return float(exact)
    except OverflowError:
        return math.inf if exact > 0 else -math.inf


def _interpolate_percentile(values: Sequence[float], percent: float) -> float:
    if not values or any(map(math.isnan, values)):
        return math.nan
    ordered = sorted(values)
    position = (len(ordered) - 1) * percent / 100
    low, fraction = ordered[int(position)], position - int(position)
    if fraction == 0:
        return low
    high = ordered[int(position) + 1]
    return low if low == high else low * (1 - fraction) + high * fraction


def _count_in_bins(values: Sequence[float], edges: tuple[float, ...]) -> Histogram:
    """Return the histogram of the finite samples; the others lie in no bin."""
    finite = [value for value in values if math.isfinite(value)]
    bin_indices = np.searchsorted(edges[1:-1], finite, side="right")
    return Histogram(
        edges,
        tuple(np.bincount(bin_indices, minlength=len(edges) - 1).tolist()),
        min(finite, default=math.inf),
        max(finite, default=-math.inf),
        _sum_exactly(finite),
        _sum_exactly([value * value for value in finite]),
    )
