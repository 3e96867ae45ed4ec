"""Write a server's log without waiting for its reader."""

from __future__ import annotations

import logging
import select
from copy import deepcopy
from typing import Any, TextIO

from uvicorn.config import LOGGING_CONFIG


class NonblockingHandler(logging.StreamHandler[TextIO]):
    """A log handler that drops a line if writing it would block.

    The event loop writes the lines. If a program starts the server with its output in a pipe and
    never reads the pipe, a write would block once the pipe is full, and no request would be
    answered any more. A pipe that polls as writable has room for PIPE_BUF (4096) bytes.
    """

    def emit(self, record: logging.LogRecord) -> None:
        """Write the record, or drop it."""
        poll = select.poll()
        try:
            poll.register(self.stream, select.POLLOUT)
        except (OSError, ValueError):
            super().emit(record)  # no stream of the system, such as a notebook's
            return
        if poll.poll(0):
            super().emit(record)


def make_log_config() -> dict[str, Any]:
    """Return uvicorn's configuration of logging with handlers that never block."""
    config = deepcopy(LOGGING_CONFIG)
    for handler in config["handlers"].values():
        handler["class"] = f"{NonblockingHandler.__module__}.{NonblockingHandler.__name__}"
    return config
