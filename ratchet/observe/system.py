"""Measure a run's use of its machine: processors, memory, disk and NVIDIA accelerators.

Accelerators are measured by NVIDIA's management library (NVML), the rest by psutil. Only processes
on this machine count.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import psutil

GIB = 2**30
# Seconds between searches for new processes of the run; known ones are read at every measurement.
SEARCH_S = 10.0


class ProcessUsage(NamedTuple):
    """The processor time and memory of one process."""

    cpu_s: float  # processor seconds since the process began
    resident_bytes: int  # bytes of resident memory


class SystemMeter:
    """A meter of the machine's use by this run.

    Args:
        directory: its disk is measured.
        nvml: NVIDIA's management library; None: accelerators are not measured.
        clock: returns seconds.
    """

    def __init__(
        self,
        directory: Path,
        *,
        nvml: Any = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.directory, self._clock = directory, clock
        self._gpus = AcceleratorMeter(nvml) if nvml is not None else None
        self._root = psutil.Process()
        self._processes: list[psutil.Process] = []
        self._searched_at = clock() - SEARCH_S
        self._last_cpu_s = {
            process: usage.cpu_s for process, usage in self._measure_processes().items()
        }
        self._measured_at = clock()

    def measure(self) -> dict[str, float]:
        """Return the current figures by name; `cpu_cores` is the mean since the last call."""
        now, usages = self._clock(), self._measure_processes()
        # Only processes that existed at both measurements count. The seconds of an ended process
        # are unknown, and those of a new one may be from before this interval.
        cpu_seconds = sum(
            usage.cpu_s - self._last_cpu_s[process]
            for process, usage in usages.items()
            if process in self._last_cpu_s
        )
        metrics = (
            {"cpu_cores": cpu_seconds / (now - self._measured_at)}
            if now > self._measured_at
            else {}
        )
        self._last_cpu_s = {process: usage.cpu_s for process, usage in usages.items()}
        self._measured_at = now
        metrics["rss_gib"] = sum(usage.resident_bytes for usage in usages.values()) / GIB
        memory = psutil.virtual_memory()
        used = memory.total - memory.available
        metrics |= {"ram_used_gib": used / GIB, "ram_used_share": used / memory.total}
        with suppress(OSError):
            disk = shutil.disk_usage(self.directory)
            metrics |= {"disk_free_gib": disk.free / GIB, "disk_used_share": disk.used / disk.total}
        return metrics | (self._gpus.measure() if self._gpus is not None else {})

    def _measure_processes(self) -> dict[psutil.Process, ProcessUsage]:
        """Return the use of this process and of each of its descendants that still exists."""
        if self._clock() - self._searched_at >= SEARCH_S:
            self._searched_at = self._clock()
            self._processes = [self._root, *self._root.children(recursive=True)]
        usages: dict[psutil.Process, ProcessUsage] = {}
        for process in self._processes:
            with suppress(psutil.Error), process.oneshot():
                times = process.cpu_times()
                usages[process] = ProcessUsage(times.user + times.system, process.memory_info().rss)
        return usages


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
