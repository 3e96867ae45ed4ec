"""A file that is appended to while other programs change it."""

from __future__ import annotations

import errno
import logging
import os
from pathlib import Path

import pytest

from ratchet.observe.tracing.perfetto import Trace
from ratchet.observe.write_files import AppendFile, open_plain, open_unshared


def delete(path: Path) -> None:
    path.unlink()


def truncate(path: Path) -> None:
    os.truncate(path, 4)


def save_in_an_editor(path: Path) -> None:
    draft = path.with_suffix(".swp")
    draft.write_bytes(path.read_bytes() + b"edited\n")
    draft.rename(path)


@pytest.mark.parametrize(
    ("change", "content"),
    [
        (delete, b"two\nthree\n"),
        (truncate, b"one1\ntwo\nthree\n"),
        (save_in_an_editor, b"one1\nedited\ntwo\nthree\n"),
    ],
)
def test_a_changed_file_is_named_once_and_appended_to(change, content, tmp_path, caplog) -> None:
    file = AppendFile(tmp_path / "a.jsonl")
    file.append(b"one1\n")
    change(file.path)
    with caplog.at_level(logging.WARNING):
        file.append(b"two\n")
        file.append(b"three\n")
    assert file.path.read_bytes() == content
    assert file.sync() == len(content)
    assert [record.getMessage().count("a.jsonl was ") for record in caplog.records] == [1]
    file.close()


def test_another_directory_of_the_same_name_is_left_alone(tmp_path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    file = AppendFile(run / "a.jsonl")
    run.rename(tmp_path / "moved")
    run.mkdir()
    (run / "a.jsonl").write_bytes(b"another\n")
    file.append(b"one\n")
    assert (run / "a.jsonl").read_bytes() == b"another\n"
    assert (tmp_path / "moved" / "a.jsonl").read_bytes() == b"one\n"
    file.close()


def test_a_deleted_directory_is_not_made_again(tmp_path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    file = AppendFile(run / "a.jsonl")
    (run / "a.jsonl").unlink()
    run.rmdir()
    file.append(b"one\n")
    assert not run.exists()
    file.close()


def test_a_full_disk_leaves_no_part_of_a_line(tmp_path, monkeypatch) -> None:
    file = AppendFile(tmp_path / "a.jsonl")
    file.append(b"one\n")
    write = os.write

    def half(descriptor: int, content: bytes) -> int:
        if len(content) < 5:
            raise OSError(errno.ENOSPC, "full")
        return write(descriptor, content[: len(content) // 2])

    monkeypatch.setattr(os, "write", half)
    with pytest.raises(OSError, match="full"):
        file.append(b"twotwo\n")
    assert file.path.read_bytes() == b"one\n"
    monkeypatch.undo()
    file.append(b"three\n")
    assert file.path.read_bytes() == b"one\nthree\n"
    file.close()


def link(path: Path) -> None:
    path.symlink_to(path.with_name("elsewhere"))


def link_to_itself(path: Path) -> None:
    path.symlink_to(path)


@pytest.mark.fault("P26")
@pytest.mark.parametrize("replace", [link, link_to_itself, os.mkfifo, os.mkdir])
def test_what_is_no_plain_file_is_refused_at_once(replace, tmp_path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.write_bytes(b"not of this run")
    file = AppendFile(tmp_path / "a.jsonl")
    file.append(b"one\n")
    file.path.unlink()
    replace(file.path)
    with pytest.raises(OSError, match=r"a\.jsonl"):
        file.append(b"two\n")
    assert elsewhere.read_bytes() == b"not of this run"
    for flags in (os.O_RDONLY, os.O_RDWR | os.O_CREAT):
        with pytest.raises(OSError, match=r"a\.jsonl"):
            open_plain(file.path, flags)
    file.close()


@pytest.mark.fault("P26")
@pytest.mark.parametrize("flags", [os.O_RDWR, os.O_WRONLY | os.O_CREAT | os.O_APPEND])
def test_other_names_of_a_file_keep_its_content(flags, tmp_path) -> None:
    """A backup by `cp -al` shares every file with its run until one of them changes."""
    path, backup = tmp_path / "a.jsonl", tmp_path / "backup"
    path.write_bytes(b"one\n")
    path.chmod(0o640)
    backup.hardlink_to(path)
    descriptor = open_unshared(path, flags)
    os.ftruncate(descriptor, 0)
    os.write(descriptor, b"two\n")
    os.close(descriptor)
    assert (path.read_bytes(), backup.read_bytes()) == (b"two\n", b"one\n")
    assert path.stat().st_mode & 0o777 == 0o640
    assert sorted(file.name for file in tmp_path.iterdir()) == ["a.jsonl", "backup"]


def test_a_backup_of_a_run_under_way_keeps_its_lines(tmp_path, caplog) -> None:
    file = AppendFile(tmp_path / "a.jsonl")
    file.append(b"one\n")
    for name in ("first", "second"):
        (tmp_path / name).hardlink_to(file.path)
        file.append(b"more\n")
    file.truncate(4)
    file.close()
    assert file.path.read_bytes() == b"one\n"
    assert (tmp_path / "first").read_bytes() == b"one\n"
    assert (tmp_path / "second").read_bytes() == b"one\nmore\n"
    assert not caplog.records


def test_a_link_or_backup_of_a_trace_stays_as_it_is(tmp_path) -> None:
    trace, backup = tmp_path / "trace.json", tmp_path / "backup.json"
    Trace(trace).close()
    before = trace.read_bytes()
    backup.hardlink_to(trace)
    Trace(trace).close()
    assert trace.read_bytes() != before == backup.read_bytes()
    trace.unlink()
    trace.symlink_to(backup)
    with pytest.raises(OSError, match="It is a link"):
        Trace(trace)
