"""Set environment variables for libraries and programs that a run starts."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

SUPERVISOR = "RATCHET_SUPERVISOR"  # holds the process id of `ratchet train --supervise`

# Holds the number and the inode of a pipe that closes when `ratchet train --supervise` has ended.
SUPERVISOR_PIPE = "RATCHET_SUPERVISOR_PIPE"


def is_supervised() -> bool:
    """True if this process's parent is `ratchet train --supervise`, which passes signals on."""
    return os.environ.get(SUPERVISOR) == str(os.getppid())


def find_supervisor_pipe() -> int | None:
    """Return the file descriptor of the supervisor's pipe; None without a supervisor.

    A program that this process starts gets the variable, but not the pipe. Its inode tells the pipe
    from another file with the same number.
    """
    descriptor, _, inode = os.environ.get(SUPERVISOR_PIPE, "").partition(":")
    try:
        is_pipe = os.fstat(int(descriptor)).st_ino == int(inode)
    except (ValueError, OSError):
        return None
    return int(descriptor) if is_pipe else None


def inherit_environment(**more: str) -> dict[str, str]:
    """Return this process's environment variables with `more` added."""
    return {**os.environ, **more}


@contextmanager
def set_env_defaults(variables: Mapping[str, str]) -> Iterator[None]:
    """Set variables inside the block, except those that the user has set.

    This is for libraries that read variables when they start. At the end the environment is
    restored, so that variables which a library sets itself (such as libraries to preload) reach no
    other program.
    """
    previous = dict(os.environ)
    os.environ.update({name: value for name, value in variables.items() if name not in previous})
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(previous)
