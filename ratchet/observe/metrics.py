"""Collects the numbers of one step under stable names, and merges those that come several times."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Literal, NamedTuple

Merge = Literal["mean", "sum", "last", "min", "max"]


class Sample(NamedTuple):
    value: float
    weight: float


class Origin(NamedTuple):
    """Who reports a metric, and how its samples merge: one name has one origin for a whole run."""

    prefix: str
    key: str
    merge: Merge


class MetricsManager:
    """Names are `prefix/key`, or `stage/prefix/key` where a stage is given; phases appear as `time/<phase>_s` (wall seconds).

    A number that comes several times a step is merged: `mean` (weighted), `sum`, `last`, `min` or `max`. A result that is not
    finite becomes None (null in JSON, which knows no NaN) beside a note `<name>/nan`, `<name>/inf` or `<name>/-inf` of value 1.
    """

    def __init__(self, stage: str = "", *, clock: Callable[[], float] = time.monotonic) -> None:
        self._root = f"{stage}/" if stage else ""
        self._clock = clock
        self._origins: dict[str, Origin] = {}
        self._samples: dict[str, list[Sample]] = {}

    def add(self, prefix: str, numbers: Mapping[str, float], *, merge: Merge = "mean", weight: float = 1.0) -> None:
        """Adds numbers (or whatever `float` takes: numpy scalars, 0-dim tensors) to the step in progress.

        Raises ValueError when a name is already reported from elsewhere or by another rule, TypeError for what is no number.
        """
        for key, value in numbers.items():
            name = f"{self._root}{prefix}/{key}"
            origin = Origin(prefix, key, merge)
            known = self._origins.setdefault(name, origin)
            if known != origin:
                raise ValueError(
                    f"metric '{name}' is reported as {_describe(known)} and as {_describe(origin)}: rename one of them"
                )
            if isinstance(value, str):
                raise TypeError(f"metric '{name}' is the text {value!r}, not a number")
            self._samples.setdefault(name, []).append(Sample(float(value), weight))

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Times the block, also when it raises; a phase entered several times a step is summed."""
        start = self._clock()
        try:
            yield
        finally:
            self.add("time", {f"{name}_s": self._clock() - start}, merge="sum")

    def flush(self, step: int) -> dict[str, float | None]:
        """The metrics of `step`, sorted by name; the next step starts empty."""
        assert step >= 0, step
        merged: dict[str, float | None] = {}
        for name, samples in sorted(self._samples.items()):
            value = _RULES[self._origins[name].merge](samples)
            if math.isfinite(value):
                merged[name] = value
            else:
                merged[name] = None
                merged[f"{name}/{value}"] = 1.0  # nan, inf or -inf
        self._samples = {}
        return merged


def _describe(origin: Origin) -> str:
    return f"the {origin.merge} of '{origin.key}' under '{origin.prefix}'"


def _mean(samples: Sequence[Sample]) -> float:
    """Weighted; a sample of weight 0 has no part in it, even where it is not finite. NaN when all weights are 0."""
    counted = [sample for sample in samples if sample.weight != 0]
    if not counted:
        return math.nan
    return _sum([Sample(value * weight, 1.0) for value, weight in counted]) / sum(weight for _, weight in counted)


def _sum(samples: Sequence[Sample]) -> float:
    return sum(value for value, _ in samples)  # not math.fsum: it raises where inf meets -inf


def _last(samples: Sequence[Sample]) -> float:
    return samples[-1].value


def _extreme(choose: Callable[[Iterator[float]], float]) -> Callable[[Sequence[Sample]], float]:
    def rule(samples: Sequence[Sample]) -> float:
        if any(math.isnan(value) for value, _ in samples):  # min and max would hide it, depending on the order
            return math.nan
        return choose(value for value, _ in samples)

    return rule


_RULES: dict[Merge, Callable[[Sequence[Sample]], float]] = {
    "mean": _mean,
    "sum": _sum,
    "last": _last,
    "min": _extreme(min),
    "max": _extreme(max),
}
