"""Collects the numbers of one step under stable names, and merges those that come several times."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ratchet.observe.reducers import Histogram, Partial, Reducer, partial

OF_THE_MACHINE = ("time/", "system/")  # metrics in which two runs of one recipe differ

Samples = float | Sequence[float] | NDArray[np.floating]


class Origin(NamedTuple):
    """Who reports a metric, and how its samples merge: one name has one origin for a whole run."""

    prefix: str
    key: str
    reducer: Reducer


class StepMetrics(dict[str, float | None]):
    """The numbers of a step by name; beside them the histograms, for whoever can show such."""

    def __init__(
        self, numbers: Mapping[str, float | None], histograms: Mapping[str, Histogram]
    ) -> None:
        super().__init__(numbers)
        self.histograms = dict(histograms)


class MetricsManager:
    """Names are `prefix/key`, or `stage/prefix/key` where a stage is given; phases appear as
    `time/<phase>_s` (wall seconds). Where samples belong to a domain or an environment,
    `prefix/<label>/<of>/key`, as `rollout/tag/maths/reward`.

    A metric declares once how its samples merge (`declare`, or the first `add`). A result that is
    not finite becomes None (null in JSON, which knows no NaN) beside a note `<name>/nan`,
    `<name>/inf` or `<name>/-inf` of value 1.
    """

    def __init__(self, stage: str = "", *, clock: Callable[[], float] = time.monotonic) -> None:
        self._root = f"{stage}/" if stage else ""
        self._clock = clock
        self._declared: dict[tuple[str, str], Reducer] = {}
        self._origins: dict[str, Origin] = {}
        self._partials: dict[str, Partial] = {}

    def declare(self, prefix: str, reducers: Mapping[str, Reducer]) -> None:
        """How the metrics of these keys merge, whatever they belong to. Raises ValueError for one
        that merges otherwise."""
        for key, reducer in reducers.items():
            known = self._declared.setdefault((prefix, key), reducer)
            if known != reducer:
                raise ValueError(
                    f"metric '{prefix}/{key}' is declared as {known} and as {reducer}: rename one "
                    "of them"
                )

    def add(
        self,
        prefix: str,
        numbers: Mapping[str, Samples],
        *,
        merge: Reducer | None = None,
        weight: float = 1.0,
        of: Mapping[str, str] | None = None,
    ) -> None:
        """Adds numbers (or whatever `float` takes: numpy scalars, 0-dim tensors), or several
        samples of each, to the step in progress. merge: None: as declared, else the mean. of: what
        they belong to, by label.

        Raises ValueError when a name is already reported from elsewhere or by another rule,
        TypeError for what is no number.
        """
        labels = "".join(f"{label}/{value}/" for label, value in (of or {}).items())
        for key, values in numbers.items():
            name = f"{self._root}{prefix}/{labels}{key}"
            declared = self._declared.get((prefix, key))
            origin = Origin(f"{prefix}/{labels}".rstrip("/"), key, merge or declared or "mean")
            self._claim(name, origin)
            if declared is not None and declared != origin.reducer:
                raise ValueError(
                    f"metric '{name}' is declared as {declared} and reported as {_describe(origin)}"
                )
            if samples := _samples(name, values):
                if name not in self._partials:
                    self._partials[name] = partial(origin.reducer)
                self._partials[name].add(samples, weight)

    def partials(self) -> dict[str, tuple[Origin, Partial]]:
        """What is known of the step in progress, for `merge` of another manager; the step starts
        empty again here."""
        found = {name: (self._origins[name], known) for name, known in self._partials.items()}
        self._partials = {}
        return found

    def merge(self, partials: Mapping[str, tuple[Origin, Partial]]) -> None:
        """Adds what another rank, or another micro-batch, knows of the same step. Raises ValueError
        as `add` does."""
        for name, (origin, known) in partials.items():
            self._claim(name, origin)
            self._partials.setdefault(name, partial(origin.reducer)).merge(known)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Times the block, also when it raises; a phase entered several times a step is summed."""
        start = self._clock()
        try:
            yield
        finally:
            self.add("time", {f"{name}_s": self._clock() - start}, merge="sum")

    def flush(self, step: int) -> StepMetrics:
        """The metrics of `step`, sorted by name; the next step starts empty."""
        assert step >= 0, step
        numbers: dict[str, float | None] = {}
        histograms: dict[str, Histogram] = {}
        for name, known in sorted(self._partials.items()):
            value = known.result()
            if isinstance(value, Histogram):
                if value.count:
                    histograms[name] = value
            elif math.isfinite(value):
                numbers[name] = value
            else:
                numbers[name] = None
                numbers[f"{name}/{value}"] = 1.0  # nan, inf or -inf
        self._partials = {}
        return StepMetrics(numbers, histograms)

    def _claim(self, name: str, origin: Origin) -> None:
        known = self._origins.setdefault(name, origin)
        if known != origin:
            raise ValueError(
                f"metric '{name}' is reported as {_describe(known)} and as {_describe(origin)}: "
                "rename one of them"
            )


def _samples(name: str, values: Samples) -> list[float]:
    several = isinstance(values, list | tuple) or (isinstance(values, np.ndarray) and values.ndim)
    samples: Sequence[Any] = values if several else [values]  # pyright: ignore[reportAssignmentType]
    if text := next((sample for sample in samples if isinstance(sample, str)), None):
        raise TypeError(f"metric '{name}' is the text {text!r}, not a number")
    return [float(sample) for sample in samples]


def _describe(origin: Origin) -> str:
    return f"the {origin.reducer} of '{origin.key}' under '{origin.prefix}'"
