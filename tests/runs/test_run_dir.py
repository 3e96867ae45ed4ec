"""One run a directory, one recipe a directory."""

from __future__ import annotations

import fcntl
import json
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from ratchet.cli.errors import WRONG_INPUT, explain_error
from ratchet.errors import RunDirectoryError
from ratchet.runs.run_dir import RunDirectory, list_config_differences

CONFIG = {
    "seed": 7,
    "model": {"preset": "tiny", "dtype": "float32"},
    "stages": [{"name": "sft", "lr": 1e-5}, {"name": "rl"}],
}

HOLD = """
import os, sys
from pathlib import Path
from ratchet.runs.run_dir import RunDirectory
with RunDirectory(Path(sys.argv[1])).locked():
    print(os.getpid(), flush=True)
    sys.stdin.read()
"""


def holder(path: Path) -> subprocess.Popen[str]:
    """Another process that holds the directory until its stdin is closed, or until it is killed."""
    command = [sys.executable, "-c", HOLD, str(path)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert int(process.stdout.readline()) == process.pid
    return process


def test_making_one_touches_nothing(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "run")
    assert not run.is_used
    assert list(tmp_path.iterdir()) == []


def test_locked_creates_the_directory(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "runs" / "a")
    with run.locked():
        assert run.path.is_dir()
    with run.locked():  # and again, after it was released
        pass


def test_a_process_that_the_run_forked_does_not_keep_the_lock(tmp_path: Path) -> None:
    """User code may fork, as `multiprocessing` does; such a process can outlive a killed run."""
    run, other = RunDirectory(tmp_path / "run"), RunDirectory(tmp_path / "run")
    with run.locked():
        child = os.fork()
        if not child:
            signal.pause()
        with pytest.raises(RunDirectoryError, match="is in use by process"), other.locked():
            pass
    try:
        with other.locked():
            pass
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_a_reader_that_tries_the_lock_refuses_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunDirectory(tmp_path)
    with run.locked():
        pass
    readers = [os.open(tmp_path / ".lock", os.O_RDONLY)]
    fcntl.flock(readers[0], fcntl.LOCK_SH)
    real_flock = fcntl.flock

    def flock(descriptor: int, operation: int) -> None:
        try:
            real_flock(descriptor, operation)
        finally:
            while readers:  # `is_locked` holds the lock for a moment only
                os.close(readers.pop())

    monkeypatch.setattr(fcntl, "flock", flock)
    with run.locked():
        assert run.is_locked


@pytest.mark.medium
@pytest.mark.fault("P14")
def test_a_second_run_is_refused_and_told_by_whom(tmp_path: Path) -> None:
    process = holder(tmp_path)
    try:
        with pytest.raises(
            RunDirectoryError,
            match=rf"process {process.pid} on {socket.gethostname()} since 20.*--run-dir",
        ):
            RunDirectory(tmp_path).locked().__enter__()
    finally:
        process.communicate("")
    with RunDirectory(tmp_path).locked():
        pass


@pytest.mark.medium
def test_a_second_run_in_the_same_process_is_refused(tmp_path: Path) -> None:
    with (
        RunDirectory(tmp_path).locked(),
        pytest.raises(RunDirectoryError, match=f"process {os.getpid()} "),
    ):
        RunDirectory(tmp_path).locked().__enter__()


@pytest.mark.fault("P15")
def test_what_a_killed_run_left_is_taken_over(tmp_path: Path) -> None:
    process = holder(tmp_path)
    process.kill()
    process.communicate()
    assert json.loads((tmp_path / ".lock").read_text())["pid"] == process.pid  # stale
    with RunDirectory(tmp_path).locked():
        assert json.loads((tmp_path / ".lock").read_text())["pid"] == os.getpid()
    assert (tmp_path / ".lock").read_text() == ""


@pytest.mark.medium
def test_a_holder_that_has_not_said_who_it_is(tmp_path: Path) -> None:
    with RunDirectory(tmp_path).locked():
        (tmp_path / ".lock").write_text("")
        with pytest.raises(RunDirectoryError, match="in use by another process"):
            RunDirectory(tmp_path).locked().__enter__()


def test_the_lock_is_released_by_an_error(tmp_path: Path) -> None:
    with pytest.raises(KeyError), RunDirectory(tmp_path).locked():
        raise KeyError
    with RunDirectory(tmp_path).locked():
        pass


def test_a_directory_that_cannot_be_created(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "run"):
        with pytest.raises(RunDirectoryError, match=r"can't be used.*--run-dir") as refused:
            RunDirectory(path).locked().__enter__()
        _, status = explain_error(refused.value) or ("", 0)
        assert status == WRONG_INPUT  # `--supervise` does not start it again


@pytest.mark.parametrize(
    ("lock_exists", "reason"),
    [
        (False, r"Permission denied: .*; choose another --run-dir"),
        (True, "is read-only; let this user write there"),
    ],
)
@pytest.mark.fault("P11")
def test_a_read_only_directory(tmp_path: Path, lock_exists: bool, reason: str) -> None:
    if lock_exists:  # as in the directory of a run
        (tmp_path / "config.yaml").touch()
        (tmp_path / ".lock").touch()
        (tmp_path / ".lock").chmod(0o666)
    # Permissions do not bind root, who therefore becomes nobody; from inside, the folders above
    # need not let nobody through.
    code = """
import os, sys
from pathlib import Path
from ratchet.runs.run_dir import RunDirectory
from ratchet.errors import RunDirectoryError
os.chdir(sys.argv[1])
os.chmod(".", 0o555)
if os.geteuid() == 0:
    os.setresgid(65534, 65534, 65534)
    os.setresuid(65534, 65534, 65534)
try:
    with RunDirectory(Path(".")).locked():
        print("used")
except RunDirectoryError as error:
    print("refused:", error)
"""
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith("refused: the run directory . ")
    assert re.search(reason, done.stdout), done.stdout


# --- the recipe


def test_the_recipe_is_written_once_and_read_back(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    run.write_or_check_config(CONFIG)
    assert run.is_used
    assert run.read_config() == CONFIG
    before = run.config.read_bytes()
    run.write_or_check_config(CONFIG)
    assert run.config.read_bytes() == before
    assert {path.name for path in tmp_path.iterdir()} == {"config.yaml"}


@pytest.mark.fault("C11")
def test_another_recipe_is_refused_naming_the_keys(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    run.write_or_check_config(CONFIG)
    other = {
        "seed": 8,
        "model": {"preset": "tiny"},
        "stages": [{"name": "sft", "lr": 2e-5}, {"name": "rl"}],
        "device": "cpu",
    }
    with pytest.raises(RunDirectoryError) as refused:
        run.write_or_check_config(other)
    message = str(refused.value)
    for part in (
        "seed: 7 -> 8",
        "model.dtype: 'float32' -> absent",
        "stages.0.lr: 1e-05 -> 2e-05",
        "device: absent -> 'cpu'",
        "--run-dir",
        "resume with the same recipe",
    ):
        assert part in message
    assert run.read_config() == CONFIG
    with pytest.raises(RunDirectoryError, match="another recipe") as refused_at_start:
        run.check_recipe(other)
    # The next start would be refused too, so `--supervise` makes none.
    for error in (refused.value, refused_at_start.value):
        assert explain_error(error) == (f"RunDirectoryOccupied: {error}", WRONG_INPUT)


def test_many_differences_are_counted(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    run.write_or_check_config({f"k{i}": i for i in range(20)})
    with pytest.raises(RunDirectoryError, match=r"k7: 7 -> -7 and 12 more\."):
        run.write_or_check_config({f"k{i}": -i if i else 1 for i in range(20)})


@pytest.mark.parametrize(
    ("before", "now", "expected"),
    [
        ({"a": 1}, {"a": 1}, []),
        ({"a": 1}, {"a": True}, ["a: 1 -> True"]),
        ({"a": [1, 2]}, {"a": (1, 2)}, []),
        ({"a": [1, 2]}, {"a": [1]}, ["a: [1, 2] -> [1]"]),
        ({"a": [{"b": 1}]}, {"a": [{"b": 2}]}, ["a.0.b: 1 -> 2"]),
        ({"a": {"b": 1}}, {"a": None}, ["a: {'b': 1} -> None"]),
        ({"a": None}, {}, ["a: None -> absent"]),
    ],
)
def test_differences(before: dict, now: dict, expected: list[str]) -> None:
    assert list_config_differences(before, now) == expected


@pytest.mark.parametrize("content", [None, "", "- a", "a: [", "\x00"])
def test_no_run_directory(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "config.yaml").write_text(content)
    with pytest.raises(RunDirectoryError, match=r"config\.yaml"):
        RunDirectory(tmp_path).read_config()


def test_a_recipe_never_makes_python_objects(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("a: !!python/object/apply:os.getcwd []")
    assert RunDirectory(tmp_path).read_config() == {"a": []}


@pytest.mark.fault("P26")
@pytest.mark.parametrize(
    "replace", [lambda path: path.symlink_to(path.with_name("other")), os.mkfifo, os.mkdir]
)
def test_a_lock_that_is_no_plain_file(replace, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.write_text("not of this run")
    directory = RunDirectory(tmp_path)
    with directory.locked():
        directory.write_or_check_config(CONFIG)
        (tmp_path / ".lock").unlink()
        replace(tmp_path / ".lock")
        with pytest.raises(RunDirectoryError, match=r"\.lock"):
            directory.verify(CONFIG)
    assert not directory.is_locked  # a pipe is not waited for
    with pytest.raises(RunDirectoryError, match=r"\.lock"), directory.locked():
        pass
    assert other.read_text() == "not of this run"


@pytest.mark.fault("P26")
def test_a_recipe_that_is_no_plain_file(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path)
    with directory.locked():
        directory.write_or_check_config(CONFIG)
        directory.config.unlink()
        os.mkfifo(directory.config)
        directory.verify(CONFIG)
        assert directory.read_config() == CONFIG
        directory.config.unlink()
        directory.config.mkdir()
        with pytest.raises(RunDirectoryError, match="can't be written"):
            directory.verify(CONFIG)


@pytest.mark.fault("P22")
def test_a_path_that_leads_nowhere_is_a_lost_directory(tmp_path: Path) -> None:
    parent = tmp_path / "parent"
    directory = RunDirectory(parent / "run")
    with directory.locked():
        directory.write_or_check_config(CONFIG)
        parent.rename(tmp_path / "moved")
        parent.write_text("a file")
        with pytest.raises(RunDirectoryError, match="moved or replaced"):
            directory.verify(CONFIG)
        parent.unlink()
        parent.symlink_to(parent)
        with pytest.raises(RunDirectoryError, match="moved or replaced"):
            directory.verify(CONFIG)
