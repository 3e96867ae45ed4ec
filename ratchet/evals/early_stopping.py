"""Early stopping: end a stage after several evaluations without improvement."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ratchet.config.schema import EvaluationConfig
from ratchet.errors import ConfigError

# Metrics for which lower is better. A leading minus in the recipe changes nothing for them.
LOWER_IS_BETTER = frozenset({"eval/loss", "eval/perplexity"})
# Metrics for a recipe that names none. The first one that an evaluation reports is used.
DEFAULT_METRICS = ("eval/accuracy", "eval/loss")


def choose_metric(metric: str | None, metrics: Mapping[str, float | None]) -> str:
    """Return the metric of a recipe, or for None the first of `DEFAULT_METRICS` in `metrics`."""
    if metric is not None:
        return metric
    return next((name for name in DEFAULT_METRICS if name in metrics), DEFAULT_METRICS[0])


def get_signed_metric(metric: str | None, metrics: Mapping[str, float | None]) -> float | None:
    """Return the value of a metric, signed so that higher is better; None if it was not measured.

    Losses and metrics with a leading minus in their name, such as "-policy/kl/kl", are negated.
    """
    metric = choose_metric(metric, metrics)
    name = metric.removeprefix("-")
    value = metrics.get(name)
    is_negated = metric.startswith("-") or name in LOWER_IS_BETTER
    return -value if is_negated and value is not None else value


@dataclass(frozen=True)
class EarlyStopping:
    """The early-stopping rule of a stage.

    Attributes:
        n_evaluations: The stage ends after this many evaluations in a row without an improvement.
        metric: The metric that must improve; None: accuracy if it is measured, else the loss.
        min_gain: An improvement must be larger than this.
    """

    n_evaluations: int
    metric: str | None
    min_gain: float = 0.0

    @classmethod
    def from_config(cls, config: EvaluationConfig) -> EarlyStopping | None:
        """Return the rule that a recipe sets, or None if it sets none."""
        return cls(config.patience, config.metric, config.min_gain) if config.patience else None

    def update(
        self, metrics: Mapping[str, float | None], best: float | None, evaluations_since_best: int
    ) -> tuple[float | None, int]:
        """Return the new (best, evaluations_since_best) after an evaluation.

        If the metric has no value, because all attempts failed, the evaluation counts as one
        without an improvement.

        Args:
            metrics: The metrics of the evaluation.
            best: The best value so far; None before the first.
            evaluations_since_best: The number of evaluations since the best value.

        Raises:
            ConfigError: If the evaluation does not report the metric.
        """
        metric = choose_metric(self.metric, metrics)
        if metric.removeprefix("-") not in metrics:
            reported_metrics = ", ".join(sorted(key for key in metrics if key.startswith("eval/")))
            raise ConfigError(
                f"evaluation.metric={metric} is not reported by the evaluation. Set it to one "
                f"of {reported_metrics}"
            )
        value = get_signed_metric(self.metric, metrics)
        if value is not None and (best is None or value > best + self.min_gain):
            return value, 0
        return best, evaluations_since_best + 1
