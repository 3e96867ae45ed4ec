"""docs/metrics.md: every name that a run reports is there, and every name that is there is
reported."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from observe.test_system import Nvml

from ratchet.config.model_shape.presets import get_preset
from ratchet.config.registry import KINDS
from ratchet.config.resolve import build, resolve
from ratchet.config.schema import RunConfig
from ratchet.evals.results import AttemptResult, EvalResults, PromptResult
from ratchet.experience.rollout.metrics import (
    DISTRIBUTION_REDUCERS,
    iterate_attempt_samples,
    measure_groups,
    measure_staleness,
)
from ratchet.generators.config import EngineConfig
from ratchet.generators.workers.config import GeneratorWorkersConfig
from ratchet.generators.workers.pool import GeneratorPool
from ratchet.learners.compute.flop_counter import FlopCounter
from ratchet.models.flops import DecoderCost
from ratchet.observe.metrics import MetricsManager
from ratchet.observe.sinks import get_histograms
from ratchet.observe.system import SystemMeter
from ratchet.testing.builders import make_group, make_trajectory
from ratchet.testing.fakes import FakeLearner
from ratchet.testing.synthetic import Draw
from ratchet.testing.synthetic_update import Update, differentiate
from ratchet.training.from_config import build_policy
from ratchet.training.loop import train
from ratchet.training.metering import PeakRate, StageMeter
from ratchet.training.stage_from_config import build_run
from ratchet.training.workers.generators import make_recovering_weight_sync
from ratchet.types import Failed, Scored
from ratchet.weight_sync.factory import SyncEndpoints

TEACHER = {"teacher": "nowhere"}
NEEDED: dict[str, dict[str, Any]] = {
    "dr_grpo": {"fixed_length": 8},
    "distill_off_policy": TEACHER,
    "distill_on_policy": TEACHER,
    "on_policy_distillation": TEACHER,
}
MORE: list[tuple[str, dict[str, Any]]] = [
    ("ppo", {"critic": {"value_clip": 0.1}, "kl": {"coef": 0.1, "place": "reward"}}),
    ("grpo", {"malformed_call_advantage": -5.0}),
    ("grpo", {"kl": {"coef": 0.1}, "entropy_coef": 0.1, "positive_nll_coef": 0.1}),
    ("grpo", {"router": {"z_coef": 0.1}}),
    ("distill_off_policy", {**TEACHER, "sft_coef": 0.1}),
    ("distill_off_policy", {**TEACHER, "teacher_tokens": "aligned"}),
    ("on_policy_distillation", {**TEACHER, "teacher_tokens": "aligned"}),
]
CHOSEN = {"replay": {"priority": "uniform"}, "redundant_attempts": 1}
SORTING = {"kind": "sorting", "digits": 3}
PROBED = {"every": 1, "second_opinion": [{"kind": "exact_match"}], "canaries": SORTING}


def of_algorithm(kind: str, options: dict[str, Any]) -> Iterator[str]:
    algorithm = build(resolve("algorithm", {"kind": kind, **NEEDED.get(kind, {}), **options}))
    update = Update.from_groups(algorithm, Draw(0).groups(algorithm))
    yield from (f"batch/{name}" for name in update.batch.metrics)
    for role, terms in algorithm.losses.items():
        yield from (f"{role}/{term.name}" for term in terms if term.coef)
        yield from (
            f"{role}/{name}"
            for name in differentiate(update, role, range(update.batch.n_sequences)).metrics
        )


def of_run(kind: str, **more: Any) -> set[str]:
    stage = {
        "name": "a",
        "algorithm": {"kind": kind},
        "environment": SORTING,
        "steps": 1,
        "batch_size": 4,
        **more,
    }
    settings = RunConfig.model_validate({
        "threads": 1,
        "device": "cpu",
        "model": {"preset": "tiny", "overrides": {"hidden_size": 16, "n_layers": 1}},
        "tokenizer": {"kind": "bytes"},
        "stages": [{**stage, "sampling": {"max_new_tokens": 5}, "evaluation": {"tasks": 4, "samples": 1}}],
    })  # fmt: skip
    names: set[str] = set()
    run = build_run(
        settings,
        0,
        build_policy(settings),
        observers=[lambda step, metrics: names.update(metrics, get_histograms(metrics))],
    )
    asyncio.run(train(run))
    return names


def of_groups() -> dict[str, float]:
    # the environment's steps measured the latter
    measured = {"malformed_tool_calls": 1.0, "pushes": 2.0}
    rows = [
        replace(
            make_trajectory([1], [2] * 8, outcome=Scored(1.0, {"math": 1.0})), metrics=measured
        ),
        make_trajectory([1], [2], outcome=Failed("reward"), attempt=1),
        make_trajectory([1], [2], reward=1.0, attempt=2, use="baseline"),
    ]
    groups = [make_group("g", rows)]
    return measure_groups(groups) | measure_staleness(groups, step=1)


def of_labels() -> set[str]:
    groups = [
        make_group(
            "g",
            [replace(make_trajectory([1], [2], reward=1.0), metrics={"turns": 1.0})],
            tag="maths",
        )
    ]
    groups = [replace(groups[0], task=replace(groups[0].task, environment="dataset"))]
    metrics = MetricsManager()
    metrics.declare("rollout", DISTRIBUTION_REDUCERS)
    for labels, samples in iterate_attempt_samples(groups):
        metrics.add("rollout", samples, labels=labels)
    flushed = metrics.flush(0)
    return {*flushed, *flushed.histograms}


def of_tags() -> dict[str, float]:
    prompts = [
        PromptResult(tag, tag, "", False, AttemptResult("scored", 1.0)) for tag in ("maths", "code")
    ]
    return EvalResults(tuple(prompts)).get_metrics()


def of_restarts() -> dict[str, float | None]:
    metrics, router = MetricsManager(), GeneratorPool(GeneratorWorkersConfig(worker=EngineConfig()))
    make_recovering_weight_sync(
        resolve("weight_sync", {"kind": "shared_memory"}),
        SyncEndpoints(FakeLearner(2), router),
        metrics,
    )
    router.on_restart()
    return metrics.flush(0)


def of_work(path: Path) -> set[str]:
    """Of `ratchet train`, on a machine with a GPU."""
    clock = iter(range(100))
    system = SystemMeter(path, nvml=Nvml(), clock=lambda: next(clock))
    meter = StageMeter(
        FlopCounter({"policy": DecoderCost(get_preset("tiny", vocab_size=8)).token_cost}),
        PeakRate(1.0),
        system=system,
    )
    meter.begin(0)
    found = meter.measure([make_group("g", [make_trajectory([1], [2], reward=1.0)])], 1.0)
    return {f"{prefix}/{key}" for prefix, numbers in found.items() for key in numbers}


@pytest.fixture(scope="module")
def reported(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    names = (
        {f"rollout/{name}" for name in of_groups()}
        | of_labels()
        | set(of_restarts())
        | of_run("sft", lora={"rank": 2})
    )
    names |= of_run("decoupled_ppo", examples=4, curriculum={}, rollouts=CHOSEN, steps=2)
    names |= {f"eval/{name}" for name in of_tags()} | of_work(tmp_path_factory.mktemp("proc"))
    for kind, options in [*((kind, {}) for kind in KINDS["algorithm"]), *MORE]:
        names.update(of_algorithm(kind, options))
    names |= of_run("grpo", sentinels=PROBED, rollouts={"tail_batching": 1})
    names |= of_run("grpo", rollouts={"max_staleness": 1, "adaptive": {"staleness": 0.5}})
    return names.union(
        *(of_run(kind) for kind in ("sft", "reward_model", "score_regression", "process_reward"))
    )


@pytest.fixture(scope="module")
def listed() -> list[str]:
    page = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text(encoding="utf-8")
    return re.findall(r"^\| `([^`]+)` \|", page, flags=re.MULTILINE)


def means(pattern: str, name: str) -> bool:
    loose = {
        "<part>": ".+",
        "<measured>": "[a-z_]+",
        "<kind>": "[a-z_]+",
        "<role>": "(policy|critic)",
        "<term>": "[a-z_]+",
    }
    loose |= {
        "<k>": "[0-9]+",
        "<tag>": "[a-z]+",
        "<i>": "[0-9]",
        "<label>": "(tag/[a-z]+|env/[a-z]+)",
    }
    return re.fullmatch(re.sub(r"<\w+>", lambda found: loose[found[0]], pattern), name) is not None


@pytest.mark.slow
def test_every_metric_is_listed_and_every_listed_one_is_reported(
    reported: set[str], listed: list[str]
):
    assert len(set(listed)) == len(listed) > 50
    assert (
        sorted(name for name in reported if not any(means(pattern, name) for pattern in listed))
        == []
    )
    assert [
        pattern for pattern in listed if not any(means(pattern, name) for name in reported)
    ] == []
