"""Rows of SWE-bench's form become task directories that their gold patches solve."""

from __future__ import annotations

import asyncio
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from command_line import ratchet
from environments.harbor.test_environment import play
from sandbox.test_attacks import need

from ratchet.config.resolve import build, resolve
from ratchet.environments.harbor.swe_rows import SweRow
from ratchet.environments.harbor.task_directory import read_task_directory
from ratchet.errors import DataError
from ratchet.sandbox import Isolation
from ratchet.types import Message

SOURCE = "def double(number):\n    return number + 2\n"
OLD_TEST = "from lib import double\n\n\ndef test_two():\n    assert double(2) == 4\n"
NEW_TEST = f"""import unittest
{OLD_TEST}

def test_five():
    assert double(5) == 10


class TestSix(unittest.TestCase):
    def test_six(self):
        self.assertEqual(double(6), 12)
"""
UNITTEST_NAME = "test_six (tests.test_lib.TestSix.test_six)"
FIXED = SOURCE.replace("+ 2", "* 2")
FILES = {
    "lib.py": SOURCE,
    "conftest.py": "",
    "pyproject.toml": "[tool.pytest.ini_options]\npythonpath = ['.']\n",
    "tests/test_lib.py": OLD_TEST,
}


def run_git(folder: Path, *arguments: str) -> str:
    identity = ("-c", "user.name=a", "-c", "user.email=a@example.org")
    done = subprocess.run(
        ["git", "-C", str(folder), *identity, *arguments],
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout


@pytest.fixture
def row(tmp_path: Path) -> dict[str, Any]:
    """A row, and its repository below `repos`."""
    repository = tmp_path / "repos" / "me__lib"
    repository.mkdir(parents=True)
    for name, text in FILES.items():
        (repository / name).parent.mkdir(exist_ok=True)
        (repository / name).write_text(text)
    run_git(repository, "init", "-q")
    run_git(repository, "add", ".")
    run_git(repository, "commit", "-qm", "base")
    commit = run_git(repository, "rev-parse", "HEAD").strip()

    def make_patch(name: str, text: str) -> str:
        (repository / name).write_text(text)
        patch = run_git(repository, "diff")
        run_git(repository, "checkout", "-q", ".")
        return patch

    return {
        "instance_id": "me__lib-1",
        "repo": "me/lib",
        "base_commit": commit,
        "environment_setup_commit": commit,
        "problem_statement": "double(5) is 7.",
        "patch": make_patch("lib.py", FIXED),
        "test_patch": make_patch("tests/test_lib.py", NEW_TEST),
        "FAIL_TO_PASS": json.dumps(["tests/test_lib.py::test_five", UNITTEST_NAME]),
        "PASS_TO_PASS": ["tests/test_lib.py::test_two"],
    }


def convert(tmp_path: Path, row: dict[str, Any]) -> Path:
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    options = ("--repos", tmp_path / "repos", "--out", tmp_path / "tasks")
    done = ratchet("data", "swe-tasks", tmp_path / "rows.jsonl", *options)
    assert done.returncode == 0, done.stdout + done.stderr
    return tmp_path / "tasks"


PASSING = "printf 'def test_two():\\n  pass\\ndef test_five():\\n  pass\\n' >tests/test_lib.py"
HOOK = (
    "def pytest_runtest_makereport(item, call):\\n"
    "  from _pytest.reports import TestReport\\n"
    "  call.excinfo = None\\n"
    "  return TestReport.from_item_and_call(item, call)\\n"
)


PROBE = [
    Message("assistant", "```sh\npython -c 'import pytest'\n```"),
    Message("assistant", "Done."),
]


@pytest.mark.slow
def test_the_gold_patch_earns_1_and_other_changes_0(tmp_path: Path, row: dict[str, Any]) -> None:
    need(Isolation.NAMESPACES)
    tasks = convert(tmp_path, row)
    environment = build(resolve("environment", {"kind": "harbor", "test": str(tasks)}))
    task = next(environment.tasks("test", seed=0))

    def judge(*commands: str) -> float:
        messages = [Message("assistant", f"```sh\n{command}\n```") for command in commands]
        return asyncio.run(play(environment, task, [*messages, Message("assistant", "Done.")]))[0]

    _, output = asyncio.run(play(environment, task, PROBE))
    if "No module named" in output[0]:
        pytest.skip("the sandbox has no pytest")
    assert asyncio.run(play(environment, task, environment.demonstration(task)))[0] == 1.0
    assert task.messages[0].text.startswith("double(5) is 7.")
    assert judge() == 0.0
    assert judge(PASSING) == 0.0
    assert judge(f"printf '{HOOK}' | tee conftest.py >tests/conftest.py") == 0.0
    assert judge("printf '[pytest]\\naddopts = --co\\n' >pytest.ini") == 0.0
    assert judge("echo 'import os; os._exit(0)' >>lib.py") == 0.0
    assert judge("sed -i 's/+ 2/* 2/' lib.py", "rm -r tests conftest.py pyproject.toml") == 1.0


def test_a_row_with_an_image_names_it_and_copies_no_source(
    tmp_path: Path, row: dict[str, Any]
) -> None:
    path = convert(tmp_path, {**row, "image_name": "swe/lib:1"}) / "me__lib-1"
    task = read_task_directory(path, frozenset(), "/app")
    assert (task.image.name, task.workdir, task.read_files()) == ("swe/lib:1", "testbed", {})
    assert task.read_tests()["tests/files/tests/test_lib.py"].decode() == NEW_TEST


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"instance_id": "../x"}, "can't name a directory"),
        ({"base_commit": "--output=x"}, "is not a commit's hash"),
        ({"FAIL_TO_PASS": "[]"}, "lists no test"),
        ({"FAIL_TO_PASS": "test_a (module.Case)"}, "must be a list of tests"),
        ({"FAIL_TO_PASS": ["test_a (Case)"]}, "not an id of pytest"),
        ({"PASS_TO_PASS": ["../a.py::test_b"]}, "not an id of pytest"),
        ({"FAIL_TO_PASS": ["::test_b"]}, "not an id of pytest"),
        ({"patch": None}, "column 'patch' is null, must be"),
        ({"problem_statement": "\ud800"}, "half of a surrogate pair"),
    ],
)
def test_a_wrong_row_is_refused(
    changes: dict[str, Any], sentence: str, row: dict[str, Any]
) -> None:
    with pytest.raises(DataError, match=sentence):
        SweRow.from_values({**row, **changes}, "row 1")


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"repo": "me/other"}, "has no clone of me/other"),
        ({"base_commit": "0" * 40}, "git archive failed"),
        ({"FAIL_TO_PASS": ["tests/test_b.py::test_c"]}, "has no tests/test_b.py after test_patch"),
        ({"test_patch": "--- a/x\n+++ b/x\n@@ -1 +1 @@\n-a\n+b\n"}, "git apply failed"),
    ],
)
def test_what_the_repository_lacks_is_refused(
    tmp_path: Path, row: dict[str, Any], changes: dict[str, Any], sentence: str
) -> None:
    (tmp_path / "rows.jsonl").write_text(json.dumps({**row, **changes}) + "\n")
    options = ("--repos", tmp_path / "repos", "--out", tmp_path / "tasks")
    done = ratchet("data", "swe-tasks", tmp_path / "rows.jsonl", *options)
    assert (done.returncode, sentence in done.stderr) == (2, True), done.stderr


def test_names_of_unittest_become_ids_of_pytest(row: dict[str, Any]) -> None:
    names = [
        "test_a (tests.test_b.C)",
        "test_a (tests.test_b.C.test_a)",
        "tests/b.py::test_c[x (y.z)]",
    ]
    swe_row = SweRow.from_values({**row, "FAIL_TO_PASS": names, "PASS_TO_PASS": []}, "row")
    assert swe_row.tests == (*["tests/test_b.py::C::test_a"] * 2, names[2])
