"""Write `run.log`: everything that Ratchet logs, in one format and in UTC.

Warnings go to the screen too.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import TextIOWrapper
from pathlib import Path

from rich.console import Console
from rich.text import Text

from ratchet.errors import RunDirectoryError
from ratchet.observe.write_files import open_unshared
from ratchet.utils.terminal_text import escape_controls


class UtcFormatter(logging.Formatter):
    """A formatter of records for `run.log`.

    A record is `2026-01-31T12:00:00.123Z WARNING ratchet.runs.checkpoints: message`. Its further
    lines are indented, so that a line at the left margin always starts a record. Control characters
    are escaped, because model text and tracebacks could otherwise steer a terminal that shows them.
    """

    converter = time.gmtime

    def __init__(self) -> None:
        super().__init__(
            "%(asctime)s.%(msecs)03dZ %(levelname)s %(name)s: %(message)s",
            datefmt="%Y-%m-%dT%H:%M:%S",
        )

    def format(self, record: logging.LogRecord) -> str:
        return escape_controls(super().format(record)).replace("\n", "\n    ")


class LogFile(logging.FileHandler):
    """The handler of `run.log`.

    If the disk fails, records are lost with one warning, and the run continues.
    """

    def __init__(self, path: Path, console: Console | None) -> None:
        """Open the file. Raises OSError, for example if it is a link, a pipe or a device."""
        super().__init__(path, encoding="utf-8", errors="backslashreplace")
        self.console, self.is_complete = console, True

    def _open(self) -> TextIOWrapper:
        descriptor = open_unshared(Path(self.baseFilename), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        return open(descriptor, self.mode, encoding=self.encoding, errors=self.errors)  # type: ignore[return-value]

    def handleError(self, record: logging.LogRecord) -> None:
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            super().handleError(record)
        elif self.is_complete:
            self.is_complete = False
            if self.console is not None:
                text = (
                    f"warning: {self.baseFilename} can't be written, so it lacks records: {error}"
                )
                self.console.print(Text(escape_controls(text), style="yellow"), soft_wrap=True)

    def close(self) -> None:
        with suppress(OSError):  # the same error as for the records that were lost
            super().close()


class ConsoleHandler(logging.Handler):
    """A handler that prints warnings and errors on the console of the progress display.

    Printing through that console keeps the display intact.
    """

    def __init__(self, console: Console) -> None:
        super().__init__(logging.WARNING)
        self.console = console

    def emit(self, record: logging.LogRecord) -> None:
        line = escape_controls(f"{record.levelname.lower()}: {record.getMessage()}")
        line = line.encode(self.console.encoding, "backslashreplace").decode(self.console.encoding)
        self.console.print(
            Text(line, style="yellow" if record.levelno < logging.ERROR else "red"), soft_wrap=True
        )


@contextmanager
def log_to(
    path: Path, *, console: Console | None = None, level: int = logging.INFO
) -> Iterator[None]:
    """Append records of `ratchet` loggers to `path` inside the block; show warnings on `console`.

    Raises RunDirectoryError if the file can't be opened.
    """
    try:
        log_file = LogFile(path, console)
    except OSError as error:
        raise RunDirectoryError(
            f"{path} can't be written ({error.strerror or error}): move it away, or make it "
            "writable"
        ) from error
    log_file.setFormatter(UtcFormatter())
    handlers: list[logging.Handler] = [log_file]
    if console is not None:
        handlers.append(ConsoleHandler(console))
    logger = logging.getLogger("ratchet")
    previous_level = logger.level
    logger.setLevel(level)
    for handler in handlers:
        logger.addHandler(handler)
    try:
        yield
    finally:
        logger.setLevel(previous_level)
        for handler in handlers:
            logger.removeHandler(handler)
            handler.close()
