"""The log file of a child process, which has all that the process prints."""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path

from ratchet.utils.safe_read import read_last_lines

# A log file larger than LOG_BYTES is truncated to its last KEPT_BYTES.
LOG_BYTES, KEPT_BYTES = 4 * 2**20, 2**16


def redirect_output(path: Path) -> None:
    """Append standard output, standard error and logging of this process to a file."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for descriptor in (1, 2):
        os.dup2(file, descriptor)
    os.close(file)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # pyright: ignore[reportAttributeAccessIssue]
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s", force=True
    )


def truncate_log(log: Path) -> None:
    """Truncate a large log to its last part.

    Lines written meanwhile may be lost; a full disk would be worse.
    """
    try:
        if log.stat().st_size <= LOG_BYTES:
            return
        with log.open("r+b") as file:
            file.seek(-KEPT_BYTES, os.SEEK_END)
            last_bytes = file.read()
            file.seek(0)
            file.truncate()
            file.write(last_bytes)
    except OSError:  # the log was removed, or the disk is full; the worker can continue
        pass


def read_tail(path: Path, lines: int = 20) -> str:
    """Return the last lines of a log; "" if it can't be read."""
    return "\n".join(read_last_lines(path, lines, max_bytes=KEPT_BYTES))
