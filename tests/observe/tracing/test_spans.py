"""Busy seconds are those in which anybody worked, on a clock of our own."""

from __future__ import annotations

import pytest

from ratchet.observe.stall_report import GENERATE, begin_wait, end_wait, waiting
from ratchet.observe.tracing.spans import ACTIVITY, Activity


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_seconds_in_which_several_worked_count_once():
    clock = Clock()
    activity = Activity(clock)
    for now, change in (
        (1.0, activity.begin),
        (2.0, activity.begin),
        (4.0, activity.end),
        (7.0, activity.end),
    ):
        clock.now = now
        change()
    clock.now = 10.0
    assert activity.busy_s == 6.0
    activity.begin()
    clock.now = 11.5
    assert activity.busy_s == 7.5


def test_a_listener_is_told_of_what_has_ended_even_where_it_failed():
    clock, told = Clock(), list[tuple[str, str, float, float]]()
    activity = Activity(clock)
    with activity.span("steps", "unheard"):
        pass
    activity.span_listener = lambda *span: told.append(span)

    def fail() -> None:
        with activity.work("policy", "update"):
            clock.now = 3.0
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert told == [("policy", "update", 0.0, 3.0)]
    assert activity.busy_s == 3.0


def test_who_waits_for_a_generator_lets_it_work(monkeypatch: pytest.MonkeyPatch):
    clock = Clock()
    for name, value in (("clock", clock), ("_busy_s", 0.0), ("_n_working", 0)):
        monkeypatch.setattr(ACTIVITY, name, value)
    with waiting("attempts", "step", "environment", None):
        clock.now += 1.0
    with waiting("attempts", GENERATE, "generator", None):
        clock.now += 2.0
    assert ACTIVITY.busy_s == 2.0
    end_wait(wait := begin_wait(waiting("agents", GENERATE, "generator", None)))
    end_wait(wait)  # again: it has ended
    assert ACTIVITY.busy_s == 2.0
    begin_wait(wait)
    clock.now += 4.0
    end_wait(wait)
    assert ACTIVITY.busy_s == 6.0
