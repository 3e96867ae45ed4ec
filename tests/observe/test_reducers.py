"""Samples in any order give the same result, to the last bit."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ratchet.observe.reducers import Bins, Histogram, Percentile, Reducer, reduce_samples

IN_ANY_ORDER: list[Reducer] = [
    "mean",
    "sum",
    "rate",
    "min",
    "max",
    Percentile(50),
    Percentile(95),
    Bins((-1.0, 0.0, 0.5, 8.0)),
]
NUMBERS = st.one_of(
    st.floats(),
    st.floats(-10, 10),
    st.sampled_from([0.0, 1e300, -1e300, 1.7e308, -1.7e308, 5e-324]),
)
SAMPLES = st.lists(st.tuples(NUMBERS, st.sampled_from([0.0, 0.1, 1.0, 3.0])), max_size=40)
Samples = Sequence[tuple[float, float]]


def of(reducer: Reducer, samples: Samples) -> float | Histogram:
    return reduce_samples(
        reducer, [value for value, _ in samples], [weight for _, weight in samples]
    )


def same(a: float | Histogram, b: float | Histogram) -> bool:
    if isinstance(a, float) and isinstance(b, float):
        return a == b or (math.isnan(a) and math.isnan(b))
    return a == b


@given(SAMPLES, st.randoms(use_true_random=False))
@pytest.mark.parametrize("reducer", IN_ANY_ORDER, ids=str)
def test_the_order_does_not_matter(reducer: Reducer, samples: list[tuple[float, float]], random):
    whole = of(reducer, samples)
    random.shuffle(samples)
    assert same(of(reducer, samples), whole)


@given(SAMPLES.filter(bool))
def test_the_last_is_the_last(samples: Samples):
    assert same(of("last", samples), samples[-1][0])


@given(st.lists(st.floats(allow_nan=False, allow_infinity=False), min_size=1, max_size=30))
def test_a_sum_is_rounded_once(values: list[float]):
    exact = sum(map(Fraction, values), Fraction())
    try:
        expected = float(exact)
    except OverflowError:
        expected = math.inf if exact > 0 else -math.inf
    assert of("sum", [(value, 1.0) for value in values]) == expected


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=50), st.floats(0, 100))
def test_percentiles_are_those_of_numpy(values: list[float], percent: float):
    assert of(Percentile(percent), [(v, 1.0) for v in values]) == pytest.approx(
        np.percentile(values, percent)
    )


@given(st.lists(st.floats(-3, 3), min_size=1, max_size=50))
def test_bins_are_those_of_numpy(values: list[float]):
    edges = (-2.0, -0.5, 0.0, 1.0, 2.0)
    found = of(Bins(edges), [(v, 1.0) for v in values])
    assert isinstance(found, Histogram)
    assert found.counts == tuple(np.histogram(np.clip(values, -2, 2), edges)[0])
    assert (found.lowest, found.highest) == (min(values), max(values))


def test_by_hand():
    samples = [(1.0, 1.0), (4.0, 3.0), (math.inf, 0.0)]
    assert of("mean", samples) == 3.25
    assert of("sum", samples[:2]) == 5.0
    assert of("rate", samples[:2]) == 1.25
    assert of("max", samples[:2]) == 4.0
    assert of(Percentile(50), samples) == 2.5
    assert of(Percentile(95), [(float(i), 1.0) for i in range(101)]) == 95.0


@pytest.mark.parametrize("reducer", ["mean", "last", "min", "max", Percentile(5)])
def test_of_nothing_there_is_no_number(reducer: Reducer):
    assert math.isnan(of(reducer, []))  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("edges", [(0.0,), (0.0, 0.0), (1.0, 0.0)])
def test_edges_rise(edges: tuple[float, ...]):
    with pytest.raises(AssertionError):
        Bins(edges)
