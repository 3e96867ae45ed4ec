"""The table of waits, the last that was heard of each, and when that is told."""

import asyncio
import copy
import logging
import threading
from types import SimpleNamespace

import pytest

from ratchet.experience.rollout.episode import EpisodePlayer
from ratchet.experience.rollout.manager import RolloutManager
from ratchet.observe import stall_report
from ratchet.observe.stall_report import (
    RUN,
    StallDetector,
    format_report,
    log_stalls,
    record_event,
    waiting,
)
from ratchet.testing.fakes import FakeEnvironment, FakeGenerator, FakeReward, TextOnlyMixin
from ratchet.types import Message, Sampling
from ratchet.utils.tracer import TRACER


@pytest.fixture(autouse=True)
def nobody(monkeypatch):
    monkeypatch.setattr(stall_report, "_waits", {})
    monkeypatch.setattr(stall_report, "_events", {})


def test_those_that_wait_for_the_same_are_one_line():
    maze = ("attempts", "step", "environment Maze", 5)
    with waiting(*maze), waiting(*maze), waiting("driver", "update", "learner rank 1", None):
        _, first, second = stall_report.format_waits().splitlines()
    assert first.startswith("attempts (2)  environment Maze  step")
    assert first.endswith("5 s")
    assert second.startswith("driver        learner rank 1    update")
    assert second.endswith(" s")
    assert "inf" not in second


def test_the_last_that_was_heard_of_each():
    with waiting("attempts", "step", "environment Maze", 5):
        pass
    with pytest.raises(KeyError), waiting("attempts", "score", "reward Judge", 5):
        raise KeyError
    record_event("generator rank 0", "was sent 'exchange'")
    record_event("generator rank 0", "answered 'exchange'")
    rows = [line.split("  ") for line in format_report().splitlines()[2:]]
    assert [row[0] for row in rows] == ["environment Maze", "reward Judge", "generator rank 0"]
    assert "ended 'step'" in rows[0]
    assert "failed 'score'" in rows[1]
    assert "answered 'exchange'" in rows[2]


def test_it_forgets_those_of_whom_nothing_was_heard_for_longest():
    for number in range(stall_report.MAX_COMPONENTS + 5):
        record_event(f"{number}", "was started")
    record_event("5", "answered")
    record_event("new", "was started")
    assert len(stall_report._events) == stall_report.MAX_COMPONENTS
    assert "5" in stall_report._events
    assert "6" not in stall_report._events


def test_a_stall_is_logged_after_a_time_and_each_doubling(monkeypatch):
    monkeypatch.setattr(stall_report, "time", SimpleNamespace(monotonic=lambda: 5000.0))
    stalls = StallDetector(100)
    assert stalls.check(1e9) is None, "nothing has begun"
    record_event(RUN, "began to sample for step 3")
    with waiting("attempts", "step", "environment Maze", None):
        stalled = [after for after in range(0, 1000, 10) if stalls.check(5000.0 + after)]
        assert stalled == [100, 200, 400, 800]
        text = stalls.check(5000.0 + 1600)
    assert text is not None
    assert text.startswith(
        "the run has made no progress for 1600 s, since it began to sample for step 3:\n"
    )
    assert "environment Maze  step" in text
    record_event(RUN, "began to score for step 3")
    assert [stalls.check(5000.0 + after) is not None for after in (99, 101, 199, 201)] == [
        False,
        True,
        False,
        True,
    ]


def test_it_is_logged_while_the_main_thread_waits():
    logged = threading.Event()

    class Keep(logging.Handler):
        def emit(self, record):
            text.append(record.getMessage())
            logged.set()

    text, handler = [], Keep()
    logging.getLogger("ratchet.observe.stall_report").addHandler(handler)
    try:
        with log_stalls(0.01), TRACER.phase("steps", "sample", 1):
            assert logged.wait(60)
    finally:
        logging.getLogger("ratchet.observe.stall_report").removeHandler(handler)
    assert "since it began to sample for step 1" in text[0]
    assert RUN not in stall_report._events


class Words(TextOnlyMixin):
    def prompt(self, messages, tools=None):
        return [1]

    def parse(self, tokens, stop):
        return Message("assistant", "x")


def test_attempts_say_what_they_wait_for():
    seen = []

    def look(answer):
        seen.append(stall_report.format_waits().splitlines()[1])
        return answer

    environment = FakeEnvironment()
    generator = FakeGenerator(lambda tokens, sampling: look([9]))
    manager = RolloutManager(
        EpisodePlayer(generator, Words(), max_context=8, timeout_s=7),  # type: ignore
        lambda: copy.copy(environment),
        FakeReward(lambda row, task: look(1.0)),
    )
    task = next(environment.tasks("train", seed=0))
    asyncio.run(
        manager.group(task, Sampling(max_new_tokens=1, stop_ids=(9,)), group_id="a", attempts=1)
    )
    assert [row.split()[:3] for row in seen] == [
        ["attempts", "generator", "generate"],
        ["attempts", "reward", "FakeReward"],
    ]
    assert seen[0].endswith("7 s")
