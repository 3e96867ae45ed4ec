"""The use of processes and of memory, and of accelerators by a library of our own making. Not run
on a GPU."""

from __future__ import annotations

import subprocess
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from ratchet.observe.system import GIB, SEARCH_S, SystemMeter, load_nvml


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Process:
    """A process as psutil describes it."""

    def __init__(self, cpu_s: float, mib: int, *children: Process) -> None:
        self.cpu_s, self.mib, self.descendants = cpu_s, mib, list(children)
        self.has_ended = False

    def children(self, recursive: bool) -> list[Process]:
        assert recursive
        return self.descendants

    def oneshot(self) -> nullcontext[None]:
        return nullcontext()

    def cpu_times(self) -> SimpleNamespace:
        if self.has_ended:
            raise psutil.NoSuchProcess(1)
        return SimpleNamespace(user=self.cpu_s - 1, system=1.0)

    def memory_info(self) -> SimpleNamespace:
        return SimpleNamespace(rss=self.mib * 2**20)


def meter_of(
    root: Process, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[SystemMeter, Clock]:
    memory = SimpleNamespace(total=8 * GIB, available=6 * GIB, used=GIB)
    monkeypatch.setattr(psutil, "Process", lambda: root)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)
    clock = Clock()
    return SystemMeter(directory, clock=clock), clock


def test_the_processes_of_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    child, ending = Process(5, 256), Process(1, 256)
    root = Process(10, 512, child, ending)
    meter, clock = meter_of(root, tmp_path, monkeypatch)
    clock.now = 2.0
    root.cpu_s, child.cpu_s, ending.has_ended = 12, 6, True
    found = meter.measure()
    assert found["cpu_cores"] == 1.5
    assert found["rss_gib"] == 0.75
    assert (found["ram_used_gib"], found["ram_used_share"]) == (2.0, 0.25)
    assert found["disk_free_gib"] > 0
    assert 0 < found["disk_used_share"] < 1


def test_a_new_process_is_found_later_and_counts_from_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    root = Process(1, 512)
    meter, clock = meter_of(root, tmp_path, monkeypatch)
    root.descendants = [Process(100, 512)]
    clock.now = 1.0
    assert meter.measure()["rss_gib"] == 0.5
    clock.now = SEARCH_S
    found = meter.measure()
    assert (found["rss_gib"], found["cpu_cores"]) == (1.0, 0.0)
    root.descendants[0].cpu_s = 103
    clock.now += 1.5
    assert meter.measure()["cpu_cores"] == 2.0


def test_this_machine(tmp_path: Path):
    clock = Clock()
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as child:
        meter = SystemMeter(tmp_path, clock=clock)
        assert child.pid in {process.pid for process in meter._last_cpu_s}
        clock.now = 1.0
        found = meter.measure()
        child.communicate()
    assert found["cpu_cores"] >= 0
    assert (
        0
        < found["rss_gib"]
        < found["ram_used_gib"]
        < found["ram_used_gib"] / found["ram_used_share"]
    )


class NVMLError(Exception):
    pass


class Nvml:
    """Two devices, of which the second does not say its power."""

    NVMLError = NVMLError

    def __init__(self) -> None:
        self.begun = False

    def nvmlInit(self) -> None:
        self.begun = True

    def nvmlDeviceGetCount(self) -> int:
        assert self.begun
        return 2

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetUtilizationRates(self, handle: int) -> SimpleNamespace:
        return SimpleNamespace(gpu=75 - handle, memory=1)

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> SimpleNamespace:
        return SimpleNamespace(used=(handle + 1) * GIB)

    def nvmlDeviceGetPowerUsage(self, handle: int) -> int:
        if handle:
            raise NVMLError
        return 300_500


def test_accelerators(tmp_path: Path):
    found = SystemMeter(tmp_path, nvml=Nvml()).measure()
    assert {name: value for name, value in found.items() if name.startswith("gpu/")} == {
        "gpu/0/busy_share": 0.75,
        "gpu/0/memory_gib": 1.0,
        "gpu/0/power_w": 300.5,
        "gpu/1/busy_share": 0.74,
        "gpu/1/memory_gib": 2.0,
    }


@pytest.mark.parametrize("fails", [ImportError, NVMLError])
def test_without_a_library_or_a_driver_none_is_watched(
    fails: type[Exception], monkeypatch: pytest.MonkeyPatch
):
    def init() -> None:
        raise NVMLError

    def load(name: str) -> SimpleNamespace:
        assert name == "pynvml"
        if fails is ImportError:
            raise ImportError
        return SimpleNamespace(nvmlInit=init, NVMLError=NVMLError)

    monkeypatch.setattr("ratchet.observe.system.import_module", load)
    assert load_nvml() is None
