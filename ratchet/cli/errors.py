"""The end of a command: the sentence for each error, and the exit status."""

from __future__ import annotations

import io
import sys
import traceback
from pathlib import Path

import typer

from ratchet.errors import ConfigError, DataError, ModelError, RatchetError
from ratchet.utils.terminal_text import escape_controls, get_first_line, shorten_text

WRONG_INPUT = 2  # a recipe, data or a model is wrong, or too large for this machine
FAILED = 1
MAX_CHARS = 10_000  # of a message
PACKAGE = Path(__file__).parent
# What loaders and allocators say where a limit of memory stops them; each is an error of another
# kind.
SHORT_OF_MEMORY = (
    "failed to map segment",
    "Cannot allocate memory",
    "can't allocate memory",
    "cannot allocate memory",
)


def prepare_streams() -> None:
    """Let a terminal that can't show a character get its code, in place of an error."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def say(text: object) -> None:
    """Print text with control characters escaped, so that text of a model or a file can't command
    the terminal."""
    typer.echo(escape_controls(str(text)))


def sentence(error: BaseException) -> tuple[str, int] | None:
    """Return what to print for an error and the exit status; None for a bug, whose traceback is
    wanted."""
    if isinstance(error, RatchetError):
        status = WRONG_INPUT if isinstance(error, ConfigError | DataError | ModelError) else FAILED
        return f"{type(error).__name__}: {shorten_text(str(error), MAX_CHARS)}", status
    if isinstance(error, RecursionError):
        return (
            f"an input is nested too deeply ({_place(error)}): nest it less, or say so to the "
            "authors",
            WRONG_INPUT,
        )
    if type(error).__name__ == "OutOfMemoryError":  # torch's, which isn't imported here
        return (
            f"the accelerator has not enough memory ({_place(error)}): "
            f"{get_first_line(str(error))}",
            WRONG_INPUT,
        )
    if isinstance(error, MemoryError) or any(words in str(error) for words in SHORT_OF_MEMORY):
        return (
            f"there is not enough memory ({_place(error)}): free some, raise `ulimit -v`, or "
            "choose less",
            WRONG_INPUT,
        )
    return None


def _place(error: BaseException) -> str:
    """Return the innermost line of this package in a traceback, so that a bug can be found by the
    sentence."""
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


def end(error: BaseException) -> None:
    """Print the sentence of an error and leave with its status. An error without one is raised
    again."""
    told = sentence(error)
    if told is None:
        raise error
    typer.echo(escape_controls(told[0]), err=True)
    sys.exit(told[1])
