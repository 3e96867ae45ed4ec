"""What `ratchet ui` holds of a run's metrics: a bounded part at a time, however long the run."""

from __future__ import annotations

import json
import math
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

import ratchet.commands.report.metrics as metrics_module
from ratchet.commands.report.metrics import MAX_POSITIONS, MetricsFile

NAMES = [f"group/metric_{i}" for i in range(20)]


def write(path: Path, steps: range) -> Path:
    with path.open("a") as file:
        for step in steps:
            file.write(
                json.dumps({"step": step, **dict.fromkeys(NAMES, step / 7), "time/step_s": 0.5})
                + "\n"
            )
    return path


@pytest.fixture
def metrics(tmp_path: Path) -> MetricsFile:
    rows = [{"step": 1, "a": 1.0}, {"step": 3, "a": None, "b": 2}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return MetricsFile(tmp_path / "metrics.jsonl")


def test_columns_have_gaps(metrics: MetricsFile, tmp_path: Path) -> None:
    columns, has_more = metrics.read_part()
    np.testing.assert_array_equal(columns["step"], [1, 3])
    np.testing.assert_array_equal(columns["a"], [1.0, math.nan])
    np.testing.assert_array_equal(columns["b"], [math.nan, 2.0])
    assert not has_more
    assert list(MetricsFile(tmp_path / "none").read_part().columns) == ["step"]


def test_lines_that_are_no_steps_are_left_out(metrics: MetricsFile) -> None:
    with metrics.path.open("ab") as file:
        file.write(
            b'{"step": 4, "a": NaN}\n[1]\n{"step": "5"}\n\xff\n{"step": 2}\n'
            + b"[" * 50_000
            + b"\n"
        )
        file.write(b'{"step": 6, "a": 1e999, "c": ' + b"9" * 400 + b'}\n{"step": 7, "a"')
    columns, _ = metrics.read_part(after=1)
    assert columns["step"].tolist() == [3, 6]
    assert columns["a"].tolist()[1] == columns["c"].tolist()[1] == math.inf
    with metrics.path.open("ab") as file:
        file.write(b": 0}\n")
    assert metrics.read_part(after=6).columns["step"].tolist() == [7]


def test_parts_make_the_whole(tmp_path: Path) -> None:
    metrics = MetricsFile(write(tmp_path / "metrics.jsonl", range(1, 101)))
    steps, has_more, after = [], True, -1
    while has_more:
        columns, has_more = metrics.read_part(after, max_cells=30 * 22)
        assert len(columns["step"]) <= 30
        steps += columns["step"].tolist()
        after = int(steps[-1])
    assert steps == list(range(1, 101))
    assert metrics.read_part(max_cells=1).columns["step"].tolist() == [1]


def test_a_page_that_follows_reads_new_lines_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    metrics = MetricsFile(write(tmp_path / "metrics.jsonl", range(1, 201)))
    metrics.read_part()
    read: list[bytes] = []
    parse = metrics_module.parse_row
    monkeypatch.setattr(
        metrics_module, "parse_row", lambda line: (read.append(line), parse(line))[1]
    )
    write(metrics.path, range(201, 203))
    assert metrics.read_part(after=200).columns["step"].tolist() == [201, 202]
    assert len(read) == 2


def test_a_file_that_was_written_anew_is_read_anew(tmp_path: Path) -> None:
    metrics = MetricsFile(write(tmp_path / "metrics.jsonl", range(1, 11)))
    assert len(metrics.read_part().columns["step"]) == len(metrics.read_times()["step"]) == 10
    write(tmp_path / "other", range(1, 4)).replace(metrics.path)
    assert metrics.read_part(after=2).columns["step"].tolist() == [3]
    assert metrics.read_times()["step"].tolist() == [1, 2, 3]


def held(steps: int, path: Path) -> tuple[int, int]:
    """Return (peak bytes while all steps are read in parts, bytes that stay afterwards)."""
    metrics = MetricsFile(write(path, range(1, steps + 1)))
    tracemalloc.start()
    has_more, after = True, -1
    while has_more:
        columns, has_more = metrics.read_part(after, max_cells=2**11)
        after = int(columns["step"][-1])
    del columns
    stays, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(metrics._positions) <= MAX_POSITIONS
    return peak, stays


@pytest.mark.medium
@pytest.mark.fault("S17")
def test_memory_does_not_grow_with_the_run(tmp_path: Path) -> None:
    peak, stays = held(300, tmp_path / "short")
    long_peak, long_stays = held(1200, tmp_path / "long")
    assert long_peak < 1.2 * peak + 2**14
    assert long_stays < stays + 2**14
