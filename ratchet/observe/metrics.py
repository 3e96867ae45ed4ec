"""Collect the numbers of one step under stable names, and merge samples of the same name."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ratchet.observe.reducers import Histogram, Reducer, reduce_samples
from ratchet.types import Group

MACHINE_PREFIXES = ("time/", "system/")  # prefixes of metrics that differ between runs

Samples = float | Sequence[float] | NDArray[np.floating]


class MetricOrigin(NamedTuple):
    """The source of a metric, and the rule that merges its samples.

    The origin of a name never changes during a run.
    """

    prefix: str  # with labels, such as `rollout/tag/maths`
    key: str
    reducer: Reducer


class StepMetrics(dict[str, float | None]):
    """The metrics of a step: numbers by name, and what sinks can show beside them.

    Args:
        histograms: Histograms by name.
        groups: The groups that the step trained on.
    """

    def __init__(
        self,
        numbers: Mapping[str, float | None],
        histograms: Mapping[str, Histogram],
        groups: Sequence[Group] = (),
    ) -> None:
        super().__init__(numbers)
        self.histograms = dict(histograms)
        self.groups = groups


class MetricsManager:
    """A collector of metrics. Names are `prefix/key`, or `stage/prefix/key` with a stage.

    Samples that belong to a domain or an environment appear as `prefix/<label>/<value>/key`, such
    as `rollout/tag/maths/reward`.

    `declare` or the first `add` of a metric sets how its samples merge. A result that is not finite
    becomes None (null in JSON, which has no NaN). A second metric `<name>/nan`, `<name>/inf` or
    `<name>/-inf` with value 1 then says which value it was.
    """

    def __init__(self, stage: str = "") -> None:
        self._name_prefix = f"{stage}/" if stage else ""
        self._declared: dict[tuple[str, str], Reducer] = {}
        self._origins: dict[str, MetricOrigin] = {}
        # The samples of the step in progress, and the weight of each.
        self._samples: dict[str, tuple[list[float], list[float]]] = {}

    def declare(self, prefix: str, reducers: Mapping[str, Reducer]) -> None:
        """Set how metrics of these keys merge, with any labels.

        Raises ValueError if a key is already declared with another rule.
        """
        for key, reducer in reducers.items():
            declared = self._declared.setdefault((prefix, key), reducer)
            if declared != reducer:
                raise ValueError(
                    f"metric '{prefix}/{key}' is declared as {declared} and as {reducer}: rename "
                    "one of them"
                )

    def add(
        self,
        prefix: str,
        samples_by_key: Mapping[str, Samples],
        *,
        merge: Reducer | None = None,
        weight: float = 1.0,
        labels: Mapping[str, str] | None = None,
    ) -> None:
        """Add samples of metrics to the step in progress.

        Args:
            prefix: The first part of the name.
            samples_by_key: One or several samples by key. A sample is anything that `float` takes,
                such as a numpy scalar or a 0-dim tensor.
            merge: How samples merge; None: as declared, or the mean if nothing is declared.
            weight: Weight of each of these samples when they merge.
            labels: Values by label, for the name: {"tag": "maths"} adds `tag/maths/`.

        Raises:
            ValueError: A name already has another origin or merges by another rule.
            TypeError: A sample is not a number.
        """
        label_path = "".join(f"{label}/{value}/" for label, value in (labels or {}).items())
        for key, values in samples_by_key.items():
            name = f"{self._name_prefix}{prefix}/{label_path}{key}"
            declared = self._declared.get((prefix, key))
            origin = MetricOrigin(
                f"{prefix}/{label_path}".rstrip("/"), key, merge or declared or "mean"
            )
            self._register_origin(name, origin)
            if declared is not None and declared != origin.reducer:
                raise ValueError(
                    f"metric '{name}' is declared as {declared} and reported as {_describe(origin)}"
                )
            if samples := _convert_to_floats(name, values):
                known_samples, weights = self._samples.setdefault(name, ([], []))
                known_samples += samples
                weights += [weight] * len(samples)

    def flush(self, step: int, groups: Sequence[Group] = ()) -> StepMetrics:
        """Return the metrics of `step`, sorted by name, and start the next step empty.

        Args:
            groups: The groups that the step trained on, for sinks that show attempts.
        """
        assert step >= 0, step
        numbers: dict[str, float | None] = {}
        histograms: dict[str, Histogram] = {}
        for name, (samples, weights) in sorted(self._samples.items()):
            value = reduce_samples(self._origins[name].reducer, samples, weights)
            if isinstance(value, Histogram):
                if value.count:
                    histograms[name] = value
            elif math.isfinite(value):
                numbers[name] = value
            else:
                numbers[name] = None
                numbers[f"{name}/{value}"] = 1.0  # nan, inf or -inf
        self._samples = {}
        return StepMetrics(numbers, histograms, groups)

    def _register_origin(self, name: str, origin: MetricOrigin) -> None:
        """Set the origin of a name. Raises ValueError if the name has another one."""
        registered = self._origins.setdefault(name, origin)
        if registered != origin:
            raise ValueError(
                f"metric '{name}' is reported as {_describe(registered)} and as "
                f"{_describe(origin)}: rename one of them"
            )


def _convert_to_floats(name: str, values: Samples) -> list[float]:
    """Return one or several samples as floats. Raises TypeError for text."""
    is_sequence = isinstance(values, list | tuple) or (
        isinstance(values, np.ndarray) and values.ndim
    )
    samples: Any = values if is_sequence else [values]
    if text := next((sample for sample in samples if isinstance(sample, str)), None):
        raise TypeError(f"metric '{name}' is the text {text!r}, not a number")
    return [float(sample) for sample in samples]


def _describe(origin: MetricOrigin) -> str:
    return f"the {origin.reducer} of '{origin.key}' under '{origin.prefix}'"
