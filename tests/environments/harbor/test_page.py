"""The page on Harbor: its commands and its recipe run as they stand."""

import json
import shutil
from pathlib import Path

import pytest
from command_line import ratchet
from pages import written
from support.programs import run_program


def run(*arguments):
    result = ratchet(*arguments)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.slow
def test_new_tasks_pass_their_oracle_and_train(repository, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    written(repository / "docs" / "integrations" / "harbor.md", tmp_path)
    page = (repository / "docs" / "integrations" / "harbor.md").read_text(encoding="utf-8")
    assert "ratchet eval oracle --on harbor test=my-sum 'waive=[image]'" in page
    run("new", "harbor-task", "my-sum")
    for name in "abc":
        shutil.copytree("my-sum", f"tasks/{name}")
    run("eval", "oracle", "--on", "harbor", "test=my-sum", "waive=[image]")
    (results,) = tmp_path.glob("evals/*/results.json")
    text = json.dumps(json.loads(results.read_text(encoding="utf-8")))
    assert '"reward": 1.0' in text
    run("train", "with_tasks.yaml")
    (metrics,) = tmp_path.glob("runs/*/metrics.jsonl")
    assert '"rollout/reward"' in metrics.read_text(encoding="utf-8")


PYTHON = Path(__file__).parents[3] / ".venv" / "nemo-gym" / "bin" / "python"
READS = """
import pathlib, typer
from harbor.cli.lint import lint_command
from harbor.models.task.task import Task
task = Task(pathlib.Path("my-sum"))
assert "sum of the numbers" in task.instruction
try:
    lint_command([pathlib.Path("my-sum")], None, None, None, False)
except typer.Exit as ended:
    raise SystemExit(ended.exit_code)
"""


@pytest.mark.slow
@pytest.mark.skipif(not PYTHON.exists(), reason="`make` installs Harbor where it finds Python 3.12")
def test_harbor_reads_a_new_task_and_its_linter_finds_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run("new", "harbor-task", "my-sum")
    assert run_program(PYTHON, "-c", READS, cwd=tmp_path) == ""
    (tmp_path / "my-sum" / "task.toml").write_text('[agent]\ntimeout_sec = "long"\n')
    with pytest.raises(AssertionError, match="timeout_sec"):
        run_program(PYTHON, "-c", READS, cwd=tmp_path)
