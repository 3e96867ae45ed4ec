"""`ratchet runs`: what is there, how it differs, and what goes."""

from __future__ import annotations

import json
import os
import shutil
import tracemalloc
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ratchet.cli.main import app
from ratchet.commands import runs
from ratchet.commands.runs import compare_runs, describe_run, find_runs, list_run_rows, prune_runs
from ratchet.errors import DataError, RunDirectoryError
from ratchet.observe.sinks import iter_jsonl
from ratchet.runs.checkpoints import CheckpointStore
from ratchet.runs.run_dir import RunDirectory
from ratchet.runs.without_steps import has_no_finished_step, remove_run_without_steps
from ratchet.training import start
from ratchet.training.preflight import PreflightReport
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


@pytest.mark.slow
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
            list_run_rows(tmp_path / name)
        with pytest.raises(RunDirectoryError, match=r"config.yaml"):
            prune_runs(tmp_path / name, keep=1, confirmed=False)
    os.mkfifo(tmp_path / "pipe")
    states = {Path(row.path).name: row.state for row in list_run_rows(tmp_path)}
    assert states == {"a": "finished", **dict.fromkeys("bcde", "damaged")}


@pytest.mark.parametrize("stages", ["[]", "[{steps: 3}]", "[{name: [1], steps: 3}]"])
def test_a_damaged_recipe_is_compared_and_pruned_with_a_sentence(
    stages: str, place: Path, tmp_path: Path
) -> None:
    (tmp_path / "config.yaml").write_text(f"name: damaged\nstages: {stages}\n")
    for paths in ([place / "a", tmp_path], [tmp_path, place / "a"]):
        with pytest.raises(RunDirectoryError, match="has a stage without"):
            compare_runs(paths, as_json=True)
    with pytest.raises(RunDirectoryError, match="has a stage without"):
        prune_runs(tmp_path, keep=1, confirmed=True)
    (tmp_path / "config.yaml").write_text("stages: [{name: a, steps: 3, algorithm: grpo}]\n")
    compare_runs([tmp_path, place / "a"], as_json=True)


@pytest.mark.medium
def test_metrics_that_are_no_numbers_are_left_out(place: Path, tmp_path: Path) -> None:
    shutil.copytree(place / "a", tmp_path / "a")
    with (tmp_path / "a" / "metrics.jsonl").open("a") as metrics:
        for step, value in enumerate(('"x"', "1e999", "{}", "true", "1" + "0" * 400), 5):
            metrics.write(f'{{"step": {step}, "eval/accuracy": {value}, "time/step_s": {value}}}\n')
    whole, odd = describe_run(RunDirectory(place / "a")), describe_run(RunDirectory(tmp_path / "a"))
    assert (odd.accuracy, odd.seconds) == (whole.accuracy, whole.seconds)
    assert "9 of 4" in said("list", str(tmp_path / "a"))
    (tmp_path / "a" / "metrics.jsonl").write_text("")
    assert "the two runs have no step in common" in said(
        "compare", str(place / "a"), str(tmp_path / "a")
    )


def test_a_run_under_way_says_so(place: Path) -> None:
    run = RunDirectory(place / "a")
    with run.locked():
        assert describe_run(run).state == "running"
    assert describe_run(run).state == "finished"


@pytest.mark.medium
def test_runs_are_compared(place: Path) -> None:
    (found,) = json.loads(said("compare", str(place / "a"), str(place / "b"), "--json"))
    assert found["recipe"] == ["stages.sft.optimizer.lr: 1e-05 -> 0.01"]
    assert found["first_different_step"] == 1
    (same,) = json.loads(said("compare", str(place / "a"), str(place / "c"), "--json"))
    assert (same["recipe"], same["first_different_step"]) == ([], None)
    text = said("compare", str(place / "a"), str(place / "c"))
    assert "the recipes are the same" in text
    assert "common steps are equal" in text


def test_the_metrics_of_each_run_are_read_once(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = []
    monkeypatch.setattr(runs, "iter_jsonl", lambda path: read.append(path) or iter_jsonl(path))
    said("compare", *(str(place / name) for name in "abc"))
    assert read == [place / name / "metrics.jsonl" for name in "abc"]


@pytest.mark.slow
def test_metrics_of_long_runs_are_not_all_held_in_memory(place: Path, tmp_path: Path) -> None:
    shutil.copytree(place / "a", tmp_path / "a")
    with (tmp_path / "a" / "metrics.jsonl").open("w") as file:
        for step in range(5_000):
            file.write(
                json.dumps({"step": step + 1, **{f"name{i}": 0.5 for i in range(50)}}) + "\n"
            )
    tracemalloc.start()
    try:
        assert describe_run(RunDirectory(tmp_path / "a")).step == 5_000
        compare_runs([str(tmp_path / "a")] * 2, as_json=True)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 8_000_000  # all rows are 28 MB


def test_the_curves_of_the_last_stage_are_compared(place: Path, tmp_path: Path) -> None:
    for name, values in (("a", (9, 0, 4)), ("b", (9, 4, 8))):
        shutil.copytree(place / "a", tmp_path / name)
        (tmp_path / name / "config.yaml").write_text(
            "stages: [{name: x, steps: 1}, {name: y, steps: 2}]"
        )
        rows = [{"step": i, "policy/loss": value} for i, value in enumerate(values, start=1)]
        text = "".join(f"{json.dumps(row)}\n" for row in rows)
        (tmp_path / name / "metrics.jsonl").write_text(text)
    a, b = str(tmp_path / "a"), str(tmp_path / "b")
    lines = said("compare", a, b).splitlines()
    assert lines[-4:-1] == ["  policy/loss: 4 -> 8", f"    ▁▅  {a}", f"    ▅█  {b}"]
    assert lines[-1] == f"curves  ratchet report {a} {b} --out compare.html"


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


def test_a_damaged_newest_checkpoint_does_not_cost_the_whole_ones(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(place / "a", tmp_path / "a")
    store = CheckpointStore(tmp_path / "a" / "checkpoints")

    def flip_bit(step: int) -> None:
        weights = max((store.root / f"step-{step:08d}" / "policy").glob("*.safetensors"))
        content = bytearray(weights.read_bytes())
        content[-1] ^= 1
        weights.write_bytes(content)

    flip_bit(4)
    prune_runs(tmp_path / "a", keep=1, confirmed=False)
    assert "step-00000003" not in capsys.readouterr().out
    prune_runs(tmp_path / "a", keep=1, confirmed=True)
    checkpoint = store.latest()
    assert checkpoint is not None
    assert (checkpoint.step, store.steps()) == (3, [3, 4])
    flip_bit(3)
    prune_runs(tmp_path / "a", keep=1, confirmed=True)
    assert "nothing is removed: all checkpoints" in capsys.readouterr().out
    assert store.steps() == [3, 4]


def test_a_run_with_a_damaged_recipe_does_not_keep_the_others_from_being_pruned(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("a", "b", "c"):
        shutil.copytree(place / "a", tmp_path / name)
    for name in ("a", "c"):
        RunDirectory(tmp_path / name).config.write_text("stages: [")
    with pytest.raises(RunDirectoryError, match=r"(?s)/a/.*/c/"):
        prune_runs(tmp_path, keep=1, confirmed=True)
    assert f"removed {tmp_path / 'b'}" in capsys.readouterr().out
    assert len(CheckpointStore(tmp_path / "a" / "checkpoints").steps()) > 1
    assert len(CheckpointStore(tmp_path / "b" / "checkpoints").steps()) == 1


def test_checkpoints_may_go_while_they_are_measured(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(place / "a", tmp_path / "a")
    whole = describe_run(RunDirectory(tmp_path / "a"))
    real_stat = os.stat

    def stat(path, *arguments, **options):
        result = real_stat(path, *arguments, **options)
        if str(path).endswith(".safetensors"):
            shutil.rmtree(tmp_path / "a" / "checkpoints", ignore_errors=True)
        return result

    monkeypatch.setattr(os, "stat", stat)
    assert 0 < describe_run(RunDirectory(tmp_path / "a")).checkpoints < whole.checkpoints


def test_a_place_without_runs_says_so(tmp_path: Path) -> None:
    with pytest.raises(RunDirectoryError, match="holds no runs"):
        find_runs(tmp_path)


def test_names_are_whole_at_80_columns(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    long = "a-name-that-is-longer-than-its-column-"
    for number in "12":
        shutil.copytree(place / "a", tmp_path / "runs" / f"{long}{number}")
    lines = said("list", str(tmp_path / "runs")).splitlines()
    assert max(map(len, lines[1:])) <= 80
    cells = [line[:30].strip().partition(" ")[0] for line in lines[2:]]
    assert "".join(cells) == f"{long}1{long}2"


@pytest.mark.slow
def test_stages_are_compared_by_name(tmp_path: Path, place: Path) -> None:
    recipe = place / "two.yaml"
    recipe.write_text(
        RECIPE.replace("algorithm: {kind: sft}\n", "").replace("steps: 4\n", "")
        + "stages:\n- {name: first, algorithm: {kind: sft}, steps: 1}\n"
        + "- {name: sft, algorithm: {kind: sft}, steps: 1}\n"
    )
    assert start_run(recipe, [], tmp_path / "two", command="train") == 0
    (found,) = json.loads(said("compare", str(place / "a"), str(tmp_path / "two"), "--json"))
    assert found["recipe"] == [
        "name: 'recipe' -> 'two'",
        "stages.sft.steps: 4 -> 1",
        "stages.first: only in the second (sft, 1 steps)",
    ]


# --- runs without steps


@pytest.fixture
def broken(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run whose data can't be read, which the check before it missed, beside one with steps."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(start, "run_preflight", lambda config, scan: PreflightReport())
    shutil.copytree(place / "a", "runs/a")
    with pytest.raises(DataError):
        start_run(
            place / "recipe.yaml",
            ["environment={kind: dataset, train: nothing.jsonl}", "rewards=[{kind: boxed}]"],
            None,
            command="train",
        )
    return Path("runs/recipe")


@pytest.mark.slow
def test_the_corrected_run_keeps_the_name(place: Path, broken: Path) -> None:
    assert has_no_finished_step(RunDirectory(broken))
    assert start_run(place / "recipe.yaml", ["steps=1"], None, command="train") == 0
    log = (broken / "run.log").read_text()
    assert f"takes the place of a run without steps in {broken}" in log
    assert "nothing.jsonl" not in log
    assert start_run(place / "recipe.yaml", ["steps=1"], None, command="train") == 0
    assert sorted(path.name for path in Path("runs").iterdir()) == ["a", "recipe", "recipe-2"]
    with pytest.raises(RunDirectoryError, match="holds a run"):
        start_run(place / "recipe.yaml", [], broken, command="train")


@pytest.mark.medium
def test_what_a_user_put_there_and_what_is_under_way_stay(place: Path, broken: Path) -> None:
    (broken / "notes.txt").write_text("mine")
    assert not has_no_finished_step(RunDirectory(broken))
    (broken / "notes.txt").unlink()
    with RunDirectory(broken).locked():
        assert not has_no_finished_step(RunDirectory(broken))
        assert start_run(place / "recipe.yaml", ["steps=1"], None, command="train") == 0
    assert Path("runs/recipe-2/model").is_dir()


@pytest.mark.medium
def test_no_command_removes_files_of_a_user_beside_a_run_without_steps(broken: Path) -> None:
    for name in (".git/HEAD", ".env", ".hidden.partial"):
        (broken / name).parent.mkdir(exist_ok=True)
        (broken / name).write_text("mine")
    assert "removed 1" in said("clean", "runs", "--yes")
    left = sorted(path.name for path in broken.iterdir())
    assert left == [".env", ".git", ".hidden.partial"]
    assert (broken / ".git/HEAD").read_text() == "mine"


@pytest.mark.medium
@pytest.mark.parametrize(
    "name",
    ["evals/mine.json", "steps/mine.partial", "profile/mine", "base/mine", "sentinels/.mine"],
)
def test_a_file_of_a_user_in_a_directory_of_a_run_keeps_the_run(broken: Path, name: str) -> None:
    (broken / name).parent.mkdir(exist_ok=True)
    (broken / name).write_text("mine")
    assert not has_no_finished_step(RunDirectory(broken))
    assert "every run has steps" in said("clean", "runs", "--yes")
    assert (broken / name).read_text() == "mine"


@pytest.mark.parametrize("is_locked_once", [False, True])
def test_a_config_of_a_user_is_no_run_without_steps(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_locked_once: bool
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copy(place / "recipe.yaml", "config.yaml")
    Path(".git").mkdir()
    if is_locked_once:  # such as by `ratchet train --resume .`
        with RunDirectory(Path()).locked():
            pass
    recipe = Path("config.yaml").read_text()
    with pytest.raises(RunDirectoryError, match="holds a run"):
        start_run(Path("config.yaml"), ["steps=1"], ".", command="train")
    assert "every run has steps" in said("clean", ".", "--yes")
    assert Path("config.yaml").read_text() == recipe
    assert Path(".git").is_dir()


@pytest.mark.medium
def test_a_run_that_goes_on_while_it_is_to_be_removed_stays(place: Path, broken: Path) -> None:
    run = RunDirectory(broken)
    shutil.copytree(place / "a" / "steps", broken / "steps", dirs_exist_ok=True)
    with pytest.raises(RunDirectoryError, match="has changed and is not removed"):
        remove_run_without_steps(run)
    assert any(run.steps.glob("*.parquet"))


@pytest.mark.medium
@pytest.mark.parametrize("kept", ["model", "checkpoints", "steps", "metrics.jsonl"])
def test_a_run_with_any_result_has_steps(place: Path, broken: Path, kept: str) -> None:
    source, target = place / "a" / kept, broken / kept
    if source.is_dir():
        shutil.copytree(source, target, dirs_exist_ok=True)
    else:
        shutil.copy(source, target)
    assert not has_no_finished_step(RunDirectory(broken))


@pytest.mark.medium
def test_runs_without_steps_are_removed_when_asked_to(broken: Path) -> None:
    text = said("clean", "runs")
    assert f"{broken} has no finished step" in text
    assert "add --yes" in text
    assert broken.exists()
    assert "removed 1" in said("clean", "runs", "--yes")
    assert [path.name for path in Path("runs").iterdir()] == ["a"]
    assert "every run has steps" in said("clean", "runs")
