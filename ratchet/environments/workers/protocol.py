"""The frames of JSON that the driver and its environment workers exchange.

Tasks, messages and steps are converted by `ratchet.data.codec`, and NumPy scalars become Python
numbers. A value of any other type is refused.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from ratchet.data.codec import to_plain
from ratchet.errors import DataError
from ratchet.processes.frames import Parcel

MAX_FRAME_BYTES = 256 * 2**20


def pack(value: Any) -> Parcel:
    """Return a value as JSON. `from_plain(parcel.load_json())` restores the value.

    Raises DataError for a value that can't be sent: of another type, or above 256 MiB.
    """
    try:
        parcel = Parcel(json.dumps(to_plain(value), default=_convert_scalar).encode("ascii"))
    except RecursionError:
        raise DataError(
            "a value that contains itself can't be sent to or from a worker process"
        ) from None
    if len(parcel.body) > MAX_FRAME_BYTES:
        raise DataError(
            f"{len(parcel.body) >> 20} MiB can't be sent to or from a worker process at once: the "
            f"limit is {MAX_FRAME_BYTES >> 20} MiB"
        )
    return parcel


def _convert_scalar(value: Any) -> Any:
    if isinstance(value, np.generic):
        return value.item()
    raise DataError(
        f"{value!r:.80} of type {type(value).__name__} can't be sent to or from a worker process: "
        "tasks, messages and steps may contain only None, numbers, strings, and lists, tuples and "
        "dictionaries of these"
    )
