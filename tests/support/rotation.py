"""Cases that take turns by the day: those that show the same code in another combination."""

from __future__ import annotations

import datetime
import os
from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")


def todays(cases: Sequence[T], count: int) -> list[T]:
    """Return `count` of the cases, each day (UTC) the next ones, or all of them where the
    environment has RATCHET_TEST_ALL=1."""
    if os.environ.get("RATCHET_TEST_ALL") == "1":
        return list(cases)
    first = datetime.datetime.now(datetime.UTC).date().toordinal() * count
    return [cases[(first + i) % len(cases)] for i in range(min(count, len(cases)))]
