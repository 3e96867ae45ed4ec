"""A file is replaced whole, or stays as it was."""

from __future__ import annotations

from pathlib import Path

import pytest

from ratchet.observe.write_files import replace_text


def test_replaces(tmp_path: Path) -> None:
    for text in ("ä\n", ""):
        replace_text(tmp_path / "a.json", text)
        assert (tmp_path / "a.json").read_text(encoding="utf-8") == text
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]


def test_a_failure_keeps_the_old_content(tmp_path: Path) -> None:
    replace_text(tmp_path / "a.json", "old")
    with pytest.raises(UnicodeEncodeError):
        replace_text(tmp_path / "a.json", "new \ud800")
    (tmp_path / "folder").mkdir()
    with pytest.raises(OSError):
        replace_text(tmp_path / "folder", "x")
    assert (tmp_path / "a.json").read_text() == "old"
    assert {path.name for path in tmp_path.iterdir()} == {"a.json", "folder"}
