"""What a model is evaluated on where nothing judges its own answers: which of two given ones it scores higher."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from ratchet.build import build_policy, build_run
from ratchet.config.schema import RunConfig
from ratchet.config.validate import conflicts
from ratchet.errors import ConfigError
from ratchet.evals.accuracy import Evaluator
from ratchet.evals.pairs import PairEvaluator
from ratchet.run import Run

ENVIRONMENT = {"kind": "sorting", "digits": 3}


def config(kind: str, environment: dict[str, Any], *, tasks: int = 20) -> RunConfig:
    stage = {"name": "a", "algorithm": {"kind": kind}, "environment": environment, "steps": 1, "batch_size": 4}
    return RunConfig.model_validate({
        "threads": 1,
        "device": "cpu",
        "model": {"preset": "tiny", "overrides": {"hidden_size": 32, "n_layers": 1}},
        "tokenizer": {"kind": "bytes"},
        "stages": [{**stage, "sampling": {"max_new_tokens": 5}, "evaluation": {"tasks": tasks}}],
    })  # fmt: skip


def made(kind: str, environment: dict[str, Any], **options: Any) -> Run:
    settings = config(kind, environment, **options)
    return build_run(settings, 0, build_policy(settings))


def preferences(folder: Path, rows: list[dict[str, Any]]) -> dict[str, Any]:
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {"kind": "preferences", "train": str(folder / "rows.jsonl")}


def test_scores_that_say_nothing_are_right_half_of_the_time():
    evaluator = made("reward_model", ENVIRONMENT).evaluator
    assert isinstance(evaluator, PairEvaluator)
    found = asyncio.run(evaluator.run())
    assert (found.pairs, found.accuracy, found.margin) == (20, 0.5, 0.0)


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
    assert there.numbers()["accuracy"] == pytest.approx(1 - back.numbers()["accuracy"])
    assert there.numbers()["margin"] == pytest.approx(-back.numbers()["margin"])
    assert there.numbers()["accuracy"] != 0.5  # of 21 pairs


def test_answers_that_nobody_judges_are_compared_by_their_likelihood(tmp_path: Path):
    rows = [{"prompt": f"{i}?", "chosen": "yes", "rejected": "no, not at all"} for i in range(60)]
    evaluator = made("dpo", preferences(tmp_path, rows)).evaluator
    assert isinstance(evaluator, PairEvaluator)
    assert asyncio.run(evaluator.run()).accuracy == 1.0  # random weights prefer what is short


def test_where_something_judges_the_policy_answers_itself():
    assert isinstance(made("dpo", ENVIRONMENT).evaluator, Evaluator)


def test_without_pairs_to_compare_the_fix_is_said(tmp_path: Path):
    environment = preferences(tmp_path, [{"prompt": f"{i}?", "completion": "a", "label": True} for i in range(60)])
    with pytest.raises(ConfigError, match=r"none to compare: .*set evaluation.tasks=0"):
        made("score_regression", environment)
    assert made("score_regression", environment, tasks=0).evaluator is None


def test_data_without_a_held_out_row_train_when_nothing_is_evaluated(tmp_path: Path):
    environment = preferences(tmp_path, [{"prompt": "2+2?", "chosen": "4", "rejected": "5"}])
    assert made("dpo", environment, tasks=0).evaluator is None


def test_rollouts_that_nothing_judges_are_refused(tmp_path: Path):
    environment = preferences(tmp_path, [{"prompt": "2+2?", "chosen": "4", "rejected": "5"}])
    found = [conflict.message for conflict in conflicts(config("grpo", environment))]
    assert found == ["nothing judges the attempts at environment preferences: set rewards"]
