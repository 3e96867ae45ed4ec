"""The protocol of sandboxes, their limits and their results."""

from __future__ import annotations

import asyncio
import contextlib
import math
import posixpath
import weakref
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from enum import IntEnum, StrEnum
from typing import Any, Protocol, Self

from ratchet.errors import RatchetError, link_symptom

# Environment variables of every program: its verdict must not depend on a random hash seed or the
# number of processors.
FIXED_ENVIRONMENT: Mapping[str, str] = {
    "PYTHONHASHSEED": "0",
    **{f"{name}_NUM_THREADS": "1" for name in ("OMP", "OPENBLAS", "MKL", "NUMEXPR")},
}


class SandboxError(RatchetError):
    """An error of the sandbox.

    The sandbox is weaker than the declared level, is refused by the machine, or is broken. The
    error is never a verdict on the program: an attempt that ends with it is failed, not wrong.
    """


class TooLarge(SandboxError):
    """The files put into a session, or taken out of it, exceed its limits."""


class Isolation(IntEnum):
    """A level of isolation between a program and the machine, weakest first.

    All levels have resource limits and seccomp. If this process is root, programs get an unused uid
    where possible; otherwise they run as this user.
    """

    # System calls are filtered: no network, processes or writing. A program can read this user's
    # files and, unless the user is root, the environment variables of the user's processes.
    SECCOMP = 1
    LANDLOCK = 2  # in addition, only the Python library can be read; nothing can be written
    # The process, network, IPC and mount namespaces are separate too, and the scratch directory is
    # private.
    NAMESPACES = 3
    KERNEL = 4  # in addition, a separate kernel: a virtual machine, or gVisor


@dataclass(frozen=True)
class Strength:
    """The isolation that a machine or service grants."""

    isolation: Isolation
    """The level."""
    refused: tuple[str, ...]
    """Reasons why no stronger level was granted."""
    mechanisms: tuple[str, ...]
    """Names of the mechanisms that isolate."""

    def __str__(self) -> str:
        refused = f"; refused: {'; '.join(self.refused)}" if self.refused else ""
        return f"{self.isolation.name.lower()} ({', '.join(self.mechanisms)}{refused})"

    def require(self, at_least: Isolation, where: str) -> None:
        """Raise SandboxError if this isolation is weaker than `at_least`."""
        if self.isolation < at_least:
            reasons = f" ({'; '.join(self.refused)})" if self.refused else ""
            raise SandboxError(
                f"{where} isolates programs by {self.isolation.name.lower()} only, weaker than the "
                f"declared {at_least.name.lower()}{reasons}: run where more is allowed, or declare "
                f"the weaker level with at_least=Isolation.{self.isolation.name}. "
                f"{link_symptom('there-is-no-sandbox')}"
            )


class Reason(StrEnum):
    """The reason why a program ended."""

    EXIT = "exit"  # it ended by itself, with any exit code
    SIGNAL = "signal"  # killed by a signal that no limit sent, such as a segmentation fault
    WALL = "wall"
    CPU = "cpu"
    # All processes together used too much memory. A single process gets MemoryError instead.
    MEMORY = "memory"
    OUTPUT = "output"


@dataclass(frozen=True)
class Limits:
    """The resource limits of a program."""

    wall_s: float = 5.0
    """Wall time from start to end. The local sandbox does not count time in which the program waits
    for a core, because other programs use them all."""
    cpu_s: float = 4.0
    """Processor time of one process, rounded up to whole seconds."""
    memory_mib: int = 512
    """Address space of a process, and resident memory of all processes together."""
    disk_mib: int = 16
    """Size of the scratch directory, and of any file."""
    output_kib: int = 1024
    """Size of stdout, and separately of stderr."""
    processes: int = 1
    """Number of processes; 1 allows threads only, more allows fork and exec."""
    threads: int = 32
    """Number of threads of a program that may not fork (`processes` is 1)."""
    executable: bool = False
    """True if files of the scratch directory can be executed; `processes` must be above 1."""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if name == "executable":
                continue
            if isinstance(value, bool) or not (math.isfinite(value) and value > 0):
                raise SandboxError(f"Limits.{name} must be a positive number, not {value!r}")
        if self.memory_mib < 64:
            raise SandboxError(f"Limits.memory_mib is {self.memory_mib}; Python itself needs 64")
        if self.executable and self.processes < 2:
            raise SandboxError("Limits.executable needs Limits.processes above 1")


DEFAULT_LIMITS = Limits()


@dataclass(frozen=True)
class Result:
    """The result of a program, as observed from outside.

    Attributes:
        exit: Exit code; None if a signal or a limit ended the program.
        signal: Number of the signal that ended the program; None if it exited or met a limit.
        stdout, stderr: Outputs, cut at the output limit.
        seconds: Wall time of the program alone, without queueing; as `Limits.wall_s` counts it.
        reason: Why the program ended.
    """

    exit: int | None
    signal: int | None
    stdout: bytes
    stderr: bytes
    seconds: float
    reason: Reason

    @property
    def ok(self) -> bool:
        return self.reason is Reason.EXIT and self.exit == 0


class Session(Protocol):
    """A shell and a working directory that persist over several commands.

    The current directory, exported variables and files stay. A session serves one caller at a time.
    """

    async def run(self, command: str, timeout_s: float) -> Result:
        """Run the command in the shell, with empty input.

        A command that exceeds `timeout_s` is ended with all processes that it started. Raises
        SandboxError when the sandbox failed, whatever the command did; the session may then be
        lost.
        """
        ...

    async def put(self, files: Mapping[str, bytes]) -> None:
        """Write files, given by their paths relative to the working directory.

        Raises SandboxError for a path that leaves the directory, TooLarge for files that exceed its
        space.
        """
        ...

    async def get(self, path: str = ".") -> dict[str, bytes]:
        """Return the regular files at or below `path`, by path relative to the working directory.

        The result is empty if nothing is there. Raises TooLarge for files that exceed the limits.
        """
        ...

    async def close(self) -> None:
        """End the session. Closing again does nothing."""
        ...


class Sandbox(Protocol):
    """A runner of programs in isolation.

    Calls may be concurrent: an implementation queues calls that exceed its slots.
    """

    @property
    def strength(self) -> Strength: ...
    @property
    def has_same_python(self) -> bool:
        """True if programs run under this interpreter, so that they can load its compiled code."""
        ...

    async def run(
        self, program: str | Sequence[str], stdin: bytes = b"", limits: Limits = DEFAULT_LIMITS
    ) -> Result:
        """Run Python source (a string) or a command (its words) to its end.

        Raises SandboxError when the sandbox failed, whatever the program did.
        """
        ...

    async def open(self, image: str = "", limits: Limits = DEFAULT_LIMITS) -> Session:
        """Return a session in a fresh copy of `image`; "" is the sandbox's default image.

        All commands of the session share its limits, except wall_s. Raises SandboxError if there is
        no such image.
        """
        ...

    def close(self) -> None:
        """End all running programs and remove everything that they left.

        Closing again does nothing.
        """
        ...


class OwnedSandbox:
    """The part of a sandbox that owns processes or connections until it is closed."""

    strength: Strength
    _finalizer: weakref.finalize[..., Any]

    @property
    def isolation(self) -> Isolation:
        return self.strength.isolation

    def close(self) -> None:
        self._finalizer()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.get_running_loop().run_in_executor(None, self.close)


def check_relative_path(path: str) -> str:
    """Return a path relative to the working directory in normalised form.

    Raises SandboxError for a path that leads out of the directory.
    """
    normalised = posixpath.normpath(path)
    if path.startswith("/") or normalised == ".." or normalised.startswith("../") or "\0" in path:
        raise SandboxError(f"{path!r} is not a path inside the working directory")
    return normalised


def end_threads(threads: ThreadPoolExecutor) -> None:
    """Wait for running work to end, and cancel queued work."""
    # A sandbox that was never closed may be garbage-collected in one of its own threads, which
    # can't join itself.
    with contextlib.suppress(RuntimeError):
        threads.shutdown(wait=True, cancel_futures=True)
