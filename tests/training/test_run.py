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
from ratchet.environments.toy.sorting import Sorting, SortingConfig
from ratchet.errors import ConfigError
from ratchet.experience.sources.batcher import Batcher
from ratchet.rewards.base import FunctionReward
from ratchet.testing.builders import make_group, make_trajectory
from ratchet.testing.fakes import FakeSource, FakeWeightSync
from ratchet.training.build import make_run
from ratchet.training.from_config import build_policy
from ratchet.training.loop import train
from ratchet.training.run import StageRun
from ratchet.training.stage import EnvSetup, StageSpec
from ratchet.types import Group, Scored

SORTING = {"kind": "sorting"}
DIGITS = SortingConfig(digits=3)
# Without types, to give them parts of others.
make_setup: Any = EnvSetup
make_spec: Any = StageSpec
make_any_run: Any = make_run
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


def test_a_run_that_has_trained_its_steps_does_not_train_them_again():
    run = run_of(build(resolve("algorithm", {"kind": "grpo"})), [TRADED, SAME])
    asyncio.run(train(run))
    with pytest.raises(ConfigError, match=r"stage a has trained its steps\. Make another run"):
        asyncio.run(train(run))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: make_setup(Sorting), r"<class .* is not an environment\. Give an object"),
        (lambda: make_setup(DIGITS), r"SortingConfig\(.* is not an environment"),
        (lambda: make_setup(Sorting(DIGITS), reward=5), "5 is not a reward"),
        (lambda: make_spec("a", 2.0, 1), r"steps=2\.0 is not a whole number from 0 on"),
        (lambda: make_spec("a", 2, 0), "batch_size=0 is not a whole number from 1 on"),
        (lambda: make_any_run("m", None, None, None), r"str is not a Policy\. Use Policy\.create"),
        (
            lambda: run_of(resolve("algorithm", {"kind": "grpo"}), []),
            r"GRPOConfig is not an algorithm\. Use ratchet\.build",
        ),
    ],
)
def test_parts_of_another_type_are_refused_by_name(make: Any, message: str):
    with pytest.raises(ConfigError, match=message):
        make()


def test_a_function_is_a_reward():
    setup = make_setup(Sorting(DIGITS), reward=lambda trajectory, task: 1.0)
    assert isinstance(setup.reward, FunctionReward)


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
