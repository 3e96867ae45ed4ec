"""One line a step whatever happened before; TensorBoard reads the same numbers; a broken sink costs
nothing but itself."""

from __future__ import annotations

import errno
import json
import logging
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

from ratchet.errors import MissingDependency
from ratchet.observe.metrics import MetricsManager
from ratchet.observe.reducers import Bins
from ratchet.observe.sinks import JsonlSink, Sinks, TensorBoardSink, open_tensorboard, read_jsonl

METRICS = [
    {"rollout/reward": 0.1, "policy/loss": -1.5},
    {"rollout/reward": 1 / 3, "policy/loss": None, "policy/loss/nan": 1.0},
    {"rollout/reward": 0.7, "policy/loss": 1e-30, "eval/accuracy": 0.25},
    {"rollout/reward": 0.9, "policy/loss": 12345.678},
]


def filled(path: Path, steps: range, *, keep_through: int = -1) -> None:
    sink = JsonlSink(path, keep_through=keep_through)
    for step in steps:
        sink.write(step, METRICS[step % len(METRICS)])
    sink.close()


def rows(path: Path) -> list[dict[str, float | None]]:
    """Strictly: every line is whole, and NaN is not JSON."""

    def refuse(name: str) -> float:
        raise AssertionError(name)

    content = path.read_text()
    assert not content or content.endswith("\n")
    return [json.loads(line, parse_constant=refuse) for line in content.splitlines()]


# --- JSON Lines


def test_one_line_a_step_readable_at_once(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    sink = JsonlSink(path)
    for step, metrics in enumerate(METRICS, 1):
        sink.write(step, metrics)
        assert rows(path)[-1] == {"step": step, **metrics}  # not closed, and already there
    assert len(rows(path)) == len(METRICS)
    assert read_jsonl(path) == rows(path)
    sink.close()


def test_a_step_has_one_line(tmp_path: Path) -> None:
    sink = JsonlSink(tmp_path / "metrics.jsonl")
    sink.write(3, {})
    for step in (3, 2):
        with pytest.raises(ValueError, match=f"step {step} after step 3"):
            sink.write(step, {})
    sink.close()
    assert rows(tmp_path / "metrics.jsonl") == [{"step": 3}]


def test_nan_is_refused(tmp_path: Path) -> None:
    sink = JsonlSink(tmp_path / "metrics.jsonl")
    with pytest.raises(ValueError):
        sink.write(1, {"x": float("nan")})
    sink.close()
    assert rows(tmp_path / "metrics.jsonl") == []


@pytest.mark.parametrize(
    "torn",
    [
        "",
        '{"step": 7, "rollout/re',
        "\n\n",
        "\0\0\0\0",
        "[1]\n",
        '{"step": "8"}\n',
        '{"step": 8, "x": NaN}\n',
    ],
)
def test_resuming_leaves_exactly_one_line_a_step(tmp_path: Path, torn: str) -> None:
    path, whole = tmp_path / "metrics.jsonl", tmp_path / "whole.jsonl"
    filled(path, range(1, 7))
    with path.open("a") as file:
        file.write(torn)
    filled(path, range(5, 9), keep_through=4)  # the checkpoint was of step 4
    filled(whole, range(1, 9))
    assert path.read_bytes() == whole.read_bytes()
    assert {item.name for item in tmp_path.iterdir()} == {"metrics.jsonl", "whole.jsonl"}


def test_a_line_of_a_far_step_costs_none_of_the_lines_behind_it(tmp_path: Path) -> None:
    path, whole = tmp_path / "metrics.jsonl", tmp_path / "whole.jsonl"
    for target in (path, whole):
        filled(target, range(1, 7))
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join([*lines[:2], '{"step": 1000000}\n', *lines[2:]]))
    JsonlSink(path, keep_through=6).close()
    assert path.read_bytes() == whole.read_bytes()


def test_a_new_run_starts_empty(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    filled(path, range(3))
    JsonlSink(path).close()
    assert rows(path) == []
    assert read_jsonl(tmp_path / "absent.jsonl") == []


@pytest.mark.medium
def test_a_full_disk_leaves_whole_lines(tmp_path: Path) -> None:
    code = """
import errno, resource, sys
from pathlib import Path
from ratchet.observe.sinks import JsonlSink
sink = JsonlSink(Path(sys.argv[1]))
resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))
try:
    for step in range(100):
        sink.write(step, {"rollout/reward": step / 3})
except OSError as error:
    print(step, errno.errorcode[error.errno])
sink.close()
"""
    path = tmp_path / "metrics.jsonl"
    done = subprocess.run(
        [sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=True
    )
    step, name = done.stdout.split()
    assert name == errno.errorcode[errno.EFBIG]
    assert [row["step"] for row in rows(path)] == list(range(int(step)))
    assert int(step) > 0


# --- TensorBoard


def scalars(directory: Path) -> dict[str, list[tuple[int, float]]]:
    from tensorboard.backend.event_processing.event_accumulator import SCALARS, EventAccumulator

    events = EventAccumulator(str(directory), size_guidance={SCALARS: 0})
    events.Reload()
    return {
        tag: [(event.step, event.value) for event in events.Scalars(tag)]
        for tag in events.Tags()[SCALARS]
    }


def expected_scalars(path: Path) -> dict[str, list[tuple[int, float]]]:
    """The same from metrics.jsonl; TensorBoard keeps float32."""
    expected: dict[str, list[tuple[int, float]]] = {}
    for row in rows(path):
        for name, value in row.items():
            if name != "step" and value is not None:
                expected.setdefault(name, []).append(
                    (int(row["step"] or 0), float(np.float32(value)))
                )
    return expected


def test_tensorboard_reads_what_metrics_jsonl_says(tmp_path: Path) -> None:
    board = TensorBoardSink(tmp_path / "tensorboard")
    lines = JsonlSink(tmp_path / "metrics.jsonl")
    both = Sinks([board, lines])
    for step, metrics in enumerate(METRICS):
        both.write(step, metrics)
    # before it is closed
    assert scalars(tmp_path / "tensorboard") == expected_scalars(tmp_path / "metrics.jsonl")
    both.close()
    assert scalars(tmp_path / "tensorboard") == expected_scalars(tmp_path / "metrics.jsonl")


def test_tensorboard_shows_histograms(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    metrics = MetricsManager()
    metrics.add("rollout", {"length": [0.5, 3.0, 3.0, 9.0]}, merge=Bins((0.0, 1.0, 2.0, 4.0)))
    metrics.add("rollout", {"reward": 1.0})
    both = Sinks([TensorBoardSink(tmp_path / "tensorboard"), JsonlSink(tmp_path / "metrics.jsonl")])
    both.write(1, metrics.flush(1))
    both.close()
    assert rows(tmp_path / "metrics.jsonl") == [{"step": 1, "rollout/reward": 1.0}]
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    (found,) = events.Histograms("rollout/length")
    value = found.histogram_value
    assert (value.min, value.max, value.num, value.sum, value.sum_squares) == (
        0.5,
        9.0,
        4.0,
        15.5,
        99.25,
    )
    assert dict(zip(value.bucket_limit, value.bucket, strict=True)) == {
        0.0: 0.0,
        1.0: 1.0,
        2.0: 0.0,
        4.0: 3.0,
    }


def test_tensorboard_after_two_resumes(tmp_path: Path) -> None:
    for first, last, keep_through in ((0, 9, -1), (5, 8, 4), (7, 12, 6)):
        filled(tmp_path / "metrics.jsonl", range(first, last), keep_through=keep_through)
        board = TensorBoardSink(tmp_path / "tensorboard", keep_through=keep_through)
        for step in range(first, last):
            board.write(step, METRICS[step % len(METRICS)])
        board.close()
    found = scalars(tmp_path / "tensorboard")
    assert found == expected_scalars(tmp_path / "metrics.jsonl")
    assert [step for step, _ in found["rollout/reward"]] == list(range(12))
    assert len(list((tmp_path / "tensorboard").iterdir())) == 3


def test_steps_that_were_not_taken_again_are_purged(tmp_path: Path) -> None:
    board = TensorBoardSink(tmp_path)
    for step in range(5):
        board.write(step, {"x": float(step)})
    board.close()
    TensorBoardSink(tmp_path, keep_through=2).close()
    assert scalars(tmp_path)["x"] == [(0, 0.0), (1, 1.0), (2, 2.0)]


def test_without_tensorboard_auto_says_so_and_true_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert open_tensorboard(False, tmp_path) is None
    board = open_tensorboard("auto", tmp_path)
    assert board is not None
    board.close()
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    monkeypatch.setattr("ratchet.observe.sinks.find_spec", lambda name: None)
    with caplog.at_level("INFO"):
        assert open_tensorboard("auto", tmp_path) is None
    assert "ratchet-rl[tensorboard]" in caplog.text
    with pytest.raises(MissingDependency, match=r"ratchet-rl\[tensorboard\]"):
        open_tensorboard(True, tmp_path)


@pytest.mark.medium
def test_tensorboard_is_written_without_tensorflow_torch_or_threads(tmp_path: Path) -> None:
    code = """
import sys, threading
from pathlib import Path
import ratchet.observe.sinks
assert "tensorboard" not in sys.modules
sink = ratchet.observe.sinks.TensorBoardSink(Path(sys.argv[1]))
sink.write(1, {"x": 1.0})
assert threading.active_count() == 1
print([name for name in ("tensorflow", "torch") if name in sys.modules])
"""
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True
    )
    assert done.stdout == "[]\n"


# --- failure


class Broken:
    """Fails from its second write on, and when it is closed."""

    def __init__(self, error: Exception) -> None:
        self.error, self.calls = error, 0

    def write(self, step: int, metrics: Mapping[str, float | None]) -> None:
        self.calls += 1
        if self.calls > 1:
            raise self.error

    def close(self) -> None:
        raise self.error


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)),
        ConnectionError(),
        RuntimeError(),
        ValueError(),
    ],
)
@pytest.mark.fault("P19")
def test_a_sink_that_fails_is_off_with_one_warning(
    tmp_path: Path, error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    broken = Broken(error)
    sinks = Sinks([broken, JsonlSink(tmp_path / "metrics.jsonl")])
    with caplog.at_level(logging.WARNING):
        for step in range(1, 6):
            sinks.write(step, {"x": 1.0})
        sinks.close()
    (record,) = caplog.records
    assert record.getMessage().startswith("Broken failed at step 2 and is disabled: ")
    assert broken.calls == 2
    assert [row["step"] for row in rows(tmp_path / "metrics.jsonl")] == [1, 2, 3, 4, 5]


def test_failing_to_close_costs_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    sinks = Sinks([Broken(OSError("gone")), JsonlSink(tmp_path / "metrics.jsonl")])
    sinks.write(1, {})
    sinks.close()
    sinks.close()
    assert "did not close" in caplog.text


@pytest.mark.fault("P26")
def test_a_pipe_in_place_of_metrics_is_not_read(tmp_path: Path) -> None:
    metrics = tmp_path / "metrics.jsonl"
    os.mkfifo(metrics)
    writer = os.open(metrics, os.O_RDWR)  # a reader that opens the pipe would get this line
    os.write(writer, b'{"step": 1}\n')
    os.set_blocking(writer, False)
    assert read_jsonl(metrics) == []
    assert os.read(writer, 99) == b'{"step": 1}\n'
    os.close(writer)
    JsonlSink(metrics).close()
    assert metrics.is_file()
