"""Warnings of `ratchet check` and `ratchet train` about settings that are likely unintended."""

from __future__ import annotations

from collections.abc import Iterator

from ratchet.config.schema import StageConfig


def cautions(stage: StageConfig) -> Iterator[str]:
    """Yield a sentence for each setting that works but is likely unintended, with its fix."""
    yield from _check_stale_attempts(stage)


def _check_stale_attempts(stage: StageConfig) -> Iterator[str]:
    """Warn about training on attempts of older weights without a correction."""
    setting = _find_stale_setting(stage)
    fix = stage.algorithm.suggest_correction()
    if stage.source == "rollouts" and setting and fix is not None:
        yield (
            f"{setting} trains on attempts of older weights, and algorithm "
            f"{stage.algorithm.kind_name} treats them as sampled by the current ones. Set {fix}."
        )


def _find_stale_setting(stage: StageConfig) -> str:
    """Return the setting that allows training on attempts of older weights, or ""."""
    rollouts = stage.rollouts
    if rollouts.max_staleness:
        return f"rollouts.max_staleness={rollouts.max_staleness:g}"
    return "" if rollouts.replay is None else "rollouts.replay"
