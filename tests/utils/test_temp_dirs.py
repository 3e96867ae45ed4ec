"""Temporary folders: what a killed process leaves goes with the next one, and nothing else does."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ratchet.utils import temp_dirs
from ratchet.utils.temp_dirs import TemporaryFolder, sweep

OWNER = """
import os, sys
from ratchet.utils.temp_dirs import TemporaryFolder
folder = TemporaryFolder("test")
(folder.path / "log").write_text("last words")
sys.stdout.write(f"{folder.path}\\n")
sys.stdout.flush()
sys.stdin.read()
"""


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A folder for temporary files of the test's own, for this process and those that it starts."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(temp_dirs, "SHARED_MEMORY", tmp_path / "shm")
    monkeypatch.setattr(temp_dirs, "_swept_parents", set())
    return tmp_path


@pytest.fixture
def owner(place):
    """A process that has a folder; its end of the input ends it."""
    with subprocess.Popen(
        [sys.executable, "-c", OWNER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        yield process, Path(process.stdout.readline().strip())
        process.kill()


@pytest.mark.fault("P25")
def test_a_dead_owners_folder_goes_and_a_living_ones_stays(owner, place):
    process, folder = owner
    (place / "ratchet-mine").mkdir()  # a user's, of a similar name
    assert folder.parent == place
    assert sweep() == []
    with TemporaryFolder("test") as mine:
        assert sweep() == []
        assert mine.is_dir()
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert folder.is_dir()
        assert sweep() == [folder]
    assert os.listdir(place) == ["ratchet-mine"]


@pytest.mark.fault("P25")
def test_making_a_folder_removes_a_dead_owners(owner):
    process, folder = owner
    process.kill()
    process.wait()
    with TemporaryFolder("test"):
        assert not folder.exists()


def test_an_owner_that_ends_leaves_nothing(owner):
    process, folder = owner
    process.communicate()
    assert process.returncode == 0
    assert not folder.exists()


def test_others_folders_and_links_are_left(owner, place, monkeypatch):
    process, folder = owner
    process.kill()
    process.wait()
    (place / "ratchet-link").symlink_to(folder)
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    assert sweep() == []
    monkeypatch.undo()
    assert folder.is_dir()


def test_a_forked_child_does_not_take_its_parents_folder_away(place):
    folder = TemporaryFolder("test")
    child = os.fork()
    if not child:
        folder.close()
        os._exit(0)
    os.waitpid(child, 0)
    assert folder.path.is_dir()
    folder.close()
    assert not folder.path.exists()
    folder.close()


def test_a_disk_without_locks_is_never_swept(place, monkeypatch):
    def refuse(*_):
        raise OSError("no locks here")

    monkeypatch.setattr("fcntl.flock", refuse)
    with TemporaryFolder("test") as folder:
        assert sweep() == []
        assert folder.is_dir()
    assert not folder.exists()


def test_a_symlinked_owner_file_is_not_followed(place):
    folder = place / "ratchet-other"
    folder.mkdir()
    (place / "file").touch()
    (folder / temp_dirs.OWNER_FILE).symlink_to(place / "file")
    assert sweep() == []
    assert folder.is_dir()
