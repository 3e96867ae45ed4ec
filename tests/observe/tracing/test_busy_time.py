"""Busy seconds are those in which any component worked, on a clock of our own."""

from __future__ import annotations

import pytest

from ratchet.observe.stall_report import GENERATE, begin_wait, end_wait, waiting
from ratchet.observe.tracing.busy_time import BUSY_TIME, BusyTime


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_seconds_in_which_several_worked_count_once():
    clock = Clock()
    busy_time = BusyTime(clock)
    for now, change in (
        (1.0, busy_time.__enter__),
        (2.0, busy_time.__enter__),
        (4.0, busy_time.__exit__),
        (7.0, busy_time.__exit__),
    ):
        clock.now = now
        change()
    clock.now = 10.0
    assert busy_time.seconds == 6.0
    with busy_time:
        clock.now = 11.5
        assert busy_time.seconds == 7.5


def test_a_wait_for_a_generator_is_work(monkeypatch: pytest.MonkeyPatch):
    clock = Clock()
    for name, value in (("clock", clock), ("_busy_s", 0.0), ("_n_working", 0)):
        monkeypatch.setattr(BUSY_TIME, name, value)
    with waiting("attempts", "step", "environment", None):
        clock.now += 1.0
    with waiting("attempts", GENERATE, "generator", None):
        clock.now += 2.0
    assert BUSY_TIME.seconds == 2.0
    end_wait(wait := begin_wait(waiting("agents", GENERATE, "generator", None)))
    end_wait(wait)  # again: it has ended
    assert BUSY_TIME.seconds == 2.0
    begin_wait(wait)
    clock.now += 4.0
    end_wait(wait)
    assert BUSY_TIME.seconds == 6.0
