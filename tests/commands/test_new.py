"""`ratchet new`: what it writes works as it stands, run as a user would run it."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from pages import run
from typer.testing import CliRunner

from ratchet.cli.main import app, main
from ratchet.commands.new.command import KINDS, scaffold
from ratchet.errors import ConfigError
from ratchet.training.start import start_run
from ratchet.utils import failpoints

SHORT = [
    f"stages.{stage}.{key}"
    for stage in ("sft", "grpo")
    for key in ("steps=1", "batch_size=4", "optimizer.warmup_steps=0")
]
QUIET = ["evaluation.tasks=4", "logging.progress=off", "logging.tensorboard=false"]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.medium
def test_a_recipe_trains_at_once(here: Path) -> None:
    said = CliRunner().invoke(app, ["new", "recipe", "first-try"])
    assert said.output.split() == ["first-try.yaml", "next:", "ratchet", "train", "first-try.yaml"]
    shown = CliRunner().invoke(app, ["check", "first-try.yaml"])
    assert shown.exit_code == 0
    assert "stage 2 of 2: grpo" in shown.output
    assert start_run(Path("first-try.yaml"), [*SHORT, *QUIET], here / "run", command="train") == 0


@pytest.mark.medium
def test_a_project_is_a_valid_recipe_on_its_own_rows_and_reward(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files, command = scaffold("project", "12")  # a text, though YAML could read a number
    assert command == "cd 12 && make test && ratchet train recipe.yaml"
    assert len(files) == 6
    monkeypatch.chdir("12")
    checked = CliRunner().invoke(app, ["check", "recipe.yaml"])
    assert "grpo: rewards: reward:judge gives a demonstration 1.0" in checked.output
    sys.modules.pop("reward")  # so that no other test's module of this name is taken for it


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "name", "path"),
    [("environment", "MyMaze", "my_maze:MyMaze"), ("reward", "brief", "brief:brief")],
)
def test_its_generated_tests_pass_and_so_does_the_next_command(
    here: Path, kind: str, name: str, path: str
) -> None:
    files, command = scaffold(kind, name)
    assert command == f"ratchet check {path}"
    assert "passed" in run(here, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(files[1]))
    shown = run(here, "-m", "ratchet", "check", path)
    assert "holds" in shown
    assert "fails" not in shown


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_overwritten(here: Path, kind: str) -> None:
    files, _ = scaffold(kind, "mine")
    files[-1].write_text("precious")
    for other in files[:-1]:  # of several, one that is there is enough
        other.unlink()
    with pytest.raises(ConfigError, match=rf"{files[-1].name} exists already"):
        scaffold(kind, "mine")
    assert [path.name for path in here.rglob("*") if path.is_file()] == [files[-1].name]
    assert files[-1].read_text() == "precious"


def test_a_full_disk_leaves_no_file_that_hinders_the_next_try(here: Path) -> None:
    try:
        failpoints.arm("file.drafted:2:enospc")
        with pytest.raises(OSError, match="No space left"):
            scaffold("reward", "mine")
    finally:
        failpoints.arm("")
    assert not [path for path in here.rglob("*") if path.is_file()]
    scaffold("reward", "mine")


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("recipe", "a/b"),
        ("recipe", "../x"),
        ("environment", "2fast"),
        ("reward", "class"),
        ("reward", "a b"),
    ],
)
def test_a_name_that_can_be_none(here: Path, kind: str, name: str) -> None:
    with pytest.raises(ConfigError, match="can't name"):
        scaffold(kind, name)
    assert not os.listdir(here)


def test_another_kind_is_a_mistake_of_the_command_line(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["ratchet", "new", "castle", "x"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
