"""Check the settings that choose the groups of a step: curriculum and replay buffer."""

from __future__ import annotations

import math
from collections.abc import Iterator

from ratchet.config.checks.clash import Conflict, clash
from ratchet.config.schema import RunConfig, StageConfig


def _check_curriculum(stage: StageConfig, config: RunConfig) -> Iterator[Conflict]:
    curriculum = stage.curriculum
    if curriculum is None:
        return
    if stage.examples is None:
        yield clash(
            "curriculum chooses among a fixed number of tasks, and examples=null is an endless "
            "stream: set examples to at most the number of the data set's rows",
            "curriculum",
            "examples",
        )
    if curriculum.prefer != "even" and stage.source not in ("rollouts", None):
        yield clash(
            f"curriculum.prefer={curriculum.prefer} reads the success of attempts, and algorithm "
            f"{stage.algorithm.kind_name} generates none: set curriculum.prefer=even "
            "and curriculum.difficulty",
            "curriculum.prefer",
            "algorithm.kind",
        )


def _check_replay(stage: StageConfig, config: RunConfig) -> Iterator[Conflict]:
    replay = stage.rollouts.replay
    staleness = math.ceil(stage.rollouts.max_staleness)
    if replay is None or stage.source not in ("rollouts", None):
        return
    algorithm = stage.algorithm
    if not algorithm.weights_rollouts:
        yield clash(
            "rollouts.replay trains on attempts of older weights, which needs importance "
            f"sampling, and algorithm {algorithm.kind_name} has none: set algorithm.correction: "
            "{weight: token} if the algorithm has that key",
            "rollouts.replay",
            "algorithm.correction",
        )
    if replay.max_age <= staleness:
        yield clash(
            f"rollouts.replay.max_age={replay.max_age} leaves nothing to replay: a group may "
            f"already be {staleness} versions old when it is first trained on "
            f"(rollouts.max_staleness): set max_age above {staleness}",
            "rollouts.replay.max_age",
            "rollouts.max_staleness",
        )
    if replay.priority == "spread" and (algorithm.n_attempts < 2 or not algorithm.reads_reward):
        yield clash(
            "rollouts.replay.priority=spread compares the rewards of a group, and algorithm "
            f"{algorithm.kind_name} has none to compare: set "
            "rollouts.replay.priority=uniform",
            "rollouts.replay.priority",
            "algorithm.group_size",
        )


SELECTION_CHECKS = (_check_curriculum, _check_replay)
