"""Check the rollout keys of asynchronous training, oversampling and dynamic sampling."""

from __future__ import annotations

from collections.abc import Iterator

from ratchet.config.base import Section
from ratchet.config.checks.clash import Conflict, clash
from ratchet.config.experience import RolloutsConfig
from ratchet.config.schema import RunConfig, StageConfig

# Keys of `rollouts` that have no effect in a stage that generates no attempts.
ATTEMPT_KEYS = (
    "redundant_attempts",
    "redundant_groups",
    "max_staleness",
    "adaptive",
    "tail_batching",
    "dynamic_sampling",
    "group_filter",
    "replay",
)


def _check_has_attempts(stage: StageConfig, config: RunConfig) -> Iterator[Conflict]:
    """Refuse `ATTEMPT_KEYS` in a stage without attempts.

    If a stage with attempts has the same `rollouts` section, it is a default that all stages share,
    which is allowed.
    """
    if any(
        other.source in ("rollouts", None) and other.rollouts == stage.rollouts
        for other in config.stages
    ):
        return
    for key in ATTEMPT_KEYS:
        value = getattr(stage.rollouts, key)
        if value:
            yield clash(
                f"rollouts.{key}={_abbreviate(value)} has no effect, because algorithm "
                f"{stage.algorithm.kind_name} generates no attempts: remove rollouts.{key}",
                f"rollouts.{key}",
            )


def _abbreviate(value: object) -> object:
    return "{...}" if isinstance(value, Section) else value


def _check_prefetching(stage: StageConfig, config: RunConfig) -> Iterator[Conflict]:
    rollouts = stage.rollouts
    if rollouts.prefetches and rollouts.redundant_groups:
        keys = ("max_staleness", "dynamic_sampling", "group_filter")
        key = next(key for key in keys if getattr(rollouts, key))
        yield clash(
            f"rollouts.{key} trains on every group that was started, so rollouts.redundant_groups "
            "saves no time: remove rollouts.redundant_groups; to avoid waiting for the slowest "
            "groups, set rollouts.max_staleness and rollouts.order=ready",
            "rollouts.redundant_groups",
            f"rollouts.{key}",
        )
    if rollouts.order == "ready" and not rollouts.max_staleness:
        yield clash(
            "rollouts.order=ready chooses among the groups of several steps, but with "
            "rollouts.max_staleness=0 only the groups of one step are in flight: set "
            "rollouts.max_staleness to 1 or more",
            "rollouts.order",
            "rollouts.max_staleness",
        )


def _check_tail_batching(stage: StageConfig, config: RunConfig) -> Iterator[Conflict]:
    rollouts = stage.rollouts
    if not rollouts.tail_batching:
        return
    reasons = {
        "max_staleness": "already avoids waiting for them, with rollouts.order=ready",
        "dynamic_sampling": "waits for every group that was started",
        "group_filter": "waits for every group that was started",
        "redundant_groups": "starts more groups too, but gives slow ones no step of their own",
        "redundant_attempts": "drops long attempts, which tail batching is meant to keep",
    }
    for key, reason in reasons.items():
        if getattr(rollouts, key):
            yield clash(
                f"rollouts.tail_batching trains on slow groups in steps of their own, and "
                f"rollouts.{key} {reason}: remove one of the two",
                "rollouts.tail_batching",
                f"rollouts.{key}",
            )


def _check_adaptive(stage: StageConfig, config: RunConfig) -> Iterator[Conflict]:
    rollouts, adaptive = stage.rollouts, stage.rollouts.adaptive
    if adaptive is None or stage.source not in ("rollouts", None):
        return
    if not rollouts.max_staleness:
        yield clash(
            "rollouts.adaptive controls how many groups of later steps are in flight, and "
            "rollouts.max_staleness=0 allows none: set rollouts.max_staleness to 1 or more",
            "rollouts.adaptive",
            "rollouts.max_staleness",
        )
    elif adaptive.staleness is not None and adaptive.staleness >= rollouts.max_staleness:
        yield clash(
            f"rollouts.adaptive.staleness={adaptive.staleness:g} is never exceeded under "
            f"rollouts.max_staleness={rollouts.max_staleness:g}: lower adaptive.staleness, or "
            "raise max_staleness",
            "rollouts.adaptive.staleness",
            "rollouts.max_staleness",
        )
    if adaptive.mismatch is not None and not stage.algorithm.corrects_rollouts:
        yield clash(
            "rollouts.adaptive.mismatch is measured by the rollout correction, which is off: set "
            "algorithm.correction: {} if the algorithm has that key, else set adaptive.staleness "
            "instead",
            "rollouts.adaptive.mismatch",
            "algorithm.correction",
        )
    if adaptive.mismatch is not None and rollouts.replay is not None:
        yield clash(
            "rollouts.adaptive.mismatch would include the old groups of rollouts.replay, whose age "
            "does not depend on the number in flight: set adaptive.staleness instead, which counts "
            "new groups only",
            "rollouts.adaptive.mismatch",
            "rollouts.replay",
        )


def _check_dynamic_sampling(stage: StageConfig, config: RunConfig) -> Iterator[Conflict]:
    rollouts = stage.rollouts
    if rollouts.dynamic_sampling and stage.source == "rollouts" and stage.algorithm.n_attempts < 2:
        yield clash(
            "rollouts.dynamic_sampling compares the attempts of a group, and "
            "algorithm.group_size=1: raise algorithm.group_size, or remove "
            "rollouts.dynamic_sampling",
            "rollouts.dynamic_sampling",
            "algorithm.group_size",
        )
    if (
        rollouts.dynamic_sampling
        and stage.source == "rollouts"
        and not stage.algorithm.reads_reward
    ):
        yield clash(
            "rollouts.dynamic_sampling compares rewards, and algorithm "
            f"{stage.algorithm.kind_name} reads none: remove rollouts.dynamic_sampling",
            "rollouts.dynamic_sampling",
            "algorithm.kind",
        )
    if rollouts.max_replaced != RolloutsConfig().max_replaced and not rollouts.replaces_groups:
        yield clash(
            "rollouts.max_replaced has no effect without rollouts.dynamic_sampling or "
            "rollouts.group_filter: set rollouts.dynamic_sampling=true, or remove "
            "rollouts.max_replaced",
            "rollouts.max_replaced",
        )


ASYNC_CHECKS = (
    _check_has_attempts,
    _check_prefetching,
    _check_tail_batching,
    _check_adaptive,
    _check_dynamic_sampling,
)
