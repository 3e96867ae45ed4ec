"""Measure a run's use of its machine: processors, memory, disk and NVIDIA accelerators.

Accelerators are measured by NVIDIA's management library (NVML). Only processes on this machine
count. Linux has all figures (from /proc); other systems have fewer.
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
SEARCH_S = 10.0
PROC = Path("/proc")


class ProcessUsage(NamedTuple):
    """The processor time and memory of one process."""

    cpu_s: float  # processor seconds since the process began
    resident_bytes: int  # bytes of resident memory


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
        self._gpus = AcceleratorMeter(nvml) if nvml is not None else None
        self._descendants: set[int] = set()
        self._searched_at = clock() - SEARCH_S
        self._last_cpu_s = {
            pid: process.cpu_s for pid, process in self._measure_processes().items()
        }
        self._measured_at = clock()

    def measure(self) -> dict[str, float]:
        """Return the current figures by name; `cpu_cores` is the mean since the last call."""
        now, processes = self._clock(), self._measure_processes()
        # Only processes that existed at both measurements count. The seconds of an ended process
        # are unknown, and those of a new one may be from before this interval.
        cpu_seconds = sum(
            process.cpu_s - self._last_cpu_s[pid]
            for pid, process in processes.items()
            if pid in self._last_cpu_s
        )
        metrics = (
            {"cpu_cores": cpu_seconds / (now - self._measured_at)}
            if now > self._measured_at
            else {}
        )
        self._last_cpu_s, self._measured_at = (
            {pid: process.cpu_s for pid, process in processes.items()},
            now,
        )
        if resident_bytes := sum(process.resident_bytes for process in processes.values()):
            metrics["rss_gib"] = resident_bytes / GIB
        metrics |= self._host_memory()
        with suppress(OSError):
            disk = shutil.disk_usage(self.directory)
            metrics |= {"disk_free_gib": disk.free / GIB, "disk_used_share": disk.used / disk.total}
        return metrics | (self._gpus.measure() if self._gpus is not None else {})

    def _measure_processes(self) -> dict[int, ProcessUsage]:
        """Return the use of each process of the run by id; only of this process without /proc."""
        if not (self.proc / str(os.getpid()) / "stat").exists():
            return {os.getpid(): ProcessUsage(time.process_time(), 0)}
        if self._clock() - self._searched_at >= SEARCH_S:
            self._searched_at, self._descendants = self._clock(), self._find_descendants()
        ticks_per_s, page_bytes = os.sysconf("SC_CLK_TCK"), os.sysconf("SC_PAGE_SIZE")
        stats = {pid: self._read_stat(pid) for pid in self._descendants}
        return {
            pid: ProcessUsage(
                (int(stat[11]) + int(stat[12])) / ticks_per_s, int(stat[21]) * page_bytes
            )
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


class AcceleratorMeter:
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
        """Yield (name, value) of each metric that the device reports; a device may lack some."""
        nvml = self._nvml
        getters: Mapping[str, Callable[[], float]] = {
            "busy_share": lambda: nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100,
            "memory_gib": lambda: nvml.nvmlDeviceGetMemoryInfo(handle).used / GIB,
            "power_w": lambda: nvml.nvmlDeviceGetPowerUsage(handle) / 1000,
        }
        for name, get in getters.items():
            with suppress(nvml.NVMLError):
                yield name, float(get())


def load_nvml() -> Any:
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
