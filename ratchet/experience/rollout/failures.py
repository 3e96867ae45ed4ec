"""Describe failed attempts: how many of which kind, and where in the user's file the error is."""

from __future__ import annotations

import logging
import re
import sysconfig
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from ratchet.types import Failed

log = logging.getLogger(__name__)

TRACEBACK_HEADER = "Traceback (most recent call last):"
FRAME = re.compile(r'^\s*File "(?P<path>[^"]+)", line (?P<line>\d+), in (?P<function>.+)$')

# Files below these folders are not the user's own.
LIBRARIES = (
    str(Path(__file__).resolve().parents[2]),
    *(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")),
)


def describe_failures(failures: Sequence[Failed]) -> str:
    """Describe the most frequent failure, with counts of all kinds.

    It is of the most frequent kind, and its traceback has the most frequent last line of that kind.
    The description has one place of the traceback (see `shorten_traceback`); the whole traceback is
    logged at level INFO, which a run writes to run.log.

    Args:
        failures: At least one failure.
    """
    kinds = Counter(failure.kind for failure in failures)
    kind, _ = kinds.most_common(1)[0]
    details = [failure.detail.strip() for failure in failures if failure.kind == kind]
    endings = Counter(_get_last_line(detail) for detail in details)
    ending, count = endings.most_common(1)[0]
    example = next(detail for detail in details if _get_last_line(detail) == ending)
    counts = ", ".join(f"{name} {n}" for name, n in kinds.most_common())
    short = shorten_traceback(example)
    if short != example:
        log.info("the most frequent failure, %s:\n%s", kind, example)
        short += " (run.log has the whole traceback)"
    return f"by kind: {counts}; the most frequent ({count}), {kind}:\n{short}"


def shorten_traceback(detail: str) -> str:
    """Return the error of a traceback with the place in the user's own file that raised it.

    The place is the last frame outside of Ratchet, the standard library and installed packages; it
    is the last frame if there is none. A text without a traceback is returned unchanged.

    Args:
        detail: A text as `traceback.format_exc` writes it.
    """
    if TRACEBACK_HEADER not in detail:
        return detail
    lines = detail[detail.rindex(TRACEBACK_HEADER) :].splitlines()
    frames = [i for i, line in enumerate(lines) if FRAME.match(line)]
    if not frames:
        return detail
    own = [i for i in frames if not _is_library(lines[i])]
    last = frames[-1]
    error = [line for line in lines[last + 1 :] if line.strip() and not line.startswith("  ")]
    place = FRAME.sub(r"\g<path>, line \g<line>, in \g<function>", lines[(own or frames)[-1]])
    return "\n".join([*error, f"  at {place.strip()}"])


def _is_library(frame: str) -> bool:
    match = FRAME.match(frame)
    return match is not None and match["path"].startswith(LIBRARIES)


def _get_last_line(detail: str) -> str:
    return detail.rpartition("\n")[2]
