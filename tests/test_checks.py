"""The checks themselves: a limit that is broken fails, and nothing survives a budget."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

CI = Path(__file__).resolve().parent.parent / ".ci"


def sizes(directory: Path, source: str) -> tuple[int, str]:
    directory.joinpath("module.py").write_text(source, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, str(CI / "sizes.py"), str(directory)],
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout


def names(directory: Path) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, str(CI / "names.py"), str(directory)],
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout


def test_public_classes_of_one_name_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("class Router: ...\nclass _Own: ...\n", encoding="utf-8")
    (tmp_path / "b.py").write_text("class _Own: ...\n", encoding="utf-8")
    assert names(tmp_path)[0] == 0
    (tmp_path / "b.py").write_text("class Router: ...\n", encoding="utf-8")
    code, output = names(tmp_path)
    assert (code, "2 public classes are called Router" in output) == (1, True), output


def test_a_folder_of_more_than_20_modules_is_refused(tmp_path: Path) -> None:
    for number in range(20):
        (tmp_path / f"module_{number}.py").touch()
    (tmp_path / "__init__.py").touch()
    assert names(tmp_path)[0] == 0
    (tmp_path / "one_more.py").touch()
    code, output = names(tmp_path)
    assert (code, "holds 21 modules (limit 20)" in output) == (1, True), output


def test_more_literal_getattrs_than_there_were_are_refused(tmp_path: Path) -> None:
    call = 'getattr(x, "name", None)\n'
    (tmp_path / "a.py").write_text(call * 22 + "getattr(x, name)\n", encoding="utf-8")
    assert names(tmp_path)[0] == 0
    (tmp_path / "b.py").write_text(call, encoding="utf-8")
    code, output = names(tmp_path)
    assert (code, "23 calls of getattr with a literal name" in output) == (1, True), output


def function(lines: int) -> str:
    return "def f():\n" + "    pass\n" * (lines - 1)


@pytest.mark.parametrize(
    ("source", "status", "word"),
    [
        ("x = 1\n" * 400, 0, "0 warnings"),
        ("x = 1\n" * 401, 0, "warning: "),
        ("x = 1\n" * 500, 0, "warning: "),
        ("x = 1\n" * 501, 1, "error: "),
        (function(60), 0, "0 warnings"),
        (function(61), 0, "warning: "),
        (function(80), 0, "warning: "),
        (function(81), 1, "error: "),
        ("async " + function(81), 1, "error: "),
        ("@a\n" + function(80), 1, "error: "),
    ],
)
def test_sizes(tmp_path: Path, source: str, status: int, word: str) -> None:
    code, output = sizes(tmp_path, source)
    assert (code, word in output) == (status, True), output


def test_nesting_warns_above_four(tmp_path: Path) -> None:
    def nested(depth: int) -> str:
        ifs = "".join("    " * (i + 1) + "if x:\n" for i in range(depth))
        return f"def f(x):\n{ifs}" + "    " * (depth + 1) + "pass\n"

    assert "0 warnings" in sizes(tmp_path, nested(4))[1]
    assert "nested 5 deep" in sizes(tmp_path, nested(5))[1]


def test_elif_and_inner_functions_do_not_nest(tmp_path: Path) -> None:
    chain = "def f(x):\n    if x == 0:\n        pass\n" + "".join(
        f"    elif x == {i}:\n        pass\n" for i in range(1, 9)
    )
    inner = "def f(x):\n    if x:\n        if x:\n            if x:\n                def g():\n                    if x:\n"
    inner += "                        if x:\n                            pass\n"
    assert "0 warnings" in sizes(tmp_path, chain)[1]
    assert "0 warnings" in sizes(tmp_path, inner)[1]


def test_nothing_to_check_is_an_error(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(CI / "sizes.py"), str(tmp_path)], capture_output=True, check=False
    )
    assert done.returncode == 2


def budget(minutes: float, *command: str) -> subprocess.CompletedProcess[str]:
    options = ["--minutes", str(minutes), "--name", "the check", "--grace-s", "0.2"]
    wrapper = [sys.executable, str(CI / "budget.py"), *options, "--", *command]
    return subprocess.run(wrapper, capture_output=True, text=True, check=False, timeout=120)


@pytest.mark.parametrize("status", [0, 1, 5])
def test_budget_passes_the_status_on(status: int) -> None:
    done = budget(1, "sh", "-c", f"echo out; exit {status}")
    assert (done.returncode, done.stdout, done.stderr) == (status, "out\n", "")


def test_budget_reports_death_by_signal() -> None:
    assert budget(1, "sh", "-c", "kill -KILL $$").returncode == 128 + 9


def test_budget_gives_no_stdin() -> None:
    assert budget(1, "cat").returncode == 0


@pytest.mark.medium
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux lets a process adopt its orphans")
def test_what_outlives_the_command_is_killed_and_named() -> None:
    # In a session of its own, and deaf to SIGTERM and SIGINT: what a process group's end would miss.
    daemon = "trap '' TERM INT; sleep 999"
    done = budget(1, "sh", "-c", f'setsid sh -c "{daemon}" >/dev/null 2>&1 & echo $!')
    assert done.returncode == 0
    assert "killed what it left running" in done.stderr
    assert not alive(int(done.stdout))


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux lets a process adopt its orphans")
def test_overrun_fails_and_nothing_survives() -> None:
    done = budget(2 / 60, "sh", "-c", "setsid sleep 999 & echo $!; sleep 999 & echo $!; wait")
    assert done.returncode == 124
    assert "the check: over its budget of" in done.stderr
    assert [alive(int(pid)) for pid in done.stdout.split()] == [False, False]


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.fixture(scope="module")
def changed():
    """The module that chooses the tests that a change touches."""
    spec = importlib.util.spec_from_file_location("changed", CI / "changed.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def test_map(changed):
    with contextlib.chdir(CI.parent):
        return changed.TestMap()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("file", "touched", "untouched"),
    [
        ("ratchet/learners/local.py", "learners/test_local.py", "sandbox/test_local.py"),
        # a helper of tests, and one of a folder
        ("tests/learners/ranks.py", "learners/test_spread.py", "learners/test_local.py"),
        ("tests/executors/conftest.py", "executors/test_kills.py", "learners/test_local.py"),
        ("tests/test_checks.py", "test_checks.py", "test_types.py"),
        # named by a table of kinds in another module, and by no module at all
        ("ratchet/environments/mixture.py", "environments/test_mixture.py", "test_checks.py"),
        ("ratchet/sandbox/inside/child.py", "sandbox/test_local.py", "learners/test_local.py"),
        ("ratchet/learners/__init__.py", "learners/test_local.py", "sandbox/test_local.py"),
        # what is no module belongs to its folder
        ("ratchet/kernels/gone.c", "kernels/test_build.py", "learners/test_local.py"),
    ],
)
def test_a_change_touches_the_tests_that_lead_to_it(
    file, touched, untouched, changed, test_map
) -> None:
    chosen = changed.choose([Path(file)], test_map)
    assert Path("tests", touched) in chosen
    assert Path("tests", untouched) not in chosen


@pytest.mark.slow
def test_a_document_touches_no_test(changed, test_map) -> None:
    assert changed.choose([Path("docs/recipe.md")], test_map) == []


def test_changes_are_those_since_the_branch_left_main(changed, tmp_path, monkeypatch) -> None:
    def git(*words: str) -> None:
        subprocess.run(
            ["git", "-c", "user.name=n", "-c", "user.email=e", *words], check=True, cwd=tmp_path
        )

    monkeypatch.chdir(tmp_path)
    git("init", "--quiet", "--initial-branch=main")
    for name in ("same", "edited", "removed"):
        (tmp_path / name).write_text("1")
    git("add", ".")
    git("commit", "--quiet", "--message=first")
    git("checkout", "--quiet", "-b", "branch")
    (tmp_path / "committed").write_text("1")
    git("add", ".")
    git("commit", "--quiet", "--message=second")
    (tmp_path / "edited").write_text("2")
    (tmp_path / "removed").unlink()
    (tmp_path / "untracked").write_text("1")
    late = {Path("edited"), Path("removed"), Path("untracked")}
    assert changed.changed_files(None) == late | {Path("committed")}
    assert changed.changed_files("HEAD") == late
    with pytest.raises(SystemExit, match="SINCE=nowhere is no commit"):
        changed.changed_files("nowhere")
