"""What a run counts around its steps."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from ratchet.algorithms.base import Algorithm
from ratchet.config.experience import ParityConfig
from ratchet.config.resolve import build, resolve
from ratchet.config.schema import EvaluationConfig, RunConfig
from ratchet.experience.sources.batcher import Batcher
from ratchet.testing.builders import make_group, make_trajectory
from ratchet.testing.fakes import FakeSource, FakeWeightSync
from ratchet.training.build import make_run
from ratchet.training.from_config import build_policy
from ratchet.training.loop import train
from ratchet.training.run import StageRun
from ratchet.training.stage import EnvSetup, StageSpec
from ratchet.types import Group, Scored

SORTING = {"kind": "sorting"}
STAGE = {
    "name": "a",
    "algorithm": {"kind": "grpo"},
    "environment": SORTING,
    "steps": 1,
    "batch_size": 1,
}


def run_of(algorithm: Algorithm, groups: list[Group], **fields: Any) -> StageRun:
    """One step for each group, whose logprobs are nobody's."""
    config = RunConfig.model_validate({
        "threads": 1,
        "device": "cpu",
        "model": {"preset": "tiny", "overrides": {"hidden_size": 16, "n_layers": 1}},
        "tokenizer": {"kind": "bytes"},
        "stages": [STAGE],
    })  # fmt: skip
    setup = EnvSetup(build(resolve("environment", SORTING)))
    invented = ParityConfig(first_steps=0, every=0)
    spec = StageSpec("a", len(groups), 1, evaluation=EvaluationConfig(tasks=0), parity=invented)
    run = make_run(build_policy(config), setup, algorithm, spec)
    return replace(run, batcher=Batcher(FakeSource(groups), groups_per_step=1), **fields)


def group(*parts: dict[str, float]) -> Group:
    rows = [
        make_trajectory([65], [66, 67], outcome=Scored(sum(part.values()), part), attempt=attempt)
        for attempt, part in enumerate(parts)
    ]
    return make_group("g", rows)


TRADED = group(
    {"a": 1.0, "b": 0.0, "c": 0.0}, {"a": 0.0, "b": 1.0, "c": 0.0}, {"a": 0.0, "b": 0.5, "c": 0.5}
)
SAME = group(*[{"a": 0.5, "b": 0.5, "c": 0.0}] * 3)


@pytest.mark.parametrize(("kind", "silent"), [("gdpo", 1), ("grpo", 2)])
def test_a_step_is_silent_where_no_advantage_is_left_whatever_the_sums_of_rewards(
    kind: str, silent: int
):
    run = run_of(build(resolve("algorithm", {"kind": kind})), [TRADED, SAME])
    asyncio.run(train(run))
    assert run.progress.silent_steps == silent


def test_a_supervised_step_is_never_silent():
    run = run_of(
        build(resolve("algorithm", {"kind": "sft"})),
        [make_group("g", [make_trajectory([65], [66])])],
    )
    asyncio.run(train(run))
    assert run.progress.silent_steps == 0


@pytest.mark.parametrize(("kind", "pushed"), [("sft", [2, 4, 5]), ("grpo", [1, 2, 3, 4, 5])])
def test_weights_are_sent_when_somebody_reads_them(kind: str, pushed: list[int]):
    """Before every step that samples; where rows are given, before an evaluation, and at the
    end."""
    run = run_of(
        build(resolve("algorithm", {"kind": kind})),
        [SAME] * 5,
        weight_sync=(sync := FakeWeightSync()),
        evaluate_every=2,
    )
    asyncio.run(train(run))
    assert sync.pushed == pushed


def test_a_stage_may_end_after_so_many_seconds_as_if_it_had_no_step_left():
    saved: list[int] = []

    async def save(run: StageRun, done: int) -> None:
        saved.append(done)

    fields = {"weight_sync": (sync := FakeWeightSync()), "limit_s": 0.0, "save": save}
    run = run_of(build(resolve("algorithm", {"kind": "sft"})), [SAME] * 5, **fields)
    asyncio.run(train(run))
    assert (run.steps_done, run.progress.ended) == (3, True)
    assert sync.pushed == [3]  # for the evaluation at the end
    assert saved == [3]
