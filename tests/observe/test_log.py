"""run.log: one format, UTC, and nothing in it can steer a terminal."""

from __future__ import annotations

import io
import logging
import os
import re
from pathlib import Path

import pytest
from rich.console import Console

from ratchet.errors import RunDirectoryError
from ratchet.observe import log
from ratchet.observe.log import UtcFormatter, log_to

logger = logging.getLogger("ratchet.somewhere")


def test_one_format(tmp_path: Path) -> None:
    with log_to(tmp_path / "run.log"):
        logger.info("step %d", 3)
        logger.debug("too fine")
    logger.info("after")
    assert re.fullmatch(
        r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z INFO ratchet\.somewhere: step 3\n",
        (tmp_path / "run.log").read_text(),
    )


def test_time_is_utc() -> None:
    record = logging.LogRecord("ratchet", logging.INFO, "", 0, "x", (), None)
    record.created, record.msecs = 86400.25, 250.0
    assert UtcFormatter().format(record) == "1970-01-02T00:00:00.250Z INFO ratchet: x"


def test_a_resumed_run_appends(tmp_path: Path) -> None:
    for word in ("one", "two"):
        with log_to(tmp_path / "run.log"):
            logger.info(word)
    assert [
        line.rpartition(" ")[2] for line in (tmp_path / "run.log").read_text().splitlines()
    ] == ["one", "two"]


@pytest.mark.fault("S11")
def test_hostile_text_is_inert(tmp_path: Path) -> None:
    file = io.StringIO()
    console = Console(file=file, width=20, color_system=None)
    with log_to(tmp_path / "run.log", console=console):
        logger.warning("%s", "\x1b[31m[bold]red\x9b2J\n2026-01-01T00:00:00.000Z ERROR forged\ud800")
    lines = (tmp_path / "run.log").read_text().splitlines()
    assert lines[0].endswith("WARNING ratchet.somewhere: \\x1b[31m[bold]red\\x9b2J")
    assert lines[1:] == ["    2026-01-01T00:00:00.000Z ERROR forged\\ud800"]
    assert "\x1b" not in file.getvalue()
    assert "[bold]red" in file.getvalue()


def test_tracebacks_are_logged_indented(tmp_path: Path) -> None:
    with log_to(tmp_path / "run.log"):
        try:
            raise KeyError("x")
        except KeyError:
            logger.exception("failed")
    first, *rest = (tmp_path / "run.log").read_text().splitlines()
    assert first.endswith("ERROR ratchet.somewhere: failed")
    assert rest[-1] == "    KeyError: 'x'"
    assert all(line.startswith("    ") for line in rest)


def test_only_warnings_reach_the_console(tmp_path: Path) -> None:
    file = io.StringIO()
    with log_to(tmp_path / "run.log", console=Console(file=file, width=10)):
        logger.info("quiet")
        logger.warning("a long warning that is not broken [into] lines")
    assert file.getvalue() == "warning: a long warning that is not broken [into] lines\n"


def test_a_terminal_without_unicode_is_warned_all_the_same(tmp_path: Path) -> None:
    raw = io.BytesIO()
    console = Console(file=io.TextIOWrapper(raw, encoding="ascii", write_through=True), width=80)
    with log_to(tmp_path / "run.log", console=console):
        logger.warning("%s", "ä\ud800")
    assert raw.getvalue() == b"warning: \\xe4\\ud800\n"
    assert (tmp_path / "run.log").read_text(encoding="utf-8").endswith("ä\\ud800\n")


def test_handlers_and_level_are_put_back(tmp_path: Path) -> None:
    root = logging.getLogger("ratchet")
    before = list(root.handlers), root.level
    with log_to(tmp_path / "run.log", level=logging.DEBUG):
        assert root.level == logging.DEBUG
    assert (list(root.handlers), root.level) == before


@pytest.mark.fault("P27")
def test_a_full_disk_is_told_once(tmp_path: Path, capsys, monkeypatch) -> None:
    screen = io.StringIO()
    monkeypatch.setattr(log, "open_unshared", lambda path, flags: os.open("/dev/full", os.O_WRONLY))
    with log_to(tmp_path / "run.log", console=Console(file=screen, width=80)):
        for step in range(3):
            logger.info("step %d", step)
    assert screen.getvalue().count("can't be written") == 1
    assert "No space left" in screen.getvalue()
    assert capsys.readouterr().err == ""


@pytest.mark.fault("P26")
def test_a_log_that_is_no_plain_file_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "run.log")
    with pytest.raises(RunDirectoryError, match=r"run\.log"), log_to(tmp_path / "run.log"):
        pass
