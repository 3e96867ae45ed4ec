"""A console that a closed terminal or pipe does not break."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from typing import IO, Any, cast

from rich.console import Console

from ratchet.utils.terminal_text import make_console


def make_robust_console() -> Console:
    """Return a console on standard output that drops its output once standard output is closed.

    Writing fails with EIO on a closed terminal and with EPIPE on a closed pipe. Neither may end the
    run.
    """
    return make_console(cast("IO[str]", _RobustStream(sys.stdout)))


class _RobustStream:
    """A text stream that is redirected to /dev/null when a write fails."""

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except OSError:
            self._redirect_to_null()
            return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError:
            self._redirect_to_null()

    def _redirect_to_null(self) -> None:
        """Redirect the descriptor to /dev/null.

        Buffered text goes there too; otherwise the interpreter would fail to flush it at exit.
        """
        null_descriptor = os.open(os.devnull, os.O_WRONLY)
        with suppress(OSError, ValueError):
            os.dup2(null_descriptor, self._stream.fileno())
        os.close(null_descriptor)
