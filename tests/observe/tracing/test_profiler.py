"""Profiling: which steps are profiled, what is counted where, and what the table says."""

from __future__ import annotations

import gzip
import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ratchet.observe.matmul_rate import Gemm, measure_gemm_rate
from ratchet.observe.tracing.profile_table import PhaseWork, Profile
from ratchet.observe.tracing.profiler import (
    ProfiledStage,
    Profiler,
    TraceEvent,
    count_work,
    measure_kernel_seconds,
)
from ratchet.utils.thread_pool import ThreadPool
from ratchet.utils.tracer import Span, Tracer


def span(name: str, start: int, end: int) -> TraceEvent:
    return TraceEvent(name, start, end, is_range=True)


# --- what is counted where


def test_an_operation_counts_for_the_phase_that_it_began_in() -> None:
    phases = {"sample": PhaseWork(), "update": PhaseWork(), "other": PhaseWork()}
    events = [
        span("sample", 0, 100),
        span("update", 200, 300),
        span("evaluate", 400, 500),
        span("Optimizer.step#AdamW.step", 250, 260),  # torch's own: no phase
        TraceEvent("aten::mm", 10, 20, flop=7),
        TraceEvent("aten::addmm", 99, 130, flop=11),  # ends later
        TraceEvent("aten::bmm", 255, 256, flop=13),
        TraceEvent("aten::mm", 150, 160, flop=17),  # between the phases
        TraceEvent("aten::mm", 450, 460, flop=1000),  # apart
        TraceEvent("aten::embedding", 50, 51, shapes=[[12, 4], [6]]),
        TraceEvent("aten::embedding", 60, 61, shapes=[[12, 4], [2, 5]]),
        TraceEvent("aten::embedding", 70, 71, shapes=[[99, 4], [6]]),  # a table of positions
    ]
    count_work(events, phases, vocab_size=12)
    assert {name: work.flop for name, work in phases.items()} == {
        "sample": 18,
        "update": 13,
        "other": 17,
    }
    assert (phases["sample"].rows, phases["sample"].forwards) == (16, 2)
    assert phases["update"].rows == 0


def test_kernels_that_overlap_count_once_and_those_of_an_evaluation_do_not() -> None:
    def kernel(start: int, end: int, name: str = "gemm") -> TraceEvent:
        return TraceEvent(name, start, end, is_host=False)

    events = [
        span("update", 0, 1000),
        kernel(0, 1000, "update"),  # the range as it is drawn on the accelerator
        kernel(0, 100),
        kernel(50, 120),
        kernel(60, 70),
        kernel(500, 530),
        span("evaluate", 2000, 3000),
        kernel(2500, 2600),
    ]
    assert measure_kernel_seconds(events, excluded=("evaluate",)) == pytest.approx(150e-9)


# --- the table

PROFILE = Profile(
    stage="rl",
    first_step=4,
    steps=2,
    requested_steps=3,
    phases={
        "sample": PhaseWork(seconds=1.0, rows=500, forwards=10, tokens=400, flop=4e9),
        "update": PhaseWork(seconds=0.5, rows=300, forwards=3, tokens=600, flop=6e9),
        "sync": PhaseWork(seconds=0.1),
        "other": PhaseWork(seconds=0.4),
    },
    generated_tokens=320,
    wall_s=2.0,
    excluded_s=0.25,
    unprofiled_s=0.75,
    idle_share=0.125,
    idle_resource="2 threads",
    peak_bytes=3 * 2**20,
    gemm_rates=[("[1024, 1024] x [1024, 1024] float32", 16e9), ("own", 8e9)],
)


def test_the_table_by_hand() -> None:
    lines = PROFILE.table().splitlines()
    assert lines[0] == "Profile of stage rl, steps 4 to 5 (of 3 requested: the stage had no more)"
    cells = [line.replace(" %", "%").split() for line in lines[3:8]]
    assert cells == [
        ["sample", "0.5000", "50.0%", "320", "1.250", "4.00", "25.0%"],
        ["update", "0.2500", "25.0%", "600", "0.500", "12.00", "75.0%"],
        ["sync", "0.0500", "5.0%", "-", "-", "-", "-"],
        ["other", "0.2000", "20.0%", "-", "-", "-", "-"],
        ["step", "1.0000", "100.0%", "160", "-", "5.00", "31.2%"],
    ]
    notes = "\n".join(lines[8:])
    for note in (
        "16.00 GFLOP/s, [1024, 1024]",
        "sample 20.0 %, update 0.0 %",
        "12.5 % of 2 threads",
        "3 MiB",
        "1.0000 s under it, 0.7500 s before",
        "0.25 s of evaluation",
    ):
        assert note in notes, note


def test_a_supervised_step_without_a_warm_up_has_a_table_too() -> None:
    nothing = replace(
        PROFILE,
        phases={"sample": PhaseWork(), "other": PhaseWork(2.0)},
        generated_tokens=0,
        unprofiled_s=None,
        requested_steps=1,
        steps=1,
    )
    table = nothing.table()
    assert "step 4\n" in table
    assert "nan" not in table
    assert "before" not in table
    assert "nothing went through" in table


# --- the rate of products


def test_the_rate_of_products_is_finite_and_draws_no_random_number() -> None:
    before = torch.get_rng_state()
    gemm = Gemm(4, 8, 16)
    assert gemm.flop == 1024
    rate = measure_gemm_rate(gemm, device=torch.device("cpu"), dtype=torch.float32)
    assert rate > 0
    assert math.isfinite(rate)
    assert torch.equal(torch.get_rng_state(), before)


# --- which steps


def profiler(tmp_path: Path, asked: int, left: int) -> Profiler:
    subject = ProfiledStage(
        stage="a",
        device=torch.device("cpu"),
        dtype=torch.float32,
        threads=1,
        vocab_size=12,
        largest_layer=(8, 8),
        requested_tokens=lambda: 0.0,
        generated_tokens=lambda: 0.0,
    )
    return Profiler(
        subject, asked, first_step=10, steps_left=left, directory=tmp_path, show=lambda text: None
    )


@pytest.mark.parametrize(
    ("asked", "left", "first", "steps"),
    [(2, 100, 13, 2), (2, 5, 13, 2), (2, 4, 12, 2), (5, 5, 11, 4), (9, 2, 11, 1), (3, 1, 10, 1)],
)
def test_the_steps_after_a_warm_up_as_far_as_there_are_any(
    tmp_path: Path, asked: int, left: int, first: int, steps: int
) -> None:
    made = profiler(tmp_path, asked, left)
    assert (made.first_profiled_step, made.steps) == (first, steps)


def phase(made: Profiler, name: str) -> Span:
    tracer = Tracer()
    tracer.subscribe(made.follow, phases_only=True)
    return tracer.phase("steps", name, 1)


def one_step(made: Profiler) -> None:
    made.begin_step()
    with phase(made, "update"):
        torch.ones(5, 12) @ torch.ones(12, 3)
    with phase(made, "evaluate"):
        torch.ones(50, 12) @ torch.ones(12, 3)
    made.end_step()


@pytest.mark.medium
def test_steps_before_and_after_are_not_in_the_trace(tmp_path: Path) -> None:
    made = profiler(tmp_path, asked=2, left=6)
    shown: list[str] = []
    made.show = shown.append
    for _ in range(6):
        one_step(made)
    found = made.profile
    assert found is not None
    assert (found.first_step, found.steps) == (14, 2)
    assert found.phases["update"].flop == 2 * 2 * 5 * 12 * 3
    assert sum(found.get_share(name) for name in found.phases) == pytest.approx(1)
    assert found.excluded_s > 0
    assert shown == [(tmp_path / "table.txt").read_text()]
    with gzip.open(tmp_path / "trace.json.gz") as file:
        names = [
            event.get("name")
            for event in json.load(file)["traceEvents"]
            if event.get("cat") == "user_annotation"
        ]
    assert names.count("update") == 2


@pytest.mark.medium
def test_threads_that_were_there_before_are_in_it(tmp_path: Path) -> None:
    crew = ThreadPool(2)
    crew.run([lambda: None] * 2)
    made = profiler(tmp_path, asked=1, left=1)
    made.begin_step()
    with phase(made, "update"):
        crew.run([lambda: torch.ones(5, 12) @ torch.ones(12, 3)] * 2)
    made.end_step()
    assert made.profile is not None
    assert made.profile.phases["update"].flop == 2 * 2 * 5 * 12 * 3


@pytest.mark.medium
def test_what_a_signal_leaves_is_told(tmp_path: Path) -> None:
    made = profiler(tmp_path, asked=3, left=9)
    for _ in range(4):
        one_step(made)
    made.finish()
    assert made.profile is not None
    assert made.profile.steps == 1
    assert "step 14 (of 3 requested" in (tmp_path / "table.txt").read_text()


def test_nothing_is_written_before_the_first_profiled_step_nor_after_an_error(
    tmp_path: Path,
) -> None:
    made = profiler(tmp_path, asked=3, left=9)
    one_step(made)
    made.finish()
    for _ in range(3):
        one_step(made)
    made.abandon()
    made.finish()
    assert made.profile is None
    assert not list(tmp_path.iterdir())
