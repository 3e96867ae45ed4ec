"""Named failpoints let tests break a run at exact places, even between two quick operations.

`point("checkpoint.after_write")` does nothing until `arm` names it. A spec such as
`checkpoint.after_write:3:kill` kills the process when it passes that point for the third time.
`record` lists the points that a block of code passes, so that a test can enumerate its crash
points.

Each phase of a step is a failpoint too: `step.sample`, `step.update` and so on. This module never
reads the environment (the command line does, and calls `arm`).
"""

from __future__ import annotations

import errno
import os
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ratchet.utils.tracer import TRACER, Span


class InjectedFault(RuntimeError):
    """The error that the action `raise` raises. No code of the library handles it."""


def _send(number: signal.Signals) -> Callable[[str], None]:
    return lambda name: os.kill(os.getpid(), number)


def _raise(name: str) -> None:
    raise InjectedFault(f"injected at failpoint '{name}'")


def _raise_disk_full(name: str) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), name)


ACTIONS: dict[str, Callable[[str], None]] = {
    # As abrupt as a crash of the machine: nothing is flushed, no handler runs.
    "kill": _send(signal.SIGKILL),
    "interrupt": _send(signal.SIGINT),  # like Ctrl-C
    "terminate": _send(signal.SIGTERM),  # like a scheduler that preempts the job
    "hang_up": _send(signal.SIGHUP),  # like a closed terminal
    "raise": _raise,
    "enospc": _raise_disk_full,
}

_listener: Callable[[str], None] | None = None


def _listen(listener: Callable[[str], None] | None) -> None:
    """Call the listener at every failpoint from now on. None: do nothing there."""
    global _listener
    _listener = listener
    if listener is None:
        TRACER.unsubscribe(_pass_phase)
    else:
        TRACER.subscribe(_pass_phase, phases_only=True)


def _pass_phase(span: Span) -> None:
    point(f"step.{span.name}")


def point(name: str) -> None:
    """Mark a place where a test may break the process."""
    if _listener is not None:
        _listener(name)


def arm(spec: str) -> None:
    """Arm the failpoints of `spec` and disarm all others.

    Points are not registered anywhere, so a name that no code passes has no effect.

    Args:
        spec: `name[:n]:action`, several separated by commas. The action runs when the process
            passes the point for the n-th time; n is 1 by default. Actions are kill (SIGKILL),
            interrupt (SIGINT), terminate (SIGTERM), hang_up (SIGHUP), raise (InjectedFault) and
            enospc (OSError).

    Raises ValueError for a malformed spec.
    """
    plan: dict[tuple[str, int], Callable[[str], None]] = {}
    for item in filter(None, (part.strip() for part in spec.split(","))):
        name, passage, action = _parse_item(item)
        plan[name, passage] = ACTIONS[action]
    passages: Counter[str] = Counter()

    def count_and_act(name: str) -> None:
        passages[name] += 1
        if action := plan.get((name, passages[name])):
            action(name)

    _listen(count_and_act if plan else None)


def disarm() -> None:
    """Disarm all failpoints."""
    _listen(None)


@contextmanager
def record() -> Iterator[list[str]]:
    """Yield a list that collects the points passed inside the block, in order.

    No failpoint is armed inside the block.
    """
    passed_points: list[str] = []
    previous_listener = _listener
    _listen(passed_points.append)
    try:
        yield passed_points
    finally:
        _listen(previous_listener)


def _parse_item(item: str) -> tuple[str, int, str]:
    head, _, action = item.rpartition(":")
    name, _, passage = head.partition(":")
    passage = passage or "1"
    if not name or action not in ACTIONS or not passage.isdecimal() or int(passage) < 1:
        raise ValueError(
            f"failpoint '{item}': write NAME:ACTION or NAME:N:ACTION, N from 1, ACTION one of "
            f"{', '.join(ACTIONS)}"
        )
    return name, int(passage), action
