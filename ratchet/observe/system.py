"""Measure a run's use of its machine: processors, memory, disk and NVIDIA accelerators.

Accelerators need NVIDIA's management library. Only processes on this machine count. On Linux all
figures are available (from /proc); other systems have fewer.
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
# Seconds between searches for new processes of the run; known ones are read at every measurement.
KIN_S = 10.0
PROC = Path("/proc")


class Use(NamedTuple):
    """The processor time and memory of one process."""

    cpu_s: float  # processor seconds since the process began
    resident: int  # bytes of resident memory


class SystemMeter:
    """A meter of the machine's use by this run.

    Args:
        directory: its disk is measured.
        nvml: NVIDIA's management library; None: accelerators are not measured.
        proc: the mount point of /proc.
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
        """Return the current figures by name; `cpu_cores` is the mean since the last call."""
        now, uses = self._clock(), self._uses()
        # Only processes that were there at both measurements count: the seconds of an ended one are
        # lost, and a new one has some from before this interval.
        cpu_seconds = sum(
            use.cpu_s - self._worked[pid] for pid, use in uses.items() if pid in self._worked
        )
        metrics = {"cpu_cores": cpu_seconds / (now - self._at)} if now > self._at else {}
        self._worked, self._at = {pid: use.cpu_s for pid, use in uses.items()}, now
        if resident := sum(use.resident for use in uses.values()):
            metrics["rss_gib"] = resident / GIB
        metrics |= self._host_memory()
        with suppress(OSError):
            disk = shutil.disk_usage(self.directory)
            metrics |= {"disk_free_gib": disk.free / GIB, "disk_used_share": disk.used / disk.total}
        return metrics | (self._gpus.measure() if self._gpus is not None else {})

    def _uses(self) -> dict[int, Use]:
        """Return the use of each process of the run by id; only of this process without /proc."""
        if not (self.proc / str(os.getpid()) / "stat").exists():
            return {os.getpid(): Use(time.process_time(), 0)}
        if self._clock() - self._looked >= KIN_S:
            self._looked, self._kin = self._clock(), self._find_descendants()
        ticks, page = os.sysconf("SC_CLK_TCK"), os.sysconf("SC_PAGE_SIZE")
        stats = {pid: self._read_stat(pid) for pid in self._kin}
        return {
            pid: Use((int(stat[11]) + int(stat[12])) / ticks, int(stat[21]) * page)
            for pid, stat in stats.items()
            if stat
        }

    def _find_descendants(self) -> set[int]:
        children: dict[int, list[int]] = {}
        for entry in self.proc.iterdir():
            if entry.name.isdigit() and (stat := self._read_stat(int(entry.name))):
                children.setdefault(int(stat[1]), []).append(int(entry.name))
        visited, pending = set[int](), [os.getpid()]
        while pending:
            pid = pending.pop()
            if pid not in visited:
                visited.add(pid)
                pending += children.get(pid, [])
        return visited

    def _read_stat(self, pid: int) -> list[str]:
        """Return the fields of a process's stat file after its name, which may hold blanks.

        0: state, 1: parent, 11: user time, 12: system time, 21: resident pages. Return an empty
        list if the process has ended.
        """
        try:
            return (self.proc / str(pid) / "stat").read_text().rpartition(")")[2].split()
        except (OSError, UnicodeDecodeError):
            return []

    def _host_memory(self) -> dict[str, float]:
        try:
            lines = (self.proc / "meminfo").read_text().splitlines()
            sizes = {
                name: int(value.split()[0]) * 1024
                for name, _, value in (line.partition(":") for line in lines)
            }
            total, free = sizes["MemTotal"], sizes["MemAvailable"]
        except (OSError, KeyError, ValueError, IndexError):
            return {}
        return {"ram_used_gib": (total - free) / GIB, "ram_used_share": (total - free) / total}


class Accelerators:
    """A meter of this machine's accelerators; it includes the work of other users on them."""

    def __init__(self, nvml: Any) -> None:
        """Open the library. Raises NVMLError without a driver."""
        self._nvml = nvml
        nvml.nvmlInit()
        self._handles = [
            nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())
        ]

    def measure(self) -> dict[str, float]:
        metrics: dict[str, float] = {}
        for index, handle in enumerate(self._handles):
            for name, value in self._measure_device(handle):
                metrics[f"gpu/{index}/{name}"] = value
        return metrics

    def _measure_device(self, handle: Any) -> Iterator[tuple[str, float]]:
        """Yield (name, value) of each metric that the device reports; some lack one."""
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
