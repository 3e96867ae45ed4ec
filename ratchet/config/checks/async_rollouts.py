"""Check rollout keys that start groups ahead of their step, oversample or replace them."""

from __future__ import annotations

from collections.abc import Iterator

from ratchet.config.base import Section
from ratchet.config.checks.clash import Conflict, clash
from ratchet.config.experience import RolloutsConfig
from ratchet.config.schema import RunConfig, StageConfig

# Keys that have no effect in a stage that generates no attempts.
KEYS = (
    "redundant_attempts",
    "redundant_groups",
    "max_staleness",
    "adaptive",
    "tail_batching",
    "dynamic_sampling",
    "replay",
)


def _draws(stage: StageConfig, config: RunConfig) -> Iterator[Conflict]:
    """Refuse `KEYS` in a stage without attempts, unless a stage with attempts has the same ones."""
    if any(
        other.source in ("rollouts", None) and other.rollouts == stage.rollouts
        for other in config.stages
    ):
        return
    for key in KEYS:
        value = getattr(stage.rollouts, key)
        if value:
            yield clash(
                f"rollouts.{key}={_short(value)} is of attempts, and algorithm "
                f"{getattr(stage.algorithm, 'kind', '')} draws "
                "none: remove it",
                f"rollouts.{key}",
            )


def _short(value: object) -> object:
    return "{...}" if isinstance(value, Section) else value


def _ahead(stage: StageConfig, config: RunConfig) -> Iterator[Conflict]:
    rollouts = stage.rollouts
    if rollouts.prefetches and rollouts.redundant_groups:
        key = "max_staleness" if rollouts.max_staleness else "dynamic_sampling"
        yield clash(
            f"rollouts.{key} keeps every group that was begun, and rollouts.redundant_groups draws "
            "some to be late: remove it, "
            "and set rollouts.max_staleness with rollouts.order=ready, which does not wait for the "
            "slowest either",
            "rollouts.redundant_groups",
            f"rollouts.{key}",
        )
    if rollouts.order == "ready" and not rollouts.max_staleness:
        yield clash(
            "rollouts.order=ready chooses among the groups of several steps, and "
            "rollouts.max_staleness=0 begins those of one: "
            "set it to 1 or more",
            "rollouts.order",
            "rollouts.max_staleness",
        )
    if rollouts.max_staleness and getattr(config.cluster, "colocated", False):
        yield clash(
            "cluster.colocated lets learner and generator work by turns, so nothing is drawn "
            "ahead: set "
            "rollouts.max_staleness=0",
            "rollouts.max_staleness",
            "cluster.colocated",
        )


def _tails(stage: StageConfig, config: RunConfig) -> Iterator[Conflict]:
    rollouts = stage.rollouts
    if not rollouts.tail_batching:
        return
    reasons = {
        "max_staleness": "does not wait for the slowest either, with rollouts.order=ready",
        "dynamic_sampling": "takes every group that was begun, or replaces it for good",
        "redundant_groups": "begins more groups too, and lets the slow ones race again with each "
        "step",
        "redundant_attempts": "leaves long attempts out for good, which this is there to avoid",
    }
    for key, reason in reasons.items():
        if getattr(rollouts, key):
            yield clash(
                f"rollouts.tail_batching gives slow groups steps of their own, and rollouts.{key} "
                f"{reason}: remove one of both",
                "rollouts.tail_batching",
                f"rollouts.{key}",
            )


def _adaptive(stage: StageConfig, config: RunConfig) -> Iterator[Conflict]:
    rollouts, adaptive = stage.rollouts, stage.rollouts.adaptive
    if adaptive is None or stage.source not in ("rollouts", None):
        return
    if not rollouts.max_staleness:
        yield clash(
            "rollouts.adaptive chooses how many groups are under way beside those of a step, and "
            "rollouts.max_staleness=0 "
            "allows none: set it to 1 or more",
            "rollouts.adaptive",
            "rollouts.max_staleness",
        )
    elif adaptive.staleness is not None and adaptive.staleness >= rollouts.max_staleness:
        yield clash(
            f"rollouts.adaptive.staleness={adaptive.staleness:g} is never exceeded under "
            f"rollouts.max_staleness={rollouts.max_staleness:g}: lower it, or raise that",
            "rollouts.adaptive.staleness",
            "rollouts.max_staleness",
        )
    if adaptive.mismatch is not None and getattr(stage.algorithm, "correction", None) is None:
        yield clash(
            "rollouts.adaptive.mismatch is measured by the rollout correction, and there is none: "
            "set algorithm.correction: "
            "{}, where it has one, or adaptive.staleness in its place",
            "rollouts.adaptive.mismatch",
            "algorithm.correction",
        )
    if adaptive.mismatch is not None and rollouts.replay is not None:
        yield clash(
            "rollouts.adaptive.mismatch would count groups of rollouts.replay, which are old "
            "however few are under way: set "
            "adaptive.staleness in its place, which is of new groups alone",
            "rollouts.adaptive.mismatch",
            "rollouts.replay",
        )


def _replaced(stage: StageConfig, config: RunConfig) -> Iterator[Conflict]:
    rollouts = stage.rollouts
    if rollouts.dynamic_sampling and stage.source == "rollouts" and stage.attempts < 2:
        yield clash(
            "rollouts.dynamic_sampling compares the attempts of a group, and "
            "algorithm.group_size=1: raise it, or remove this",
            "rollouts.dynamic_sampling",
            "algorithm.group_size",
        )
    if (
        rollouts.dynamic_sampling
        and stage.source == "rollouts"
        and not getattr(stage.algorithm, "reads_reward", True)
    ):
        yield clash(
            "rollouts.dynamic_sampling compares rewards, and algorithm "
            f"{getattr(stage.algorithm, 'kind', '')} reads none: "
            "remove it",
            "rollouts.dynamic_sampling",
            "algorithm.kind",
        )
    if rollouts.max_replaced != RolloutsConfig().max_replaced and not rollouts.dynamic_sampling:
        yield clash(
            "rollouts.max_replaced is read by rollouts.dynamic_sampling alone: set that to true, "
            "or remove it",
            "rollouts.max_replaced",
        )


AHEAD_CHECKS = (_draws, _ahead, _tails, _adaptive, _replaced)
