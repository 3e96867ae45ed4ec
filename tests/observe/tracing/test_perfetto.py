"""A trace is what the Trace Event Format says: it parses, its tracks nest, and phases add up to
their step."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from ratchet.observe.tracing.perfetto import (
    ATTEMPTS,
    FIRST_STEPS,
    MAX_ATTEMPTS,
    Trace,
    is_traced_step,
    open_trace,
)
from ratchet.utils.tracer import Tracer

PHASES = ("sample", "score", "update", "sync", "after")
Events = list[dict[str, Any]]


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def written(path: Path, steps: Sequence[int], *, closed: bool = True, attempts: int = 2) -> None:
    clock = Clock()
    tracer = Tracer(clock)
    trace = Trace(path, tracer)
    for step in steps:
        trace.begin_step(step)
        with tracer.span("steps", f"step {step + 1}"):
            for index, phase in enumerate(PHASES):
                with tracer.span("steps", phase):
                    for number in range(attempts if phase == "sample" else 0):
                        with tracer.span("attempts", f"g/{step}#{number}"):
                            clock.now += 1.0 / attempts
                    with tracer.span("policy", phase):
                        clock.now += index
        trace.flush()
    if closed:
        trace.close()


def read(path: Path) -> Events:
    """As a tolerant reader does: a closing bracket may be missing, and a comma may be left over."""
    text = path.read_text().strip()
    return json.loads(text if text.endswith("]") else text.rstrip(",") + "]")


def check_format(events: Events) -> None:
    for event in events:
        assert event["ph"] in ("M", "X", "b", "e")
        assert {"pid", "tid", "name"} <= event.keys()
        assert event["ph"] == "M" or isinstance(event["ts"], int)
        assert event["ph"] != "X" or event["dur"] >= 0
    open_ones = set[str]()
    for event in sorted(
        (e for e in events if e["ph"] in "be"), key=lambda e: (e["ts"], e["ph"] == "e")
    ):
        assert event["cat"] == "attempt"
        (open_ones.add if event["ph"] == "b" else open_ones.remove)(event["id"])
    assert not open_ones
    for track in {(e["pid"], e["tid"]) for e in events if e["ph"] == "X"}:
        check_nesting([e for e in events if e["ph"] == "X" and (e["pid"], e["tid"]) == track])


def check_nesting(spans: Sequence[Mapping[str, Any]]) -> None:
    within: list[int] = []  # ends of those around
    for span in sorted(spans, key=lambda e: (e["ts"], -e["dur"])):
        while within and within[-1] <= span["ts"]:
            within.pop()
        assert not within or span["ts"] + span["dur"] <= within[-1], span
        within.append(span["ts"] + span["dur"])


def test_phases_add_up_to_their_step(tmp_path: Path):
    written(tmp_path / "trace.json", range(3))
    events = json.loads((tmp_path / "trace.json").read_text())  # strict JSON once it is closed
    check_format(events)
    steps = [e for e in events if e["name"].startswith("step ")]
    assert [e["name"] for e in steps] == ["step 1", "step 2", "step 3"]
    for step in steps:
        inside = [e for e in events if e["ph"] == "X" and e["tid"] == step["tid"] and e is not step]
        own = [e for e in inside if step["ts"] <= e["ts"] < step["ts"] + step["dur"]]
        assert [e["name"] for e in own] == list(PHASES)
        assert sum(e["dur"] for e in own) == step["dur"] == 11_000_000
    tracks = {e["args"]["name"] for e in events if e["name"] in ("thread_name", "process_name")}
    assert tracks == {"run", "attempts", "steps", "policy"}
    assert {e["id"] for e in events if e["pid"] == ATTEMPTS and e["ph"] == "b"} == {
        f"g/{i}#{j}" for i in range(3) for j in range(2)
    }


@pytest.mark.parametrize("torn", ["", '{"ph": "X", "pi', None])
def test_a_resumed_run_goes_on_in_it(
    tmp_path: Path, torn: str | None, monkeypatch: pytest.MonkeyPatch
):
    path, wall = tmp_path / "trace.json", iter([1000.0, 2000.0])
    monkeypatch.setattr("ratchet.observe.tracing.perfetto.time.time", lambda: next(wall))
    written(path, range(2), closed=torn is None)
    if torn:
        with path.open("a") as file:
            file.write(torn)
    else:
        check_format(read(path))
    written(path, range(2, 4))
    events = json.loads(path.read_text())
    check_format(events)
    assert [e["name"] for e in events if e["name"].startswith("step ")] == [
        f"step {i}" for i in range(1, 5)
    ]


def test_a_file_of_something_else_is_begun_anew(tmp_path: Path):
    (tmp_path / "trace.json").write_bytes(b"\xff\x00 no trace")
    written(tmp_path / "trace.json", range(1))
    check_format(json.loads((tmp_path / "trace.json").read_text()))


def test_a_long_run_is_thinned(tmp_path: Path):
    assert all(is_traced_step(step) for step in range(FIRST_STEPS))
    counts = [
        sum(is_traced_step(step) for step in range(2**i * FIRST_STEPS, 2 ** (i + 1) * FIRST_STEPS))
        for i in range(6)
    ]
    assert counts == [FIRST_STEPS // 2] * 6
    written(tmp_path / "trace.json", [FIRST_STEPS + 1])
    assert [e for e in read(tmp_path / "trace.json") if e["ph"] == "X"] == []


def test_attempts_are_bounded(tmp_path: Path):
    written(tmp_path / "trace.json", range(2), attempts=2 * MAX_ATTEMPTS)
    assert sum(e["ph"] == "b" for e in read(tmp_path / "trace.json")) == 2 * MAX_ATTEMPTS


def test_none_is_wanted_or_none_can_be_made(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    with open_trace(None) as trace:
        assert trace is None
    with caplog.at_level(logging.WARNING), open_trace(tmp_path / "missing" / "trace.json") as trace:
        assert trace is None
    assert "there will be no trace" in caplog.text


class Full:
    def write(self, data: bytes) -> int:
        raise OSError(28, "No space left on device")


def test_a_full_disk_costs_the_trace_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    trace = Trace(tmp_path / "trace.json", Tracer())
    trace._file.close()  # pyright: ignore[reportOptionalMemberAccess]
    trace._file = Full()  # pyright: ignore[reportAttributeAccessIssue]
    trace.flush()
    trace.flush()
    trace.close()
    assert caplog.text.count("the trace can't be written") == 1
