"""A run's use of its machine: processors, memory, disk, and accelerators where NVIDIA's library is
installed.

Only processes on this machine count. Linux reports all of it (/proc); other systems report less.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

GIB = 2**30
# how often processes of the run are looked for; those that are known are read in each step
KIN_S = 10.0
PROC = Path("/proc")


class Use(NamedTuple):
    """cpu_s: processor seconds since the process began. resident: bytes of memory."""

    cpu_s: float
    resident: int


class SystemMeter:
    """A meter of the use since the last `measure`.

    directory: the disk that is watched. nvml: NVIDIA's library; None: no accelerator is watched.
    clock: returns seconds.
    """

    def __init__(
        self,
        directory: Path,
        *,
        nvml: Any = None,
        proc: Path = PROC,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.directory, self.proc, self._clock = directory, proc, clock
        self._gpus = Accelerators(nvml) if nvml is not None else None
        self._kin: set[int] = set()
        self._looked = clock() - KIN_S
        self._worked = {pid: use.cpu_s for pid, use in self._uses().items()}
        self._at = clock()

    def measure(self) -> dict[str, float]:
        now, uses = self._clock(), self._uses()
        # A process that has ended takes its seconds with it, and one that is new brings those
        # before it was known.
        spent = sum(
            use.cpu_s - self._worked[pid] for pid, use in uses.items() if pid in self._worked
        )
        numbers = {"cpu_cores": spent / (now - self._at)} if now > self._at else {}
        self._worked, self._at = {pid: use.cpu_s for pid, use in uses.items()}, now
        if resident := sum(use.resident for use in uses.values()):
            numbers["rss_gib"] = resident / GIB
        numbers |= self._host()
        with suppress(OSError):
            disk = shutil.disk_usage(self.directory)
            numbers |= {"disk_free_gib": disk.free / GIB, "disk_used_share": disk.used / disk.total}
        return numbers | (self._gpus.measure() if self._gpus is not None else {})

    def _uses(self) -> dict[int, Use]:
        """Return the use of each process of the run; without /proc, of this process alone."""
        if not (self.proc / str(os.getpid()) / "stat").exists():
            return {os.getpid(): Use(time.process_time(), 0)}
        if self._clock() - self._looked >= KIN_S:
            self._looked, self._kin = self._clock(), self._descendants()
        ticks, page = os.sysconf("SC_CLK_TCK"), os.sysconf("SC_PAGE_SIZE")
        stats = {pid: self._stat(pid) for pid in self._kin}
        return {
            pid: Use((int(s[11]) + int(s[12])) / ticks, int(s[21]) * page)
            for pid, s in stats.items()
            if s
        }

    def _descendants(self) -> set[int]:
        children: dict[int, list[int]] = {}
        for entry in self.proc.iterdir():
            if entry.name.isdigit() and (stat := self._stat(int(entry.name))):
                children.setdefault(int(stat[1]), []).append(int(entry.name))
        visited, new = set[int](), [os.getpid()]
        while new:
            pid = new.pop()
            if pid not in visited:
                visited.add(pid)
                new += children.get(pid, [])
        return visited

    def _stat(self, pid: int) -> list[str]:
        """Return the fields after the name, which may hold blanks: state, parent, ..., 11: user
        time, 12: system time, 21: pages."""
        try:
            return (self.proc / str(pid) / "stat").read_text().rpartition(")")[2].split()
        except (OSError, UnicodeDecodeError):  # it has ended
            return []

    def _host(self) -> dict[str, float]:
        try:
            lines = (self.proc / "meminfo").read_text().splitlines()
            sizes = {
                name: int(rest.split()[0]) * 1024
                for name, _, rest in (line.partition(":") for line in lines)
            }
            total, free = sizes["MemTotal"], sizes["MemAvailable"]
        except (OSError, KeyError, ValueError, IndexError):
            return {}
        return {"ram_used_gib": (total - free) / GIB, "ram_used_share": (total - free) / total}


class Accelerators:
    """The accelerators of this machine, including work of other users on them."""

    def __init__(self, nvml: Any) -> None:
        """Open the library. Raises what NVML raises without a driver."""
        self._nvml = nvml
        nvml.nvmlInit()
        self._handles = [
            nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())
        ]

    def measure(self) -> dict[str, float]:
        numbers: dict[str, float] = {}
        for index, handle in enumerate(self._handles):
            for name, value in self._of(handle):
                numbers[f"gpu/{index}/{name}"] = value
        return numbers

    def _of(self, handle: Any) -> Iterator[tuple[str, float]]:
        """Yield what the device reports; some devices do not report everything."""
        nvml = self._nvml
        readers: Mapping[str, Callable[[], float]] = {
            "busy_share": lambda: nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100,
            "memory_gib": lambda: nvml.nvmlDeviceGetMemoryInfo(handle).used / GIB,
            "power_w": lambda: nvml.nvmlDeviceGetPowerUsage(handle) / 1000,
        }
        for name, read in readers.items():
            with suppress(nvml.NVMLError):
                yield name, float(read())


def nvidia() -> Any:
    """Return NVIDIA's management library if it and a driver are installed, else None."""
    try:
        nvml = import_module("pynvml")
    except ImportError:
        return None
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:  # no driver, or no device
        return None
    return nvml
