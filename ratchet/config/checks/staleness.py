"""Warnings of `ratchet check` and `ratchet train` about settings that are likely unintended."""

from __future__ import annotations

from collections.abc import Iterator

from ratchet.config.schema import StageConfig


def cautions(stage: StageConfig) -> Iterator[str]:
    """Yield a sentence for each setting that works but is likely unintended, with its fix."""
    yield from _check_stale_attempts(stage)


def _check_stale_attempts(stage: StageConfig) -> Iterator[str]:
    """Warn about training on attempts of older weights without a correction.

    With old_logprobs=learner, importance ratios are relative to the learner's weights at the start
    of the step. They do not correct for the older weights that sampled the attempt (off-policy).
    """
    algorithm, setting = stage.algorithm, _stale_setting(stage)
    if stage.source != "rollouts" or not setting or not hasattr(algorithm, "old_logprobs"):
        return
    loss = getattr(algorithm, "loss", None)
    has_ratio = getattr(loss, "reads_old", True)
    has_correction = getattr(algorithm, "correction", None) is not None
    if has_correction or (has_ratio and getattr(algorithm, "old_logprobs", "") == "sampler"):
        return
    # A loss with one ratio for each answer also needs one correction weight for each.
    level = "{weight: geometric}" if getattr(loss, "level", "token") == "sequence" else "{}"
    alternative = ", or algorithm.old_logprobs=sampler" if has_ratio else ""
    yield (
        f"{setting} trains on attempts of older weights, and algorithm "
        f"{getattr(algorithm, 'kind', '')} treats them as "
        f"sampled by the current ones. Set algorithm.correction={level}{alternative}."
    )


def _stale_setting(stage: StageConfig) -> str:
    """Return the setting that allows training on attempts of older weights, or ""."""
    rollouts = stage.rollouts
    if rollouts.max_staleness:
        return f"rollouts.max_staleness={rollouts.max_staleness:g}"
    return "" if rollouts.replay is None else "rollouts.replay"
