"""Counts of what an accelerator would do: kernels, copies and synchronisations, by line of code."""

from __future__ import annotations

import ctypes
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from support.pretend_cuda import load_backend

REPOSITORY = Path(__file__).resolve().parents[3]
SUPPORT = Path(__file__).resolve().parent
BACKWARD = "(backward)"  # the place of what autograd's threads do


@dataclass
class DeviceEvents:
    """Counts of events.

    kernel: what would be launched.
    copy: a copy between main memory and the device, in either direction.
    sync: what makes the host wait for the device: `item`, `nonzero`, and every copy that is not
        `non_blocking`.
    """

    # by (kind, operation, place)
    counts: Counter[tuple[str, str, str]] = field(default_factory=Counter)

    def count(self, kind: str, *, place: str = "") -> int:
        """Return the number of events of a kind at places that contain `place`."""
        return sum(
            n
            for (event_kind, _, event_place), n in self.counts.items()
            if event_kind == kind and place in event_place
        )

    def describe(self, kind: str, most: int = 30) -> str:
        """Return the most frequent events of a kind, one line each: count, operation, place."""
        rows = Counter(
            {
                (operation, place): n
                for (event_kind, operation, place), n in self.counts.items()
                if event_kind == kind
            }
        )
        return "\n".join(
            f"{n:6} {operation:40} {place}" for (operation, place), n in rows.most_common(most)
        )


_events: DeviceEvents | None = None
_thread = threading.local()  # depth: calls of `count_as_one_kernel` in progress


@contextmanager
def counting() -> Iterator[DeviceEvents]:
    """Count the events of the whole process inside the block."""
    global _events
    assert _events is None, "blocks of counting can't be nested"
    _events = DeviceEvents()
    load_backend().pretend_listen(_record_from_backend)
    try:
        yield _events
    finally:
        load_backend().pretend_listen(None)
        _events = None


def record(kind: str, operation: str) -> None:
    """Count an event at the innermost line of the repository that led to it."""
    if _events is not None and not getattr(_thread, "depth", 0):
        _events.counts[kind, operation, _find_place()] += 1


@ctypes.CFUNCTYPE(None, ctypes.c_char_p, ctypes.c_char_p)
def _record_from_backend(kind: bytes, operation: bytes) -> None:
    record(kind.decode(), operation.decode())


def _find_place() -> str:
    frame = sys._getframe()
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        is_installed = ".venv" in path.parts or not path.is_relative_to(REPOSITORY)
        if not is_installed and not path.is_relative_to(SUPPORT):
            return f"{path.relative_to(REPOSITORY)}:{frame.f_lineno}"
        frame = frame.f_back
    return BACKWARD


def count_as_one_kernel(
    function: Callable[..., Any], name: Callable[..., str]
) -> Callable[..., Any]:
    """Return a function that counts as one kernel: CUDA has one where this backend has several.

    name: returns the kernel's name, from the function's arguments.
    """

    def call(x: Any, *arguments: Any, **options: Any) -> Any:
        if not x.is_cuda:
            return function(x, *arguments, **options)
        record("kernel", name(x, *arguments, **options))
        _thread.depth = getattr(_thread, "depth", 0) + 1
        try:
            return function(x, *arguments, **options)
        finally:
            _thread.depth -= 1

    return call
