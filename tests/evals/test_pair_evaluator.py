"""What a model is evaluated on where nothing judges its own answers: which of two given ones it
finds likelier. A model that is trained to score: its loss on held-out rows of its own kind.
"""

from __future__ import annotations

import asyncio
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from ratchet.config.checks.stages import conflicts
from ratchet.config.schema import RunConfig
from ratchet.errors import ConfigError, DataError
from ratchet.evals.evaluator import Evaluator
from ratchet.evals.loss_evaluator import LossEvaluator, compute_correlation
from ratchet.evals.pair_evaluator import PairEvaluator
from ratchet.training.from_config import build_policy
from ratchet.training.run import StageRun
from ratchet.training.stage_from_config import build_run
from ratchet.training.start import start_run

ENVIRONMENT = {"kind": "sorting", "digits": 3}


def config(kind: str, environment: dict[str, Any], *, tasks: int = 20) -> RunConfig:
    stage = {
        "name": "a",
        "algorithm": {"kind": kind},
        "environment": environment,
        "steps": 1,
        "batch_size": 4,
    }
    return RunConfig.model_validate({
        "threads": 1,
        "device": "cpu",
        "model": {"preset": "tiny", "overrides": {"hidden_size": 32, "n_layers": 1}},
        "tokenizer": {"kind": "bytes"},
        "stages": [{**stage, "sampling": {"max_new_tokens": 5}, "evaluation": {"tasks": tasks}}],
    })  # fmt: skip


def made(kind: str, environment: dict[str, Any], **options: Any) -> StageRun:
    settings = config(kind, environment, **options)
    return build_run(settings, 0, build_policy(settings))


def preferences(folder: Path, rows: list[dict[str, Any]]) -> dict[str, Any]:
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {"kind": "preferences", "train": str(folder / "rows.jsonl")}


def test_scores_that_say_nothing_are_right_half_of_the_time():
    evaluator = made("reward_model", ENVIRONMENT).evaluator
    assert isinstance(evaluator, LossEvaluator)
    found = asyncio.run(evaluator.run())
    assert found.n_tasks == 20
    assert found.get_metrics() == pytest.approx(
        {"loss": math.log(2), "accuracy": 0.5, "margin": 0.0}
    )


def test_the_better_answer_is_the_one_that_must_score_higher():
    run = made("reward_model", ENVIRONMENT, tasks=21)
    head = run.roles["policy"].head  # pyright: ignore[reportAttributeAccessIssue]
    with torch.no_grad():
        head.weight.normal_(generator=torch.Generator().manual_seed(0))
    assert run.evaluator is not None
    there = asyncio.run(run.evaluator.run())
    with torch.no_grad():
        head.weight.neg_()
    back = asyncio.run(run.evaluator.run())
    assert there.get_metrics()["accuracy"] == pytest.approx(1 - back.get_metrics()["accuracy"])
    assert there.get_metrics()["margin"] == pytest.approx(-back.get_metrics()["margin"])
    assert there.get_metrics()["accuracy"] != 0.5  # of 21 pairs


def test_answers_that_nobody_judges_are_compared_by_their_likelihood(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    rows = [{"prompt": f"{i}?", "chosen": "yes", "rejected": "no, not at all"} for i in range(60)]
    evaluator = made("dpo", preferences(tmp_path, rows)).evaluator
    assert isinstance(evaluator, PairEvaluator)
    result = asyncio.run(evaluator.run())
    assert result.accuracy == 1.0  # random weights prefer what is short
    monkeypatch.setattr("ratchet.evals.loss_evaluator.MAX_PART_TOKENS", 100)
    counts: list[int] = []
    in_parts = asyncio.run(evaluator.run(counts.append))
    assert in_parts.get_metrics() == pytest.approx(result.get_metrics(), rel=1e-5)
    assert len(counts) > 1
    assert sum(counts) == evaluator.count


def test_where_something_judges_the_policy_answers_itself():
    assert isinstance(made("dpo", ENVIRONMENT).evaluator, Evaluator)


def test_without_pairs_to_compare_the_fix_is_said(tmp_path: Path):
    environment = preferences(
        tmp_path, [{"prompt": f"{i}?", "completion": "a", "label": True} for i in range(60)]
    )
    with pytest.raises(ConfigError, match=r"there are none .*Set evaluation.tasks=0"):
        made("dpo", environment)
    assert made("dpo", environment, tasks=0).evaluator is None


def evaluated(run: StageRun) -> dict[str, float]:
    assert isinstance(run.evaluator, LossEvaluator)
    return asyncio.run(run.evaluator.run()).get_metrics()


def with_head(run: StageRun, value: float) -> StageRun:
    """Scores are the value times the sum of the last hidden state."""
    with torch.no_grad():
        run.roles["policy"].head.weight.fill_(value)  # pyright: ignore[reportAttributeAccessIssue]
    return run


def test_scores_are_held_to_held_out_labels(tmp_path: Path):
    rows = [
        {"prompt": f"{i}?", "completion": "a" * (1 + i % 3), "label": float(i % 3)}
        for i in range(90)
    ]
    run = made("score_regression", preferences(tmp_path, rows), tasks=90)
    assert isinstance(run.evaluator, LossEvaluator)
    labels = [task.meta["judgement"].reward for task in run.evaluator.tasks]
    assert 0 < len(labels) < 20  # one prompt in ten is held out
    # Scores of 0: the mean squared label, and nothing that could be related to it
    mean_square = sum(label**2 for label in labels) / len(labels)
    assert evaluated(run) == pytest.approx({"loss": mean_square, "score": 0.0})
    there, back = (evaluated(with_head(run, value)) for value in (0.1, -0.1))
    assert there["correlation"] == pytest.approx(-back["correlation"])
    assert there["loss"] != back["loss"]


def test_steps_are_held_to_held_out_labels(tmp_path: Path):
    rows = [
        {"prompt": f"{i}?", "completions": ["a", "b", "c"], "labels": [True, True, False]}
        for i in range(60)
    ]
    run = made("process_reward", preferences(tmp_path, rows), tasks=60)
    # Scores of 0 say one half of every step: ln 2; "not right" is what they count as, which holds
    # of one step in three.
    assert evaluated(run) == pytest.approx({"loss": math.log(2), "accuracy": 1 / 3})


def test_a_held_out_row_of_another_kind_is_named(tmp_path: Path):
    rows = [{"prompt": f"{i}?", "chosen": "a", "rejected": "b"} for i in range(60)]
    with pytest.raises(
        DataError,
        match=r"rows.jsonl, line \d+: no column 'completion'.*learns from one labelled answer",
    ):
        evaluated(made("score_regression", preferences(tmp_path, rows)))


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        ([0.0, 1.0, 2.0], [1.0, 3.0, 5.0], 1.0),
        ([0.0, 1.0], [1.0, 0.0], -1.0),
        ([0.0, 1.0, 2.0], [0.0, 1.0, 0.0], 0.0),
        ([0.1, 0.1, 0.1], [0.0, 1.0, 2.0], None),
        ([0.0, 1.0], [0.3, 0.3], None),
        ([], [], None),
    ],
)
def test_correlation_by_hand(a: list[float], b: list[float], expected: float | None):
    found = compute_correlation(
        torch.tensor(a, dtype=torch.float64), torch.tensor(b, dtype=torch.float64)
    )
    assert found == (expected if expected is None else pytest.approx(expected))


@pytest.mark.slow
def test_a_stage_that_is_evaluated_otherwise_does_not_begin_where_the_one_before_ended(
    tmp_path: Path,
):
    stage = {"environment": ENVIRONMENT, "steps": 1, "batch_size": 4, "evaluation": {"tasks": 4}}
    stages = [
        {"name": kind, "algorithm": {"kind": kind}, **stage} for kind in ("sft", "reward_model")
    ]
    model = {"preset": "tiny", "overrides": {"hidden_size": 16, "n_layers": 1}}
    recipe = {
        "threads": 1,
        "device": "cpu",
        "model": model,
        "tokenizer": {"kind": "bytes"},
        "stages": stages,
    }
    (tmp_path / "recipe.yaml").write_text(json.dumps(recipe))
    assert start_run(tmp_path / "recipe.yaml", [], tmp_path / "run", command="test") == 0
    supervised, scored = json.loads((tmp_path / "run" / "summary.json").read_text())["stages"]
    assert supervised["accuracy_after"] == 0.0
    assert scored["accuracy_before"] == 0.5


def test_data_without_a_held_out_row_train_when_nothing_is_evaluated(tmp_path: Path):
    environment = preferences(tmp_path, [{"prompt": "2+2?", "chosen": "4", "rejected": "5"}])
    assert made("dpo", environment, tasks=0).evaluator is None


def test_rollouts_that_nothing_judges_are_refused(tmp_path: Path):
    environment = preferences(tmp_path, [{"prompt": "2+2?", "chosen": "4", "rejected": "5"}])
    found = [conflict.message for conflict in conflicts(config("grpo", environment))]
    assert found == ["nothing judges the attempts in environment preferences: set rewards"]
