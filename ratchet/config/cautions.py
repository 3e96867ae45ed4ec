"""What a recipe may ask for and should know: warnings of `ratchet check` and `ratchet train`."""

from __future__ import annotations

from collections.abc import Iterator

from ratchet.config.schema import StageConfig


def cautions(stage: StageConfig) -> Iterator[str]:
    """Yield a sentence for each setting that works and is likely not meant, with its fix."""
    yield from _stale(stage)


def _stale(stage: StageConfig) -> Iterator[str]:
    """Attempts of older weights that nothing weighs.

    With old_logprobs=learner the learner recomputes the old log-probabilities with its current
    weights. Every ratio is then to these weights, not to those that drew the attempt.
    """
    rollouts, algorithm = stage.rollouts, stage.algorithm
    if stage.source != "rollouts" or not rollouts.max_staleness or not hasattr(algorithm, "old_logprobs"):
        return
    has_ratio = getattr(getattr(algorithm, "loss", None), "reads_old", True)
    weighs = getattr(algorithm, "correction", None) is not None
    if weighs or (has_ratio and getattr(algorithm, "old_logprobs", "") == "sampler"):
        return
    also = ", or algorithm.old_logprobs=sampler" if has_ratio else ""
    yield (
        f"rollouts.max_staleness={rollouts.max_staleness:g} trains on attempts of older weights, and algorithm "
        f"{getattr(algorithm, 'kind', '')} treats them as drawn by the current ones. Set algorithm.correction={{}}{also}."
    )
