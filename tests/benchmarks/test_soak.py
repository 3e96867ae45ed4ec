"""The soak's own arithmetic: what counts as growth, and what as left behind."""

import os
import subprocess
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "soak.py"


@pytest.fixture(scope="module")
def soak():
    spec = spec_from_file_location("benchmarks_soak", SCRIPT)
    module = module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def watch(soak, tmp_path, values, kind="driver", measure="uss_mib"):
    watch = soak.Watch({}, tmp_path)
    watch.times = [10.0 * index for index in range(len(values))]
    watch.samples[kind, measure] = dict(enumerate(values))
    return watch


def test_growth_is_that_of_the_second_half(soak, tmp_path):
    (row,) = watch(soak, tmp_path, [0, 50, 100, 100, 102, 104, 106, 108]).rows()
    assert (row["middle"], row["grown"], row["per_hour"]) == pytest.approx((102, 6, 720))
    assert not soak.exceeds_bound(row)


@pytest.mark.parametrize(("kind", "is_beyond"), [("driver", True), ("ray raylet", False)])
def test_only_growth_of_ours_beyond_a_bound_fails(kind, is_beyond, soak, tmp_path):
    (row,) = watch(soak, tmp_path, [100, 100, 100, 110, 120, 130], kind).rows()
    assert soak.exceeds_bound(row) is is_beyond


def test_what_is_left_is_named(soak, tmp_path):
    with subprocess.Popen(["sleep", "60"]) as process:
        seen = soak.Watch({process.pid: "driver"}, tmp_path)
        assert ("driver", process.pid) in seen.look()
        (tmp_path / "ratchet-ray-x").mkdir()
        (tmp_path / "torchinductor_user").mkdir()
        assert seen.list_leftovers() == [f"process {process.pid}", str(tmp_path / "ratchet-ray-x")]
        process.kill()
    assert seen.list_leftovers() == [str(tmp_path / "ratchet-ray-x")]


def test_shared_memory_counts_by_who_has_it(soak):
    name = Path(f"/dev/shm/soak-test-{os.getpid()}")
    try:
        with name.open("w"):
            assert str(name) in soak.list_shared_memory(os.getpid())
    finally:
        name.unlink()
    assert str(name) not in soak.list_shared_memory(os.getpid())
