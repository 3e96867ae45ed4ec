"""When a stage has stopped getting better."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ratchet.config.schema import EvaluationConfig
from ratchet.errors import ConfigError


def signed(metric: str, metrics: Mapping[str, float | None]) -> float | None:
    """The value of a metric, the higher the better: "-eval/loss" is its negative. None where it was
    not measured."""
    value = metrics.get(metric.removeprefix("-"))
    return -value if metric.startswith("-") and value is not None else value


@dataclass(frozen=True)
class Patience:
    """evaluations: in a row that may pass without a `metric` better than the best so far by more
    than `min_gain`."""

    evaluations: int
    metric: str
    min_gain: float = 0.0

    @classmethod
    def of(cls, settings: EvaluationConfig) -> Patience | None:
        return (
            cls(settings.patience, settings.metric, settings.min_gain)
            if settings.patience
            else None
        )

    def after(
        self, metrics: Mapping[str, float | None], best: float | None, fruitless: int
    ) -> tuple[float | None, int]:
        """(best, evaluations in a row since then) with those of one more. What could not be
        measured, as all attempts failed, is no better. Raises ConfigError for a metric that nobody
        reports."""
        name = self.metric.removeprefix("-")
        if name not in metrics:
            known = ", ".join(sorted(key for key in metrics if key.startswith("eval/")))
            raise ConfigError(
                f"evaluation.metric={self.metric}, and the evaluation reports {known}: set one of "
                "these"
            )
        value = signed(self.metric, metrics)
        if value is not None and (best is None or value > best + self.min_gain):
            return value, 0
        return best, fruitless + 1
