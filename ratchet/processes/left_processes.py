"""Processes that user code started and left running: end them, or name them, at a run's end."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import time
from collections.abc import Iterator, Sequence

import psutil

log = logging.getLogger(__name__)

END_S = 2.0  # time for processes to end after SIGTERM
POLL_S = 0.02
MAX_NAMED = 10
# An environment variable of programs that end with this process, which has its number.
OWNER = "RATCHET_OWNER"
# What processes run that end with this one or by another's care: workers of Ratchet, the sandbox,
# and processes of multiprocessing, PyTorch's compiler, Weights & Biases and Ray.
HELPERS = re.compile(
    r"ratchet\.processes\.child import|inside\.launch|"
    r"^from multiprocessing\.(resource_tracker|forkserver) import|/compile_worker/|"
    r"/wandb/bin/|^wandb$|^ray(::|\.)|/ray/(core|_private|dashboard|autoscaler)/"
)
OPTIONS_WITH_VALUE = ("-X", "-W")  # of Python


@contextlib.contextmanager
def end_left_processes() -> Iterator[None]:
    """End the processes that this one started within the context and that still run at its end.

    They could keep an accelerator's memory, a port, or the pipe to which the run printed. A process
    in a session of its own, or whose parent has ended, may be meant to stay: it is only named.
    """
    earlier = {*psutil.Process().children(recursive=True), *_list_orphans()}
    try:
        yield
    finally:
        attached, detached = _find_left_processes(earlier)
        if detached:
            log.warning(
                "processes that were started during the run are still running: %s. If they are not "
                "meant to stay, end them (`kill`) where the run's code starts them",
                _describe(detached),
            )
        if attached:
            log.warning(
                "processes that the run's code started were still running at its end, and are "
                "ended: %s. End them in that code, as by a `close` method",
                _describe(attached),
            )
            _end(attached)


def _find_left_processes(
    earlier: set[psutil.Process],
) -> tuple[list[psutil.Process], list[psutil.Process]]:
    """Return the descendants in this session, and other processes that this one may have started.

    Args:
        earlier: Processes that do not count.
    """
    attached: list[psutil.Process] = []
    detached: list[psutil.Process] = []
    descendants = set(psutil.Process().children(recursive=True))
    candidates = (descendants | _list_orphans()) - earlier
    for process in sorted(candidates, key=lambda process: process.pid):
        with contextlib.suppress(psutil.Error, ProcessLookupError):
            if not _is_over(process) and not _is_helper(process):
                is_attached = process in descendants and os.getsid(process.pid) == os.getsid(0)
                (attached if is_attached else detached).append(process)
    return attached, detached


def _list_orphans() -> set[psutil.Process]:
    """Return the processes of this process group whose parents have ended."""
    orphans: set[psutil.Process] = set()
    group = os.getpgid(0)
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, ProcessLookupError, PermissionError):
            if os.getpgid(process.pid) == group and os.getpgid(process.ppid()) != group:
                orphans.add(process)
    return orphans


def _is_over(process: psutil.Process) -> bool:
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def _is_helper(process: psutil.Process) -> bool:
    if HELPERS.search(_get_program(process.cmdline())):
        return True
    with contextlib.suppress(psutil.AccessDenied):
        return process.environ().get(OWNER) == str(os.getpid())
    return False


def _get_program(command: Sequence[str]) -> str:
    """Return the program of a command line; for Python, its script, its module or its code."""
    program = next(iter(command), "")
    if not os.path.basename(program).startswith("python"):
        return program
    arguments = iter(command[1:])
    for argument in arguments:
        if argument in ("-c", "-m"):
            return next(arguments, "")
        if argument in OPTIONS_WITH_VALUE:
            next(arguments, "")
        elif not argument.startswith("-"):
            return argument
    return program


def _describe(processes: Sequence[psutil.Process]) -> str:
    texts: list[str] = []
    for process in processes[:MAX_NAMED]:
        command = ""
        with contextlib.suppress(psutil.Error):  # it has ended since
            command = " ".join(process.cmdline()) or process.name()
        texts.append(f"{process.pid} ({command:.100})")
    if len(processes) > MAX_NAMED:
        texts.append(f"and {len(processes) - MAX_NAMED} more")
    return ", ".join(texts)


def _end(processes: Sequence[psutil.Process]) -> None:
    for process in processes:
        with contextlib.suppress(psutil.Error):
            process.terminate()
    deadline = time.monotonic() + END_S
    running = list(processes)
    # The code that started a process may still wait for it, so it is not waited for here.
    while running and time.monotonic() < deadline:
        time.sleep(POLL_S)
        running = [process for process in running if not _is_over(process)]
    for process in running:
        with contextlib.suppress(psutil.Error):
            process.kill()
