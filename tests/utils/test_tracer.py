"""Every subscriber hears of a span's beginning and end, once, in an order that nests."""

from __future__ import annotations

import pytest

from ratchet.utils import failpoints
from ratchet.utils.tracer import TRACER, Span, Tracer, span


def note(heard: list[str], name: str):
    def subscriber(span: Span):
        heard.append(f"{name}+{span.name}")
        return lambda: heard.append(f"{name}-{span.name} {span.seconds:g}")

    return subscriber


def test_subscribers_hear_of_spans_even_of_those_that_raise():
    times = iter([1.0, 2.0, 5.0, 9.0])
    tracer, heard = Tracer(lambda: next(times)), list[str]()
    first, second = note(heard, "a"), note(heard, "b")
    for subscriber in (first, second, second):  # a second subscription is the same one
        tracer.subscribe(subscriber)
    with pytest.raises(KeyError), tracer.span("steps", "out"), tracer.span("policy", "in"):
        raise KeyError
    assert heard == ["a+out", "b+out", "a+in", "b+in", "b-in 3", "a-in 3", "b-out 8", "a-out 8"]
    tracer.unsubscribe(first)
    tracer.unsubscribe(second)
    tracer.unsubscribe(second)
    times = iter([0.0, 1.0])
    with tracer.span("steps", "unheard"):
        pass
    assert len(heard) == 8


def test_a_failpoint_at_a_phase_ends_what_has_begun():
    heard = list[str]()
    subscriber = note(heard, "a")
    TRACER.subscribe(subscriber)
    failpoints.arm("step.update:raise")
    try:
        with span("steps", "update"):
            pass  # it is not a phase
        with pytest.raises(failpoints.InjectedFault), TRACER.phase("steps", "update", 1):
            raise AssertionError
    finally:
        failpoints.disarm()
        TRACER.unsubscribe(subscriber)
    assert [text.partition(" ")[0] for text in heard] == ["a+update", "a-update"] * 2
    assert not TRACER._phase_subscribers
