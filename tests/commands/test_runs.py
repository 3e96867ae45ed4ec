"""`ratchet runs`: what is there, how it differs, and what goes."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ratchet.cli.main import app
from ratchet.commands.runs import describe_run, find_runs, prune_runs, rows_in
from ratchet.errors import RunDirectoryError
from ratchet.runs.run_dir import RunDirectory
from ratchet.training.start import start_run

RECIPE = """
threads: 1
model: {preset: tiny, overrides: {hidden_size: 32, n_layers: 1}}
tokenizer: {kind: characters, alphabet: "0123456789="}
environment: {kind: sorting, digits: 2}
evaluation: {tasks: 2}
algorithm: {kind: sft}
steps: 4
batch_size: 2
checkpoint: {every: 1, keep: 9}
logging: {progress: "off", tensorboard: false}
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs that differ from the start, and one that is as the first."""
    place = tmp_path_factory.mktemp("runs")
    recipe = place / "recipe.yaml"
    recipe.write_text(RECIPE)
    for name, overrides in (("a", []), ("b", ["optimizer.lr=0.01"]), ("c", [])):
        assert start_run(recipe, overrides, place / name, command="train") == 0
    return place


def said(*arguments: str) -> str:
    return CliRunner().invoke(app, ["runs", *arguments], catch_exceptions=False).stdout


def test_each_is_listed(place: Path) -> None:
    found = json.loads(said("list", str(place), "--json"))
    assert [Path(row["path"]).name for row in found] == ["a", "b", "c"]
    assert all((row["state"], row["step"], row["steps"]) == ("finished", 4, 4) for row in found)
    assert all(row["checkpoints"] > 0 and 0 <= row["accuracy"] <= 1 for row in found)
    table = said("list", str(place / "a"))
    assert "4 of 4" in table
    assert "finished" in table


def test_a_damaged_run_hides_no_other(place: Path, tmp_path: Path) -> None:
    shutil.copytree(place / "a", tmp_path / "a")
    for name, text in (("b", "name: b"), ("c", "stages: [5]"), ("d", "[1]"), ("e", "stages: 1")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.yaml").write_text(text)
        with pytest.raises(RunDirectoryError, match=r"config.yaml"):
            rows_in(tmp_path / name)
        with pytest.raises(RunDirectoryError, match=r"config.yaml"):
            prune_runs(tmp_path / name, keep=1, really=False)
    os.mkfifo(tmp_path / "pipe")
    states = {Path(row.path).name: row.state for row in rows_in(tmp_path)}
    assert states == {"a": "finished", **dict.fromkeys("bcde", "damaged")}


def test_metrics_that_are_no_numbers_are_left_out(place: Path, tmp_path: Path) -> None:
    shutil.copytree(place / "a", tmp_path / "a")
    with (tmp_path / "a" / "metrics.jsonl").open("a") as metrics:
        for step, value in enumerate(('"x"', "1e999", "{}", "true", "1" + "0" * 400), 5):
            metrics.write(f'{{"step": {step}, "eval/accuracy": {value}, "time/step_s": {value}}}\n')
    whole, odd = describe_run(RunDirectory(place / "a")), describe_run(RunDirectory(tmp_path / "a"))
    assert (odd.accuracy, odd.seconds) == (whole.accuracy, whole.seconds)
    assert "9 of 4" in said("list", str(tmp_path / "a"))
    (tmp_path / "a" / "metrics.jsonl").write_text("")
    assert "no step has numbers of both" in said("compare", str(place / "a"), str(tmp_path / "a"))


def test_a_run_under_way_says_so(place: Path) -> None:
    run = RunDirectory(place / "a")
    with run.locked():
        assert describe_run(run).state == "running"
    assert describe_run(run).state == "finished"


def test_runs_are_compared(place: Path) -> None:
    (found,) = json.loads(said("compare", str(place / "a"), str(place / "b"), "--json"))
    assert found["recipe"] == ["stages.0.optimizer.lr: 1e-05 -> 0.01"]
    assert found["first_different_step"] == 1
    (same,) = json.loads(said("compare", str(place / "a"), str(place / "c"), "--json"))
    assert (same["recipe"], same["first_different_step"]) == ([], None)
    text = said("compare", str(place / "a"), str(place / "c"))
    assert "the recipes are the same" in text
    assert "steps differs" in text


def test_old_checkpoints_go_when_asked_to(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def steps() -> list[str]:
        return sorted(path.name[-1] for path in (place / "c" / "checkpoints").glob("step-*"))

    prune_runs(place / "c", keep=2, confirmed=False)
    assert steps() == ["1", "2", "3", "4"]
    assert "add --yes" in capsys.readouterr().out
    with RunDirectory(place / "c").locked():
        prune_runs(place / "c", keep=2, confirmed=True)
    assert steps() == ["1", "2", "3", "4"]  # it is under way
    prune_runs(place / "c", keep=2, confirmed=True)
    assert steps() == ["3", "4"]


def test_a_place_without_runs_says_so(tmp_path: Path) -> None:
    with pytest.raises(RunDirectoryError, match="holds no runs"):
        find_runs(tmp_path)
