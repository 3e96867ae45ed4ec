"""Measure how long programs waited for a core, which is no part of their wall time."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable

NS_PER_S = 1_000_000_000


class RunQueueClock:
    """The wall time of a request's programs, without the time in which they waited for a core.

    On an overloaded machine a program is ready to run for most of its time and seldom runs. A
    verdict must not depend on that.

    Time in which the programs used a core counts even if some of them waited. Otherwise a program
    could extend its limit by processes that wait for each other.

    Args:
        proc: Descriptor of a /proc; None counts no waiting time. A kernel without statistics of its
            scheduler (gVisor) shows none.
        start: Start of the request by `time.monotonic`.
    """

    def __init__(self, proc: int | None, start: float) -> None:
        self._proc = proc
        self._start = start
        self._used_ns: dict[str, int] = {}  # time on a core, by thread
        self._waited_ns: dict[str, int] = {}  # time in the run queue, by thread
        self._longest_waits_ns = 0  # of the thread that waited longest, between measurements

    @property
    def elapsed_s(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self._start

    @property
    def seconds(self) -> float:
        """Seconds since the start without the measured waiting time."""
        elapsed_s = self.elapsed_s
        used_s = sum(self._used_ns.values()) / NS_PER_S
        return max(elapsed_s - self._longest_waits_ns / NS_PER_S, min(used_s, elapsed_s))

    def measure(self, pids: Iterable[int | str]) -> None:
        """Add the waiting time of processes since the last measurement.

        The kernel adds a wait when it ends.
        """
        longest_ns = 0
        for pid in pids:
            for thread, (used_ns, waited_ns) in self._read_threads(pid).items():
                before_ns = self._waited_ns.get(thread, 0)
                # Below the last value, a new thread has the id of one that ended.
                new_ns = waited_ns - before_ns if waited_ns >= before_ns else waited_ns
                longest_ns = max(longest_ns, new_ns)
                self._waited_ns[thread] = waited_ns
                self._used_ns[thread] = used_ns
        self._longest_waits_ns += longest_ns

    def _read_threads(self, pid: int | str) -> dict[str, tuple[int, int]]:
        """Return the nanoseconds that each thread of a process ran and waited."""
        times_ns: dict[str, tuple[int, int]] = {}
        if self._proc is None:
            return times_ns
        with contextlib.suppress(OSError):  # the process has ended
            tasks = os.open(f"{pid}/task", os.O_RDONLY | os.O_DIRECTORY, dir_fd=self._proc)
            try:
                for thread in os.listdir(tasks):
                    with contextlib.suppress(OSError):  # the thread has ended
                        file = os.open(f"{thread}/schedstat", os.O_RDONLY, dir_fd=tasks)
                        try:
                            used_ns, waited_ns, _ = os.read(file, 200).split()
                        finally:
                            os.close(file)
                        times_ns[thread] = (int(used_ns), int(waited_ns))
            finally:
                os.close(tasks)
        return times_ns


def open_proc(proc: int | None) -> int | None:
    """Return a descriptor of the /proc that shows this process's children; None without one.

    Args:
        proc: A private /proc, if there is one. Outside of namespaces the machine's is used.
    """
    if proc is not None:
        return proc
    try:
        return os.open("/proc", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return None
