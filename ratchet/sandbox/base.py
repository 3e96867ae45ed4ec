"""What every sandbox has in common: the protocol, the limits, and what comes back."""

from __future__ import annotations

import contextlib
import math
import posixpath
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from enum import IntEnum, StrEnum
from typing import Protocol

from ratchet.errors import RatchetError

# Variables of every program, so that its verdict hangs on no drawn hash seed and on no number of
# processors.
FIXED_ENVIRONMENT: Mapping[str, str] = {
    "PYTHONHASHSEED": "0",
    **{f"{name}_NUM_THREADS": "1" for name in ("OMP", "OPENBLAS", "MKL", "NUMEXPR")},
}


class SandboxError(RatchetError):
    """The sandbox can't do its work: too weak for what was declared, refused by the machine, or
    broken. Never a verdict on the program: an attempt that ends with this is failed, not wrong."""


class TooLarge(SandboxError):
    """The files of a session are more than are taken out of it, or put into it."""


class Isolation(IntEnum):
    """How much stands between a program and the machine, weakest first. Limits, seccomp and a
    dropped uid belong to all."""

    # System calls are filtered: no network, processes or writing. Files of this user can be read,
    # and, unless it is root, the environment variables of its processes.
    SECCOMP = 1
    LANDLOCK = 2  # and only the Python library can be read; nothing can be written
    # and own processes, network, IPC and root directory, with a private scratch directory
    NAMESPACES = 3
    KERNEL = 4  # and a kernel of its own: a virtual machine, or gVisor


@dataclass(frozen=True)
class Strength:
    """What was granted: `refused` says why not more, `by` names the mechanisms."""

    isolation: Isolation
    refused: tuple[str, ...]
    by: tuple[str, ...]

    def require(self, at_least: Isolation, where: str) -> None:
        """Raises SandboxError where this is weaker."""
        if self.isolation < at_least:
            why = f" ({'; '.join(self.refused)})" if self.refused else ""
            raise SandboxError(
                f"{where} isolates programs by {self.isolation.name.lower()} only, weaker than the "
                "declared "
                f"{at_least.name.lower()}{why}: run where more is allowed, or declare the weaker "
                "level with "
                f"at_least=Isolation.{self.isolation.name}"
            )


class Reason(StrEnum):
    """Why a program ended."""

    EXIT = "exit"  # by itself, with whatever exit code
    SIGNAL = "signal"  # killed by a signal that no limit sent, such as a segmentation fault
    WALL = "wall"
    CPU = "cpu"
    # of all its processes together; one alone gets MemoryError, as from any full machine
    MEMORY = "memory"
    OUTPUT = "output"


@dataclass(frozen=True)
class Limits:
    """wall_s: from start to end. cpu_s: of one process, rounded up to whole seconds. memory_mib:
    address space of a process, and resident memory of all together. disk_mib: the scratch
    directory, and any file. output_kib: of stdout, and of stderr. processes: 1 allows threads only;
    more allows fork and exec. threads: of a program that may not fork."""

    wall_s: float = 5.0
    cpu_s: float = 4.0
    memory_mib: int = 512
    disk_mib: int = 16
    output_kib: int = 1024
    processes: int = 1
    threads: int = 32

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not (math.isfinite(value) and value > 0):
                raise SandboxError(f"Limits.{name} must be a positive number, not {value!r}")
        if self.memory_mib < 64:
            raise SandboxError(f"Limits.memory_mib is {self.memory_mib}; Python itself needs 64")


DEFAULT_LIMITS = Limits()


@dataclass(frozen=True)
class Result:
    """What a program did, as seen from outside. exit and signal exclude each other; both are None
    when a limit stopped it. stdout and stderr are cut at the output limit. seconds: wall time of
    the program alone, without queueing."""

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
    """A shell and a working directory, kept over several commands: the directory it is in, exported
    variables and files stay. For one caller at a time."""

    async def run(self, command: str, timeout_s: float) -> Result:
        """Gives the command to the shell, with empty input. One that takes too long is ended with
        all that was started.

        Raises SandboxError when the sandbox failed, whatever the command did; the session may then
        be lost.
        """
        ...

    async def put(self, files: Mapping[str, bytes]) -> None:
        """Writes files, by path from the working directory. Raises SandboxError for a path that
        leaves it, TooLarge for files that have no room there."""
        ...

    async def get(self, path: str = ".") -> dict[str, bytes]:
        """The regular files at or below `path`, by path from the working directory; none where
        there is nothing. Raises TooLarge."""
        ...

    async def close(self) -> None:
        """May be called twice."""
        ...


class Sandbox(Protocol):
    """Runs programs. Concurrent calls are welcome: an implementation queues what it has no room
    for."""

    @property
    def strength(self) -> Strength: ...
    @property
    def same_python(self) -> bool:
        """Whether programs run under this very interpreter, so that compiled code can be given to
        them."""
        ...

    async def run(
        self, program: str | Sequence[str], stdin: bytes = b"", limits: Limits = DEFAULT_LIMITS
    ) -> Result:
        """Runs Python source (a string) or a command (its words) to its end.

        Raises SandboxError when the sandbox failed, whatever the program did.
        """
        ...

    async def open(self, image: str = "", limits: Limits = DEFAULT_LIMITS) -> Session:
        """A session in a fresh copy of `image`; "": the sandbox's own. Its commands have the limits
        in common, but for wall_s. Raises SandboxError where there is no such image."""
        ...

    def close(self) -> None:
        """Ends all that is running and leaves nothing behind. May be called twice."""
        ...


def inside(path: str) -> str:
    """The path from the working directory, tidied. Raises SandboxError for one that leads out of
    it."""
    tidy = posixpath.normpath(path)
    if path.startswith("/") or tidy == ".." or tidy.startswith("../") or "\0" in path:
        raise SandboxError(f"{path!r} is no path inside the working directory")
    return tidy


def end_threads(threads: ThreadPoolExecutor) -> None:
    """Lets what runs come to its end, and nothing else begin."""
    # whoever forgets a sandbox may have it collected in one of its own threads
    with contextlib.suppress(RuntimeError):
        threads.shutdown(wait=True, cancel_futures=True)
