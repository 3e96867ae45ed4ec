"""The sandbox of this machine: a pool of fork servers, each with a thread that serves it."""

from __future__ import annotations

import asyncio
import functools
import logging
import os
import queue
import sys
import threading
import weakref
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from ratchet.observe.stall_report import waiting
from ratchet.sandbox.base import (
    DEFAULT_LIMITS,
    Isolation,
    Limits,
    OwnedSandbox,
    Result,
    SandboxError,
    Session,
    end_threads,
)
from ratchet.sandbox.config import LocalSandboxConfig
from ratchet.sandbox.fork_server_client import ForkServerError, ForkServerSlot
from ratchet.sandbox.workspace import Workspace

log = logging.getLogger(__name__)

TRIES = 2  # the second try starts a new fork server


class LocalSandbox(OwnedSandbox):
    """A sandbox with the strongest isolation that this machine offers.

    Threads and event loops may share one sandbox. Raises SandboxError at construction if the
    machine does not offer `at_least`.

    Args:
        slots: Maximum number of programs that run at once.
        at_least: Weakest isolation allowed.
        at_most: Strongest isolation tried; a lower level simulates a weaker machine.
        readable: Directories that programs can read and import from, besides the standard library.
    """

    has_same_python = True

    def __init__(
        self,
        *,
        slots: int = 2,
        at_least: Isolation = Isolation.LANDLOCK,
        at_most: Isolation = Isolation.NAMESPACES,
        readable: Sequence[str] = (),
    ) -> None:
        if slots < 1:
            raise SandboxError(f"slots must be 1 or more, not {slots}")
        if sys.platform != "linux":
            raise SandboxError(
                f"untrusted programs run on Linux only, not on {sys.platform}: use a remote sandbox"
            )
        self._owner = os.getpid()
        self._slots = [
            ForkServerSlot(at_most=at_most, readable=[os.path.realpath(path) for path in readable])
            for _ in range(slots)
        ]
        self._free_slots: queue.SimpleQueue[ForkServerSlot] = queue.SimpleQueue()
        for slot in self._slots:
            self._free_slots.put(slot)
        self._threads = ThreadPoolExecutor(slots, thread_name_prefix="sandbox")
        self._closing = threading.Event()
        self._finalizer = weakref.finalize(self, _close, self._closing, self._slots, self._threads)
        self.strength = self._slots[0].start()
        try:
            self.strength.require(at_least, "this machine")
        except SandboxError:
            self.close()
            raise
        log.info("programs are isolated by %s", self.strength)

    async def run(
        self, program: str | Sequence[str], stdin: bytes = b"", limits: Limits = DEFAULT_LIMITS
    ) -> Result:
        """Run a program; see `Sandbox.run`. Cancelling the call stops the program."""
        if os.getpid() != self._owner:
            raise SandboxError(
                "this sandbox was made before a fork: make another in the new process"
            )
        if not self._finalizer.alive:
            raise SandboxError("this sandbox is closed")
        run_handle = _RunHandle(self._closing)
        try:
            function = functools.partial(_run, self._free_slots, run_handle, program, stdin, limits)
            with waiting("programs", "run", "local sandbox", limits.wall_s):
                return await asyncio.get_running_loop().run_in_executor(self._threads, function)
        except asyncio.CancelledError:
            run_handle.cancel()
            raise

    async def open(self, image: str = "", limits: Limits = DEFAULT_LIMITS) -> Session:
        """Return a session; see `Sandbox.open`.

        Raises SandboxError for an image, or if the machine offers no namespaces. This process keeps
        the session's files and sends them with each command.
        """
        if image:
            raise SandboxError(
                f"the local sandbox has no images, such as {image!r}: name no image, or use the "
                "docker sandbox"
            )
        if self.isolation < Isolation.NAMESPACES:
            reasons = f" ({'; '.join(self.strength.refused)})" if self.strength.refused else ""
            raise SandboxError(
                "sessions need isolation by namespaces, and this machine isolates programs by "
                f"{self.isolation.name.lower()} only{reasons}: use a remote sandbox"
            )
        return Workspace(self, limits)


def build_local_sandbox(
    config: LocalSandboxConfig, *, slots: int, at_least: Isolation
) -> LocalSandbox:
    return LocalSandbox(slots=slots, at_least=at_least, readable=config.readable)


class _RunHandle:
    """A handle that cancels one run; closing the pool cancels the run too."""

    def __init__(self, closing: threading.Event) -> None:
        self.slot: ForkServerSlot | None = None
        self._closing = closing
        self._cancelled = False

    def is_cancelled(self) -> bool:
        return self._cancelled or self._closing.is_set()

    def cancel(self) -> None:
        self._cancelled = True
        if slot := self.slot:
            slot.stop()


# `_run` holds no reference to the sandbox. Otherwise a sandbox that was never closed would stay
# alive during a run, and its finalizer could run in one of its own threads and wait for itself.
def _run(
    free: queue.SimpleQueue[ForkServerSlot],
    run_handle: _RunHandle,
    program: str | Sequence[str],
    stdin: bytes,
    limits: Limits,
) -> Result:
    slot = free.get()
    try:
        run_handle.slot = slot
        for remaining in reversed(range(TRIES)):
            if run_handle.is_cancelled():
                raise SandboxError("the program was stopped before its start")
            try:
                return slot.run(program, stdin, limits, run_handle.is_cancelled)
            except ForkServerError:
                if not remaining:
                    raise
        raise AssertionError("unreachable")
    finally:
        run_handle.slot = None
        free.put(slot)


def _close(
    closing: threading.Event, slots: list[ForkServerSlot], threads: ThreadPoolExecutor
) -> None:
    closing.set()
    for slot in slots:
        slot.stop()
    end_threads(threads)
    for slot in slots:
        slot.close()
