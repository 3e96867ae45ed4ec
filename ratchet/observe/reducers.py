"""Reducers merge a metric's samples from all ranks and micro-batches into a number or histogram.

A `Partial` is the state of a reducer after some of the samples. Merging the partials of any split
gives, to the last bit, the result of one partial of all samples: sums are kept exactly and rounded
once, percentiles keep their samples, histograms have fixed bins. Only `last` depends on the order:
the partial that is merged into another holds the later sample.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import pairwise
from typing import Literal, Protocol

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


class Partial(Protocol):
    """The state of a reducer after some of the samples."""

    def add(self, values: Sequence[float], weight: float) -> None: ...
    def merge(self, other: Partial) -> None:
        """Merge another partial of the same reducer into this one; the other is not changed."""
        ...

    def result(self) -> float | Histogram: ...


def new_partial(reducer: Reducer) -> Partial:
    """Return an empty partial of the reducer."""
    if isinstance(reducer, Percentile):
        return _PercentilePartial(reducer.percent)
    if isinstance(reducer, Bins):
        return _HistogramPartial(reducer)
    return _MERGES[reducer]()


@dataclass(slots=True)
class ExactSum:
    """A sum without rounding, kept as a few numbers that add up to it.

    Infinite and NaN values are summed separately.
    """

    terms: list[float] = field(default_factory=list)
    nonfinite_sum: float = 0.0

    def add(self, values: Sequence[float]) -> None:
        if not all(map(math.isfinite, values)):
            self.nonfinite_sum = sum(
                (value for value in values if not math.isfinite(value)), self.nonfinite_sum
            )
            values = [value for value in values if math.isfinite(value)]
        self.terms = _compact([*self.terms, *values])

    def merge(self, other: ExactSum) -> None:
        self.terms = _compact([*self.terms, *other.terms])
        self.nonfinite_sum += other.nonfinite_sum

    def result(self) -> float:
        return _round_sum(self.terms) if self.nonfinite_sum == 0 else self.nonfinite_sum


def _compact(values: list[float]) -> list[float]:
    """Return a few numbers with exactly the same sum.

    The first is the rounded sum, the second the rounded error of the first, and so on.
    """
    if len(values) < 2:
        return values
    remaining, terms = values, list[float]()
    try:
        while (rounded_sum := math.fsum(remaining)) != 0:
            terms.append(rounded_sum)
            remaining = [*remaining, -rounded_sum]
    except OverflowError:  # an intermediate sum overflows, though perhaps not the final one
        return values
    return terms


def _round_sum(terms: Sequence[float]) -> float:
    try:
        return math.fsum(terms)
    except OverflowError:
        exact = sum(map(Fraction, terms), Fraction())
    try:
        return float(exact)
    except OverflowError:
        return math.inf if exact > 0 else -math.inf


@dataclass(slots=True)
class _SumPartial:
    total: ExactSum = field(default_factory=ExactSum)

    def add(self, values: Sequence[float], weight: float) -> None:
        self.total.add(values)

    def merge(self, other: Partial) -> None:
        assert isinstance(other, _SumPartial)
        self.total.merge(other.total)

    def result(self) -> float:
        return self.total.result()


@dataclass(slots=True)
class _MeanPartial:
    """A weighted mean, NaN if all weights are 0.

    Samples of weight 0 are left out, even if they are not finite.
    """

    total: ExactSum = field(default_factory=ExactSum)
    weights: ExactSum = field(default_factory=ExactSum)

    def add(self, values: Sequence[float], weight: float) -> None:
        if weight != 0:
            self.total.add(values if weight == 1 else [value * weight for value in values])
            self.weights.add([weight] * len(values))

    def merge(self, other: Partial) -> None:
        assert isinstance(other, _MeanPartial)
        self.total.merge(other.total)
        self.weights.merge(other.weights)

    def result(self) -> float:
        weights = self.weights.result()
        return self.total.result() / weights if weights else math.nan


class _RatePartial(_MeanPartial):
    """The sum of the samples over the sum of the weights, such as tokens over seconds."""

    __slots__ = ()

    def add(self, values: Sequence[float], weight: float) -> None:
        self.total.add(values)
        self.weights.add([weight] * len(values))


@dataclass(slots=True)
class _LastPartial:
    value: float = math.nan

    def add(self, values: Sequence[float], weight: float) -> None:
        self.value = values[-1]

    def merge(self, other: Partial) -> None:
        assert isinstance(other, _LastPartial)
        self.value = other.value

    def result(self) -> float:
        return self.value


@dataclass(slots=True)
class _ExtremePartial:
    choose: Callable[[float, float], float]
    value: float | None = None

    def add(self, values: Sequence[float], weight: float) -> None:
        for value in values:
            self._update(value)

    def merge(self, other: Partial) -> None:
        assert isinstance(other, _ExtremePartial)
        if other.value is not None:
            self._update(other.value)

    def _update(self, value: float) -> None:
        current = value if self.value is None else self.value
        # With Python's min and max, the result of a NaN would depend on the order.
        self.value = (
            math.nan if math.isnan(current) or math.isnan(value) else self.choose(current, value)
        )

    def result(self) -> float:
        return math.nan if self.value is None else self.value


@dataclass(slots=True)
class _PercentilePartial:
    percent: float
    values: list[float] = field(default_factory=list)

    def add(self, values: Sequence[float], weight: float) -> None:
        if weight != 0:
            self.values.extend(values)

    def merge(self, other: Partial) -> None:
        assert isinstance(other, _PercentilePartial)
        self.values.extend(other.values)

    def result(self) -> float:
        if not self.values or any(map(math.isnan, self.values)):
            return math.nan
        ordered = sorted(self.values)
        position = (len(ordered) - 1) * self.percent / 100
        low, fraction = ordered[int(position)], position - int(position)
        if fraction == 0:
            return low
        high = ordered[int(position) + 1]
        return low if low == high else low * (1 - fraction) + high * fraction


@dataclass(slots=True)
class _HistogramPartial:
    bins: Bins
    counts: list[int] = field(default_factory=list)
    total: ExactSum = field(default_factory=ExactSum)
    squares: ExactSum = field(default_factory=ExactSum)
    lowest: float = math.inf
    highest: float = -math.inf

    def __post_init__(self) -> None:
        self.counts = [0] * (len(self.bins.edges) - 1)

    def add(self, values: Sequence[float], weight: float) -> None:
        """Count the finite samples; the others lie in no bin."""
        if weight == 0 or not (finite := [value for value in values if math.isfinite(value)]):
            return
        bin_indices = np.searchsorted(self.bins.edges[1:-1], finite, side="right")
        counts = np.bincount(bin_indices, minlength=len(self.counts))
        self.counts = [count + int(added) for count, added in zip(self.counts, counts, strict=True)]
        self.total.add(finite)
        self.squares.add([value * value for value in finite])
        self.lowest = min(self.lowest, *finite)
        self.highest = max(self.highest, *finite)

    def merge(self, other: Partial) -> None:
        assert isinstance(other, _HistogramPartial)
        assert other.bins == self.bins
        self.counts = [
            count + added for count, added in zip(self.counts, other.counts, strict=True)
        ]
        self.total.merge(other.total)
        self.squares.merge(other.squares)
        self.lowest = min(self.lowest, other.lowest)
        self.highest = max(self.highest, other.highest)

    def result(self) -> Histogram:
        sums = self.total.result(), self.squares.result()
        return Histogram(self.bins.edges, tuple(self.counts), self.lowest, self.highest, *sums)


_MERGES: dict[Merge, Callable[[], Partial]] = {
    "mean": _MeanPartial,
    "sum": _SumPartial,
    "rate": _RatePartial,
    "last": _LastPartial,
    "min": lambda: _ExtremePartial(min),
    "max": lambda: _ExtremePartial(max),
}
