"""A console that a closed terminal or pipe does not break."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from typing import IO, Any, cast

from rich.console import Console

from ratchet.utils.terminal_text import make_console


def lasting_console() -> Console:
    """Return a console on standard output that goes on, silently, when nothing reads it any more.

    A terminal that was closed answers a write with EIO, a pipe with EPIPE; neither is a reason to
    lose a step.
    """
    return make_console(cast("IO[str]", _Lasting(sys.stdout)))


class _Lasting:
    """A text stream whose descriptor becomes that of /dev/null with the first write that fails."""

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except OSError:
            self._give_up()
            return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError:
            self._give_up()

    def _give_up(self) -> None:
        """Send what the stream still buffers to /dev/null too, or the interpreter would fail at its
        end."""
        nothing = os.open(os.devnull, os.O_WRONLY)
        with suppress(OSError, ValueError):
            os.dup2(nothing, self._stream.fileno())
        os.close(nothing)
