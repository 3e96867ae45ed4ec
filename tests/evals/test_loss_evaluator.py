"""The held-out loss is the training loss: against float64 oracles that know nothing of batches, and
through whole runs."""

from __future__ import annotations

import asyncio
import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny_llama import make_llama
from transformers import AutoModelForCausalLM

from ratchet.config.schema import RunConfig
from ratchet.errors import ConfigError, DataError
from ratchet.evals import loss_evaluator
from ratchet.evals.evaluator import Evaluator
from ratchet.evals.loss_evaluator import HeldOutLoss, LossEvaluator, split_groups
from ratchet.evals.stage_evaluator import CombinedEvaluator
from ratchet.training.from_config import build_policy
from ratchet.training.run import StageRun
from ratchet.training.stage_from_config import build_run
from ratchet.training.start import start_run

QUESTIONS = [f"What is {a} plus {b}?" for a in range(8) for b in range(8)]
ROWS = [
    {"prompt": text, "answer": "about " + "7" * (1 + i % 5)} for i, text in enumerate(QUESTIONS)
]
CHATS = [
    {
        "messages": [
            {"role": "user", "content": "Hello."},
            {"role": "assistant", "content": "Yes?" * (1 + i % 3)},
            {"role": "user", "content": text},
            {"role": "assistant", "content": "7" * (1 + i % 5)},
        ]
    }
    for i, text in enumerate(QUESTIONS)
]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llama(tmp_path_factory.mktemp("llama"), QUESTIONS)


def written(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def config(llama: Path, data: str, algorithm: dict[str, Any], **stage: Any) -> RunConfig:
    return RunConfig.model_validate(
        {
            "threads": 1,
            "device": "cpu",
            "model": {"path": str(llama)},
            "stages": [
                {
                    "name": "a",
                    "algorithm": algorithm,
                    "environment": {"kind": "dataset", "train": data, "test_share": 0.3},
                    "steps": 2,
                    "batch_size": 4,
                    "sampling": {"max_new_tokens": 4},
                    **stage,
                }
            ],
        }
    )


def made(*arguments: Any, **stage: Any) -> StageRun:
    settings = config(*arguments, **stage)
    policy = build_policy(settings)
    stage_config = settings.stages[0]
    if not getattr(stage_config.algorithm, "teacher", None) and not stage_config.rewards:
        # Nothing is sampled, so that the engine's float32 cache is not used.
        policy.model.double()
    return build_run(settings, 0, policy)


def measured(run: StageRun) -> HeldOutLoss:
    assert isinstance(run.evaluator, LossEvaluator)
    return asyncio.run(run.evaluator.run())


def oracle(llama: Path, run: StageRun, *, train: str) -> list[tuple[list[float], list[bool]]]:
    """The negative log-likelihood of each trained token, and whether it is the likeliest: row by
    row, by transformers in float64."""
    model = AutoModelForCausalLM.from_pretrained(llama, dtype=torch.float64)
    assert isinstance(run.evaluator, LossEvaluator)
    environment = run.evaluator.source.stream.environment
    renderer = run.evaluator.source.text_renderer.renderer  # pyright: ignore[reportAttributeAccessIssue]
    rows = []
    for task in run.evaluator.tasks:
        messages = (*task.messages, *environment.demonstration(task))
        tokens, trains = renderer.supervised(messages, train=train)
        with torch.no_grad():
            logits = model(torch.tensor([tokens])).logits[0]
        logprobs = logits.log_softmax(-1)
        places = [i for i, flag in enumerate(trains) if flag]
        rows.append(
            (
                [-float(logprobs[i - 1, tokens[i]]) for i in places],
                [int(logprobs[i - 1].argmax()) == tokens[i] for i in places],
            )
        )
    return rows


@pytest.mark.medium
@pytest.mark.parametrize(
    ("rows", "train", "weighting"),
    [
        (ROWS, "all", "token_mean"),
        (ROWS, "all", "sequence_mean"),
        (CHATS, "all", "token_mean"),
        (CHATS, "last", "token_mean"),
        (CHATS, "text", "token_mean"),
    ],
)
@pytest.mark.parametrize("part_tokens", [2**15, 50])
def test_nll_is_that_of_float64(
    llama: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    rows: list[dict[str, Any]],
    train: str,
    weighting: str,
    part_tokens: int,
):
    monkeypatch.setattr(loss_evaluator, "MAX_PART_TOKENS", part_tokens)
    algorithm = {"kind": "sft", "train": train, "weighting": weighting}
    run = made(llama, written(tmp_path / "rows.jsonl", rows), algorithm)
    expected = oracle(llama, run, train=train)
    assert 5 < len(expected) < 40
    tokens = [x for row, _ in expected for x in row]
    means = [sum(row) / len(row) for row, _ in expected]
    mean = sum(tokens) / len(tokens)
    loss = mean if weighting == "token_mean" else sum(means) / len(means)
    right = [x for _, row in expected for x in row]
    found = measured(run)
    assert found.n_tasks == len(expected)
    assert found.get_metrics() == pytest.approx(
        {
            "loss": loss,
            "perplexity": math.exp(mean),
            "token_accuracy": sum(right) / len(right),
        },
        rel=1e-7,  # transformers computes the angles of positions in float32
    )


def test_it_is_the_loss_that_training_reports(llama: Path, tmp_path: Path):
    """The mean of a step's loss is that of an evaluation of the same rows."""
    data = written(tmp_path / "rows.jsonl", ROWS)
    run = made(llama, data, {"kind": "sft"})
    assert isinstance(run.evaluator, LossEvaluator)
    expected = measured(run).loss
    groups = asyncio.run(
        run.evaluator.source.make([(task.id, task) for task in run.evaluator.tasks], version=0)
    )
    from ratchet.data.packing import pack

    weighed = run.algorithm.weigh(pack(groups), run.state)
    numbers = asyncio.run(run.roles["policy"].update(weighed, run.algorithm.losses["policy"]))
    assert numbers["loss"] == pytest.approx(expected, rel=1e-9)


def test_a_reward_adds_accuracy(llama: Path, tmp_path: Path):
    """The last turn of a conversation is its answer."""
    data = written(tmp_path / "rows.jsonl", CHATS)
    run = made(llama, data, {"kind": "sft"}, rewards=[{"kind": "exact_match"}])
    assert isinstance(run.evaluator, CombinedEvaluator)
    answers, loss = run.evaluator.parts
    assert isinstance(answers, Evaluator)
    assert isinstance(loss, LossEvaluator)
    assert answers.tasks[0].answer in {"7" * i for i in range(1, 6)}
    counts: list[int] = []
    numbers = asyncio.run(run.evaluator.run(counts.append)).get_metrics()
    assert sum(counts) == run.evaluator.count  # what a bar of the progress shows
    assert {"accuracy", "loss", "perplexity", "token_accuracy"} <= numbers.keys()
    assert not math.isnan(numbers["accuracy"])


def test_other_held_out_rows(llama: Path, tmp_path: Path):
    """`evaluation.environment` is measured alike, and by eval_rewards if it has none."""
    train, other = written(tmp_path / "a.jsonl", ROWS), written(tmp_path / "b.jsonl", ROWS[:5])
    section = {"kind": "dataset", "test": other}
    run = made(llama, train, {"kind": "sft"}, evaluation={"environment": section})
    assert measured(run).n_tasks == 5
    run = made(
        llama,
        train,
        {"kind": "sft"},
        evaluation={"environment": section},
        rewards=[{"kind": "exact_match"}],
    )
    assert isinstance(run.evaluator, CombinedEvaluator)


def test_what_has_no_answer_is_named_without_pairs(llama: Path, tmp_path: Path):
    data = written(tmp_path / "rows.jsonl", [{"prompt": text} for text in QUESTIONS])
    with pytest.raises(ConfigError, match=r"loss of held-out answers.*Set evaluation.tasks=0") as e:
        made(llama, data, {"kind": "sft"})
    assert "pair" not in str(e.value)
    assert "chosen" not in str(e.value)
    assert made(llama, data, {"kind": "sft"}, evaluation={"tasks": 0}).evaluator is None


def test_rows_that_do_not_fit_are_named(llama: Path, tmp_path: Path):
    rows = [{"prompt": text, "answer": "7" * 600} for text in QUESTIONS]
    run = made(llama, written(tmp_path / "rows.jsonl", rows), {"kind": "sft"})
    with pytest.raises(DataError, match=r"rows.jsonl, line \d+: \d+ tokens, but the model holds"):
        measured(run)


@pytest.mark.medium
def test_a_model_is_as_far_from_itself_as_nothing(llama: Path, tmp_path: Path):
    """Distillation: the divergence, on given text and on the student's own."""
    data = written(tmp_path / "rows.jsonl", ROWS)
    for kind in ("distill_off_policy", "distill_on_policy", "on_policy_distillation"):
        run = made(llama, data, {"kind": kind, "teacher": str(llama)})
        assert measured(run).loss == pytest.approx(0.0, abs=1e-5)  # the teacher is float32
        with torch.no_grad():
            for weight in run.roles["policy"].model.parameters():  # pyright: ignore[reportAttributeAccessIssue]
                weight.mul_(1.5)
        assert measured(run).loss > 1e-3, kind


def test_a_teacher_beside_the_likelihood_of_the_text(llama: Path, tmp_path: Path):
    """The likelihood is all that is left of the loss where student and teacher are the same."""
    data = written(tmp_path / "rows.jsonl", ROWS)
    nll = measured(made(llama, data, {"kind": "sft"})).loss
    keys = {"kind": "distill_off_policy", "teacher": str(llama), "sft_coef": 0.5, "top_k": 4}
    beside = measured(made(llama, data, keys)).loss
    assert beside == pytest.approx(0.5 * nll, rel=1e-4)


def test_labelled_answers_have_the_loss_of_kto(llama: Path, tmp_path: Path):
    rows = [{"prompt": text, "completion": "7", "label": True} for text in QUESTIONS]
    run = made(llama, written(tmp_path / "rows.jsonl", rows), {"kind": "kto"})
    # The policy is its reference: every log-ratio is 0, and 1 - sigmoid(0) = 1/2.
    assert measured(run).loss == pytest.approx(0.5)


@pytest.mark.medium
def test_a_run_without_rewards_shows_its_loss(
    llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """Patience by the loss, less of which is better."""
    settings = config(
        llama,
        written(tmp_path / "rows.jsonl", ROWS),
        {"kind": "sft"},
        steps=12,
        optimizer={"lr": 3e-3},
        evaluation={"every": 2, "patience": 2, "metric": "eval/loss"},
        checkpoint={"every": 2, "keep_best": 1, "end_with": "best"},
    ).model_dump(mode="json")
    (tmp_path / "recipe.yaml").write_text(json.dumps(settings))
    run = tmp_path / "run"
    assert start_run(tmp_path / "recipe.yaml", [], run, command="test") == 0
    (stage,) = json.loads((run / "summary.json").read_text())["stages"]
    assert stage["steps"] == 12  # it learns all the time, so patience never runs out
    assert stage["loss_after"] < stage["loss_before"] - 0.3
    assert stage["accuracy_after"] is None
    output = capsys.readouterr().out
    assert "Held-out loss" in output
    assert "Held-out accuracy" not in output
    assert f"{stage['loss_before']:.3f}" in output
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    losses = [row["eval/loss"] for row in rows if row.get("eval/loss") is not None]
    assert len(losses) == 7
    assert losses[0] == stage["loss_before"]
    assert losses[-1] == stage["loss_after"]


@pytest.mark.medium
def test_patience_ends_a_stage_whose_loss_does_not_fall(llama: Path, tmp_path: Path):
    settings = config(
        llama,
        written(tmp_path / "rows.jsonl", ROWS),
        {"kind": "sft"},
        steps=9,
        optimizer={"lr": 1e-12},
        evaluation={"every": 1, "patience": 2, "min_gain": 0.01},
    ).model_dump(mode="json")
    (tmp_path / "recipe.yaml").write_text(json.dumps(settings))
    assert start_run(tmp_path / "recipe.yaml", [], tmp_path / "run", command="test") == 0
    assert "eval/loss was no better in 2 evaluations" in (tmp_path / "run" / "run.log").read_text()


def test_parts_are_whole_groups_within_the_limit(monkeypatch):
    monkeypatch.setattr("ratchet.evals.loss_evaluator.MAX_PART_TOKENS", 10)
    batch: Any = SimpleNamespace(
        group_S=torch.tensor([0, 0, 1, 1, 2, 3]), lengths_S=torch.tensor([3, 3, 2, 3, 12, 4])
    )
    assert list(split_groups(batch)) == [[0, 1], [2, 3], [4], [5]]
