"""Shorten a traceback to the last line of the user's own code."""

from __future__ import annotations

import re
from pathlib import Path

from ratchet.utils.terminal_text import shorten_text

MAX_CHARS = 2000  # longest exception that is described: its message may be a model's answer
TRACEBACK_HEADER = "Traceback (most recent call last):"
FRAME = re.compile(r'^  File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<name>\S+)', re.M)
# Code of Ratchet, of installed packages and of Python itself is not the user's.
PACKAGE = Path(__file__).parents[1]
INSTALLED = re.compile(r"site-packages|dist-packages|/lib/python3|<frozen|<string>")


def describe_user_error(text: str) -> str:
    """Return one line for a traceback: the exception, and the last frame of the user's code.

    Text without a traceback is returned as it is, but for its end where it is very long.
    """
    frames = [frame for frame in FRAME.finditer(text) if _is_users(frame["file"])]
    exception = shorten_text(_last_line(text), MAX_CHARS)
    if not FRAME.search(text):
        return shorten_text(text.strip(), MAX_CHARS)
    if not frames:
        return exception
    last = frames[-1]
    return f"{exception} ({last['file']}, line {last['line']}, in {last['name']})"


def _is_users(file: str) -> bool:
    return PACKAGE not in Path(file).parents and INSTALLED.search(file) is None


def _last_line(text: str) -> str:
    """Return the exception's line: the last one that is not indented."""
    lines = [line for line in text.splitlines() if line and not line[0].isspace()]
    return lines[-1].strip() if lines else text.strip()
