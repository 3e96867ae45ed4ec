"""Retries: how often, after which wait, and with jitter."""

from __future__ import annotations

import random

import pytest

from ratchet.utils import retry
from ratchet.utils.retry import call_with_retries, get_retry_wait_s


class Busy(Exception):
    pass


@pytest.fixture(autouse=True)
def jitter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retry, "draw", random.Random("jitter").random)


def calls_until_it_works(failures: int, error: Exception, **keys):
    """Return (result or the error's type, number of calls, waits)."""
    calls, waits = [], []

    def call() -> str:
        calls.append(1)
        if len(calls) <= failures:
            raise error
        return "done"

    options = {"retries": 2, "first_wait_s": 1.0, "retry_on": Busy} | keys
    options.setdefault("wait", lambda _, wait_s: waits.append(wait_s))
    try:
        return call_with_retries(call, **options), len(calls), waits
    except Exception as raised:
        return type(raised), len(calls), waits


def test_it_is_tried_so_often_and_waits_double_with_jitter():
    result, calls, waits = calls_until_it_works(2, Busy())
    assert (result, calls) == ("done", 3)
    expected = random.Random("jitter")
    assert waits == [1 + expected.random() / 2, 2 * (1 + expected.random() / 2)]
    assert calls_until_it_works(3, Busy())[:2] == (Busy, 3)
    assert calls_until_it_works(1, Busy(), retries=0)[:2] == (Busy, 1)


def test_other_errors_and_a_wait_that_ends_it_are_not_retried():
    assert calls_until_it_works(1, ValueError())[:2] == (ValueError, 1)
    assert calls_until_it_works(1, Busy(), wait=lambda _, wait_s: True)[:2] == (Busy, 1)


def test_what_the_service_asks_is_the_least_and_the_limit_the_most(monkeypatch):
    monkeypatch.setattr(retry, "draw", lambda: 0.0)
    assert get_retry_wait_s(0, 1.0, at_least_s=7.0) == 7.0
    assert get_retry_wait_s(10, 1.0, at_least_s=7.0, max_s=60.0) == 60.0
    monkeypatch.setattr(retry, "draw", random.Random("jitter").random)
    assert len({get_retry_wait_s(3, 1.0) for _ in range(64)}) > 60
    assert all(8 <= get_retry_wait_s(3, 1.0) < 12 for _ in range(64))
