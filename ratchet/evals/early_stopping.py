"""Early stopping: end a stage after evaluations without improvement, or at a target."""

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
    value = metrics.get(metric.removeprefix("-"))
    return -value if is_lower_better(metric) and value is not None else value


def is_lower_better(metric: str) -> bool:
    """True for losses and for metrics with a leading minus in their name."""
    return metric.startswith("-") or metric in LOWER_IS_BETTER


@dataclass(frozen=True)
class EarlyStopping:
    """The early-stopping rule of a stage."""

    n_evaluations: int
    """The stage ends after this many evaluations in a row without an improvement; 0: never."""
    metric: str | None
    """The metric that is compared; None: accuracy if it is measured, else the loss."""
    min_gain: float = 0.0
    """An improvement must be larger than this."""
    stop_at: float | None = None
    """The stage ends once the metric is as good as this value; None: never."""

    @classmethod
    def from_config(cls, config: EvaluationConfig) -> EarlyStopping | None:
        """Return the rule that a recipe sets, or None if it sets none."""
        if not config.patience and config.stop_at is None:
            return None
        return cls(config.patience, config.metric, config.min_gain, config.stop_at)

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
        self._require(metrics)
        value = get_signed_metric(self.metric, metrics)
        if value is not None and (best is None or value > best + self.min_gain):
            return value, 0
        return best, evaluations_since_best + 1

    def explain_end(
        self, metrics: Mapping[str, float | None], evaluations_since_best: int
    ) -> str | None:
        """Return why the stage ends after an evaluation, with the key; None if it continues."""
        metric = choose_metric(self.metric, metrics)
        if self.is_reached(metrics):
            value = metrics[metric.removeprefix("-")]
            return f"{metric} is {value:g}, as good as {self.stop_at:g} (evaluation.stop_at)"
        if self.n_evaluations and evaluations_since_best >= self.n_evaluations:
            return (
                f"{metric} was no better in {evaluations_since_best} evaluations in a row "
                "(evaluation.patience)"
            )
        return None

    def is_reached(self, metrics: Mapping[str, float | None]) -> bool:
        """True if the metric is at least `stop_at`, or at most that where lower is better."""
        value = metrics.get(choose_metric(self.metric, metrics).removeprefix("-"))
        if self.stop_at is None or value is None:
            return False
        is_lower = is_lower_better(choose_metric(self.metric, metrics))
        return value <= self.stop_at if is_lower else value >= self.stop_at

    def check_start(self, metrics: Mapping[str, float | None]) -> None:
        """Raise ConfigError if the evaluation before the first step lacks the metric.

        Metrics of training are reported only after a step, so they are not checked.
        """
        if choose_metric(self.metric, metrics).removeprefix("-").startswith("eval/"):
            self._require(metrics)

    def _require(self, metrics: Mapping[str, float | None]) -> None:
        metric = choose_metric(self.metric, metrics)
        if metric.removeprefix("-") not in metrics:
            reported_metrics = ", ".join(sorted(key for key in metrics if key.startswith("eval/")))
            raise ConfigError(
                f"evaluation.metric={metric} is not reported by the evaluation. Set it to one "
                f"of {reported_metrics}"
            )
