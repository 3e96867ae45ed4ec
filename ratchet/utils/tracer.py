"""Announce the parts of a run as spans to the functions that have subscribed.

Stall reports, the profile, the trace, OpenTelemetry and armed failpoints subscribe while they are
in use. The time metric of a phase is the duration of its span. A process has one tracer, because
the components that work have no reference to those that report. This module imports nothing of
Ratchet.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

# The tracks whose spans overlap. A request to the generator and the judging of an attempt begin in
# the asyncio task of the attempt.
ATTEMPT_TRACK = "attempts"
REQUEST_TRACK = "requests"
REWARD_TRACK = "rewards"


AttributeValue = str | float | Sequence[str] | Sequence[float]


@dataclass(slots=True, eq=False)
class Span:
    """A context that marks its block as a part of the run."""

    _clock: Callable[[], float]
    _subscribers: Sequence[Subscriber]
    track: str
    """The component that works. Spans of a track nest or follow each other."""
    name: str
    """The part."""
    step: int | None = None
    """The training step, from 1, if the part is a phase of a step; None: it is not a phase."""
    start_s: float = field(default=0.0, init=False)
    """Time of the beginning on the tracer's clock."""
    end_s: float = field(default=0.0, init=False)
    """Time of the end on the tracer's clock."""
    attributes: Mapping[str, AttributeValue] = field(default_factory=dict, init=False)
    """Attributes that the block sets before it ends, under OpenTelemetry's names."""
    _endings: list[Callable[[], None]] = field(default_factory=list, init=False)

    @property
    def seconds(self) -> float:
        return self.end_s - self.start_s

    def __enter__(self) -> Span:
        self.start_s = self._clock()
        try:
            for subscriber in self._subscribers:
                if (end := subscriber(self)) is not None:
                    self._endings.append(end)
        except BaseException:  # an armed failpoint
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.end_s = self._clock()
        for end in reversed(self._endings):
            end()


# Called with a span that begins. Returns a function to call when it has ended, or None.
Subscriber = Callable[[Span], Callable[[], None] | None]


class Tracer:
    """The source of spans. clock: returns seconds."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.clock = clock
        # Tuples that are replaced, not changed, so that other threads may begin spans meanwhile.
        self._subscribers: tuple[Subscriber, ...] = ()  # to all spans
        self._phase_subscribers: tuple[Subscriber, ...] = ()

    def subscribe(self, subscriber: Subscriber, *, phases_only: bool = False) -> None:
        """Call the subscriber with every span, or only with the phases of steps."""
        self.unsubscribe(subscriber)
        self._phase_subscribers += (subscriber,)
        if not phases_only:
            self._subscribers += (subscriber,)

    def unsubscribe(self, subscriber: Subscriber) -> None:
        """End a subscription. Does nothing if there is none."""
        self._subscribers = tuple(each for each in self._subscribers if each != subscriber)
        self._phase_subscribers = tuple(
            each for each in self._phase_subscribers if each != subscriber
        )

    def span(self, track: str, name: str) -> AbstractContextManager[Span | None]:
        """Return a context that marks its block as a part of the run (see `Span`).

        The context yields None if nothing has subscribed.
        """
        # Without subscribers, `with span(...)` costs 0.1 us, as much as an empty context.
        subscribers = self._subscribers
        return Span(self.clock, subscribers, track, name) if subscribers else _NO_SPAN

    def phase(self, track: str, name: str, step: int) -> Span:
        """Return a context that marks its block as a phase of a training step, from 1."""
        return Span(self.clock, self._phase_subscribers, track, name, step)


_NO_SPAN = nullcontext()
TRACER = Tracer()
span = TRACER.span
