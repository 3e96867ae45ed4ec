"""Errors of commands: the message that is printed for an error, and the exit status."""

from __future__ import annotations

import errno
import io
import math
import os
import select
import sys
import traceback
from pathlib import Path

import typer

from ratchet.errors import (
    CheckpointNotFound,
    ConfigError,
    DataError,
    ModelError,
    RatchetError,
    RunDirectoryOccupied,
    RunDirectoryUnusable,
    RunNotFound,
    link_symptom,
)
from ratchet.utils.terminal_text import escape_controls, get_first_line, shorten_text

WRONG_INPUT = 2  # exit status: a recipe, data or a model is wrong, or too large for this machine
WRONG_INPUT_ERRORS = (
    ConfigError,
    DataError,
    ModelError,
    RunNotFound,
    RunDirectoryOccupied,
    RunDirectoryUnusable,
    CheckpointNotFound,
)
FAILED = 1  # exit status of all other errors
MAX_CHARS = 10_000  # longest message that is printed
# Errors of a write that the user can fix by making room: a full disk, a quota, `ulimit -f`.
DISK_FULL_ERRNOS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# Errors are recognised by these texts, because libraries in Rust raise them without an errno.
DISK_FULL_TEXTS = tuple(os.strerror(number) for number in DISK_FULL_ERRNOS)
REFUSED_ERRNOS = (errno.EROFS, errno.EACCES)  # a read-only disk, or missing permissions
MAKE_ROOM = "Make room where the output goes"
PACKAGE = Path(__file__).parents[1]
# Parts of the messages of loaders and allocators that ran out of memory. Their exceptions have no
# common type.
OUT_OF_MEMORY_TEXTS = (
    "failed to map segment",
    "Cannot allocate memory",
    "can't allocate memory",
    "cannot allocate memory",
)


def prepare_streams() -> None:
    """Make stdout and stderr escape a character that they can't encode, instead of raising."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def say(text: object) -> None:
    """Print text with its control characters escaped.

    Otherwise the text of a model or a file could control the terminal.
    """
    typer.echo(escape_controls(str(text)))


def require_finite(value: float | None) -> float | None:
    """Return the value of an option. Raise BadParameter, exit status 2, for nan and infinities."""
    if value is not None and not math.isfinite(value):
        raise typer.BadParameter(f"{value} is not a finite number")
    return value


def explain_error(error: BaseException) -> tuple[str, int] | None:
    """Return the message to print for an error, and the exit status.

    Return None for an error that is a bug: its traceback should be shown.
    """
    if isinstance(error, RatchetError):
        status = WRONG_INPUT if isinstance(error, WRONG_INPUT_ERRORS) else FAILED
        message = f"{type(error).__name__}: {shorten_text(str(error), MAX_CHARS)}"
        # The error says what could not be written; the way out is the same for all of them.
        if any(text in message for text in DISK_FULL_TEXTS) and MAKE_ROOM not in message:
            message = f"{message.rstrip('.')}. {MAKE_ROOM}. {link_symptom('the-disk-is-full')}"
        return message, status
    if isinstance(error, RecursionError):
        return (
            f"an input is nested too deeply ({_locate(error)}): nest it less, or report this as a "
            "bug",
            WRONG_INPUT,
        )
    if isinstance(error, UnicodeEncodeError) and error.reason == "surrogates not allowed":
        return (
            f"a name is not valid UTF-8 ({_locate(error)}): rename the file or directory "
            f"{shorten_text(str(error.object), 200)}",
            WRONG_INPUT,
        )
    if isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG:
        path = shorten_text(str(error.filename), 200)
        return f"a path is too long ({_locate(error)}): shorten {path}", WRONG_INPUT
    if type(error).__name__ == "OutOfMemoryError":  # torch's, which isn't imported here
        return (
            f"the accelerator has not enough memory ({_locate(error)}): "
            f"{get_first_line(str(error)).rstrip('.')}. {link_symptom('out-of-memory')}",
            WRONG_INPUT,
        )
    if isinstance(error, MemoryError) or any(text in str(error) for text in OUT_OF_MEMORY_TEXTS):
        return (
            f"there is not enough memory ({_locate(error)}): free some, raise `ulimit -v`, or use "
            f"a smaller model or batch. {link_symptom('out-of-memory')}",
            WRONG_INPUT,
        )
    if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
        return (
            f"too many files are open ({_locate(error)}): {get_first_line(str(error))}. Raise "
            "`ulimit -n`, or close the files that a reward, an environment or an agent of yours "
            "leaves open",
            FAILED,
        )
    if isinstance(error, OSError) and error.errno in REFUSED_ERRNOS and error.filename is not None:
        path = shorten_text(str(error.filename), 200)
        return (
            f"{path} can't be used ({_locate(error)}): {error.strerror}. Choose another place, or "
            "allow this user to use it",
            FAILED,
        )
    if any(text in str(error) for text in DISK_FULL_TEXTS):
        return (
            f"nothing more can be written ({_locate(error)}): {get_first_line(str(error))}. "
            f"{MAKE_ROOM}. {link_symptom('the-disk-is-full')}",
            FAILED,
        )
    return None


def is_reader_gone() -> bool:
    """True if a program that read stdout or stderr has ended."""
    poll = select.poll()
    for descriptor in (1, 2):
        poll.register(descriptor, 0)  # an empty mask still reports POLLERR and POLLHUP
    return any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))


def _locate(error: BaseException) -> str:
    """Return the file and line of the innermost traceback frame in Ratchet's own code.

    The location stands in for the traceback, which is not printed. Without such a frame, return the
    name of the error's type.
    """
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__, limit=-200)
        if PACKAGE in Path(frame.filename).parents
    ]
    return (
        f"{Path(frames[-1].filename).relative_to(PACKAGE.parent)}:{frames[-1].lineno}"
        if frames
        else type(error).__name__
    )


def exit_with_error(error: BaseException) -> None:
    """Print the message of an error and exit with its status.

    An error for which `explain_error` returns None, i.e. a bug, is raised again.
    """
    explanation = explain_error(error)
    if explanation is None:
        raise error
    message, status = explanation
    typer.echo(escape_controls(message), err=True)
    _drop_unwritable_output()
    sys.exit(status)


def _drop_unwritable_output() -> None:
    """Discard output that can't be written: Python would try again, and exit with status 120."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
