"""Early stopping: end a stage after several evaluations without improvement."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ratchet.config.schema import EvaluationConfig
from ratchet.errors import ConfigError


def get_signed_metric(metric: str, metrics: Mapping[str, float | None]) -> float | None:
    """Return the value of a metric, or None if it was not measured.

    A leading minus in the name, as in "-eval/loss", negates the value. Higher is then better for
    every metric.
    """
    value = metrics.get(metric.removeprefix("-"))
    return -value if metric.startswith("-") and value is not None else value


@dataclass(frozen=True)
class EarlyStopping:
    """The early-stopping rule of a stage.

    Attributes:
        evaluations: The stage ends after this many evaluations in a row without an improvement.
        metric: The metric that must improve.
        min_gain: An improvement must be larger than this.
    """

    evaluations: int
    metric: str
    min_gain: float = 0.0

    @classmethod
    def from_config(cls, settings: EvaluationConfig) -> EarlyStopping | None:
        """Return the rule that a recipe sets, or None if it sets none."""
        return (
            cls(settings.patience, settings.metric, settings.min_gain)
            if settings.patience
            else None
        )

    def update(
        self, metrics: Mapping[str, float | None], best: float | None, evaluations_since_best: int
    ) -> tuple[float | None, int]:
        """Return the new (best, evaluations_since_best) after an evaluation.

        If all attempts failed and the metric is None, the evaluation counts as no improvement.

        Args:
            metrics: The metrics of the evaluation.
            best: The best value so far; None before the first.
            evaluations_since_best: The number of evaluations since the best value.

        Raises:
            ConfigError: If the evaluation does not report the metric.
        """
        name = self.metric.removeprefix("-")
        if name not in metrics:
            reported = ", ".join(sorted(key for key in metrics if key.startswith("eval/")))
            raise ConfigError(
                f"evaluation.metric={self.metric} is not reported by the evaluation. Set it to one "
                f"of {reported}"
            )
        value = get_signed_metric(self.metric, metrics)
        if value is not None and (best is None or value > best + self.min_gain):
            return value, 0
        return best, evaluations_since_best + 1
