"""Reading of /proc and of NVML, from files and a library of our own making. Not run on a GPU."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from ratchet.observe.system import GIB, SEARCH_S, SystemMeter, load_nvml

ME = os.getpid()
TICKS, PAGE = os.sysconf("SC_CLK_TCK"), os.sysconf("SC_PAGE_SIZE")


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def process(
    proc: Path, pid: int, parent: int, *, cpu_s: float, mib: int, name: str = "python"
) -> None:
    """As Linux writes it: pid (name) state parent ... utime stime ... rss, the 4th, 14th, 15th and
    24th."""
    fields = [
        "S",
        str(parent),
        *["0"] * 9,
        str(int(cpu_s * TICKS)),
        str(TICKS),
        *["0"] * 8,
        str(mib * 2**20 // PAGE),
        "0",
    ]
    (proc / str(pid)).mkdir(parents=True, exist_ok=True)
    (proc / str(pid) / "stat").write_text(f"{pid} ({name}) {' '.join(fields)}\n")


def test_the_processes_of_the_run(tmp_path: Path):
    process(tmp_path, ME, 1, cpu_s=10, mib=512)
    process(tmp_path, 900001, ME, cpu_s=5, mib=256, name="a) b (c")
    process(tmp_path, 900002, 900001, cpu_s=1, mib=256)
    process(tmp_path, 900003, 1, cpu_s=50, mib=4096)  # somebody else's
    (tmp_path / "meminfo").write_text(
        "MemTotal: 8388608 kB\nMemFree: 1 kB\nMemAvailable: 6291456 kB\n"
    )
    clock = Clock()
    meter = SystemMeter(tmp_path, proc=tmp_path, clock=clock)
    clock.now = 2.0
    process(tmp_path, ME, 1, cpu_s=12, mib=512)
    process(tmp_path, 900001, ME, cpu_s=6, mib=256)
    process(tmp_path, 900003, 1, cpu_s=90, mib=4096)
    (tmp_path / "900002" / "stat").unlink()  # it has ended
    found = meter.measure()
    assert found["cpu_cores"] == 1.5
    assert found["rss_gib"] == 0.75
    assert (found["ram_used_gib"], found["ram_used_share"]) == (2.0, 0.25)
    assert found["disk_free_gib"] > 0
    assert 0 < found["disk_used_share"] < 1


def test_a_new_process_is_found_later_and_counts_from_then(tmp_path: Path):
    process(tmp_path, ME, 1, cpu_s=0, mib=512)
    clock = Clock()
    meter = SystemMeter(tmp_path, proc=tmp_path, clock=clock)
    process(tmp_path, 900001, ME, cpu_s=100, mib=512)
    clock.now = 1.0
    assert meter.measure()["rss_gib"] == 0.5
    clock.now = SEARCH_S
    found = meter.measure()
    assert (found["rss_gib"], found["cpu_cores"]) == (1.0, 0.0)
    process(tmp_path, 900001, ME, cpu_s=103, mib=512)
    clock.now += 1.5
    assert meter.measure()["cpu_cores"] == 2.0


def test_a_machine_without_proc_says_less(tmp_path: Path):
    clock = Clock()
    meter = SystemMeter(tmp_path, proc=tmp_path / "none", clock=clock)
    clock.now = 1.0
    assert meter.measure().keys() == {"cpu_cores", "disk_free_gib", "disk_used_share"}


def test_this_machine(tmp_path: Path):
    clock = Clock()
    meter = SystemMeter(tmp_path, clock=clock)
    clock.now = 1.0
    assert meter.measure()["cpu_cores"] >= 0


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
    found = SystemMeter(tmp_path, proc=tmp_path / "none", nvml=Nvml()).measure()
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
