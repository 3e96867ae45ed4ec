"""Warn, in `ratchet check` and `ratchet train`, about settings that work but are likely
unintended."""

from __future__ import annotations

from collections.abc import Iterator

from ratchet.config.schema import StageConfig


def cautions(stage: StageConfig) -> Iterator[str]:
    """Yield a sentence for each setting that works but is likely unintended, with its fix."""
    yield from _stale(stage)


def _stale(stage: StageConfig) -> Iterator[str]:
    """Warn about training on attempts of older weights without a correction.

    With old_logprobs=learner the learner recomputes the old log-probabilities with its current
    weights. Every ratio is then relative to these weights, not to those that sampled the attempt.
    """
    algorithm, source = stage.algorithm, _older_weights(stage)
    if stage.source != "rollouts" or not source or not hasattr(algorithm, "old_logprobs"):
        return
    loss = getattr(algorithm, "loss", None)
    has_ratio = getattr(loss, "reads_old", True)
    weighs = getattr(algorithm, "correction", None) is not None
    if weighs or (has_ratio and getattr(algorithm, "old_logprobs", "") == "sampler"):
        return
    # A loss with one ratio for each answer also needs one correction weight for each.
    level = "{weight: geometric}" if getattr(loss, "level", "token") == "sequence" else "{}"
    also = ", or algorithm.old_logprobs=sampler" if has_ratio else ""
    yield (
        f"{source} trains on attempts of older weights, and algorithm "
        f"{getattr(algorithm, 'kind', '')} treats them as "
        f"drawn by the current ones. Set algorithm.correction={level}{also}."
    )


def _older_weights(stage: StageConfig) -> str:
    """Return the setting that allows training on attempts of older weights, or ""."""
    rollouts = stage.rollouts
    if rollouts.max_staleness:
        return f"rollouts.max_staleness={rollouts.max_staleness:g}"
    return "" if rollouts.replay is None else "rollouts.replay"
