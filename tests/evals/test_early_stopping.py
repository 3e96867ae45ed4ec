"""A stage ends where it has stopped getting better, also when it is interrupted on the way, and can
leave its best behind."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from safetensors.numpy import load_file

from ratchet.errors import ConfigError
from ratchet.evals.early_stopping import EarlyStopping, get_signed_metric
from ratchet.evals.results import EvalResults
from ratchet.runs.checkpoints import CheckpointStore
from ratchet.training.start import resume_run, start_run
from ratchet.utils import failpoints

RECIPE: dict[str, Any] = {
    "name": "probe",
    "threads": 1,
    "device": "cpu",
    "model": {"preset": "tiny", "overrides": {"hidden_size": 16, "n_layers": 1}},
    "tokenizer": {"kind": "characters", "alphabet": "0123456789="},
    "environment": {"kind": "sorting", "digits": 2},
    "sampling": {"max_new_tokens": 3},
    "logging": {"progress": "off", "tensorboard": False},
    "algorithm": {"kind": "sft"},
    "optimizer": {"lr": 1e-12},  # learns nothing
    "steps": 9,
    "batch_size": 2,
    "evaluation": {"tasks": 2, "every": 1, "patience": 3},
    "checkpoint": {"every": 1, "keep_best": 1},
}


def trained(folder: Path, **keys: Any) -> tuple[Path, int]:
    """The run of the recipe with other keys, and its status."""
    folder.mkdir()
    (folder / "recipe.yaml").write_text(yaml.safe_dump({**RECIPE, **keys}))
    return folder / "run", start_run(folder / "recipe.yaml", [], folder / "run", command="test")


def rows(run: Path) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [
        {name: value for name, value in row.items() if not name.startswith(("time/", "system/"))}
        for row in found
    ]


def test_what_is_best_and_since_when():
    patience = EarlyStopping(2, "eval/accuracy", min_gain=0.1)
    best, fruitless = patience.update({"eval/accuracy": 0.5}, None, 0)
    assert (best, fruitless) == (0.5, 0)
    assert patience.update({"eval/accuracy": 0.55}, best, fruitless) == (0.5, 1)
    assert patience.update({"eval/accuracy": None}, best, 1) == (0.5, 2)
    assert patience.update({"eval/accuracy": 0.7}, best, 1) == (0.7, 0)
    assert EarlyStopping(1, "-eval/loss").update({"eval/loss": 2.0}, -3.0, 0) == (-2.0, 0)
    assert get_signed_metric("-eval/loss", {"eval/loss": None}) is None
    assert EarlyStopping(0, "-eval/loss", stop_at=2).is_reached({"eval/loss": 2.0})
    assert not EarlyStopping(0, "eval/loss", stop_at=2).is_reached({"eval/loss": 2.1})
    at_half = EarlyStopping(0, None, stop_at=0.5)
    reached = [at_half.is_reached({"eval/accuracy": accuracy}) for accuracy in (0.4, 0.5, None)]
    assert reached == [False, True, False]
    with pytest.raises(
        ConfigError, match=r"eval/acuracy is not reported.* to one of eval/accuracy, eval/failed"
    ):
        EarlyStopping(1, "eval/acuracy").update(
            {"eval/failed": 0, "eval/accuracy": 1, "policy/loss": 2}, None, 0
        )


@pytest.mark.medium
def test_a_stage_that_gets_no_better_ends_early_and_says_so(tmp_path: Path):
    stage = {"algorithm": {"kind": "sft"}}
    run, status = trained(
        tmp_path / "a", stages=[{"name": "one", **stage}, {"name": "two", **stage, "steps": 1}]
    )
    assert status == 0
    # The first evaluation is the best; three more are not better. The next stage begins where the
    # recipe says.
    assert [row["step"] for row in rows(run)] == [0, 1, 2, 3, 4, 10]
    assert [
        stage["steps"] for stage in json.loads((run / "summary.json").read_text())["stages"]
    ] == [4, 1]
    assert (
        "stage one ends after step 4 of 9: eval/accuracy was no better in 3 evaluations in a row"
        in (run / "run.log").read_text()
    )
    found = EvalResults.read(run / "evals" / "one" / "step-00000004")
    assert len(found.prompts) == 2
    assert (run / "evals" / "one" / "step-00000004" / "report.md").is_file()


TARGET = {"optimizer": {"lr": 0.02}, "batch_size": 16}
STOP = {"tasks": 16, "every": 1, "metric": "eval/loss", "stop_at": 2.0}


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["", "step.sample:5:raise", "stage.end:1:raise"])
def test_a_stage_ends_at_its_target(fault: str, tmp_path: Path):
    """Once the loss is low enough; the next stage has that from the first, and no step."""
    failpoints.arm(fault)
    stage = {"algorithm": {"kind": "sft"}, "steps": 30}
    stages = {"stages": [{"name": "one", **stage}, {"name": "two", **stage}]}
    if fault:
        with pytest.raises(failpoints.InjectedFault):
            trained(tmp_path / "a", **TARGET, evaluation=STOP, **stages)
        failpoints.arm("")
        assert resume_run(tmp_path / "a" / "run", command="test") == 0
    else:
        trained(tmp_path / "a", **TARGET, evaluation=STOP, **stages)
    run = tmp_path / "a" / "run"
    losses = [row["eval/loss"] for row in rows(run)]
    assert min(losses[:-1]) > STOP["stop_at"] >= losses[-1]
    steps = [row["step"] for row in rows(run)]
    assert steps == list(range(len(steps)))
    text = (run / "run.log").read_text()
    assert f"stage one ends after step {steps[-1]} of 30: eval/loss is " in text
    assert "stage two ends after step 30 of 60: eval/loss is " in text
    summaries = json.loads((run / "summary.json").read_text())["stages"]
    assert [stage["steps"] for stage in summaries] == [steps[-1], 0]


@pytest.mark.medium
def test_a_model_that_is_good_enough_is_not_trained(tmp_path: Path):
    run, status = trained(tmp_path / "a", evaluation={"tasks": 2, "every": 1, "stop_at": 0})
    assert (status, [row["step"] for row in rows(run)]) == (0, [0])
    assert resume_run(run, command="test") == 0
    assert not CheckpointStore(run / "checkpoints").steps()


@pytest.mark.medium
def test_a_metric_that_nothing_reports_is_refused_before_the_first_step(tmp_path: Path):
    with pytest.raises(ConfigError, match="eval/acuracy is not reported"):
        trained(tmp_path / "a", evaluation={**STOP, "metric": "eval/acuracy"})
    assert not (tmp_path / "a" / "run" / "checkpoints").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    "fault", ["step.sample:4:raise", "stage.end:1:raise", "finish.summary:1:raise"]
)
def test_patience_goes_on_where_it_was_interrupted(fault: str, tmp_path: Path):
    """In the middle of counting, and after it has run out."""
    failpoints.arm(fault)
    with pytest.raises(failpoints.InjectedFault):
        trained(tmp_path / "a")
    failpoints.arm("")
    run = tmp_path / "a" / "run"
    assert resume_run(run, command="test") == 0
    assert [row["step"] for row in rows(run)] == [0, 1, 2, 3, 4]
    assert json.loads((run / "summary.json").read_text())["stages"][0]["steps"] == 4
    assert CheckpointStore(run / "checkpoints").steps() == [3, 4]


@pytest.mark.slow
def test_what_is_left_behind_may_be_the_best(tmp_path: Path):
    """By the loss of its batch, the highest: that is of the first step, while it learns."""
    learns: dict[str, Any] = {"optimizer": {"lr": 0.05}, "evaluation": {"tasks": 2, "every": 1}}
    keeps = {"every": 1, "keep": 1, "keep_best": 1, "metric": "policy/loss"}
    first, _ = trained(tmp_path / "first", **learns, steps=1)
    last, _ = trained(tmp_path / "last", **learns, steps=4, checkpoint=keeps)
    best, _ = trained(
        tmp_path / "best", **learns, steps=4, checkpoint={**keeps, "end_with": "best"}
    )
    assert CheckpointStore(best / "checkpoints").steps() == [1, 4]
    weights = [load_file(run / "model" / "model.safetensors") for run in (first, best, last)]
    for name, weight in weights[0].items():
        assert weight.tobytes() == weights[1][name].tobytes()
    assert any(
        weight.tobytes() != weights[2][name].tobytes() for name, weight in weights[0].items()
    )
    assert (
        "ends with the weights of step 1, its best by policy/loss" in (best / "run.log").read_text()
    )
    assert resume_run(best, command="test") == 0
    again = load_file(best / "model" / "model.safetensors")
    assert all(weight.tobytes() == again[name].tobytes() for name, weight in weights[0].items())
