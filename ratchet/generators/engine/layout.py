"""Arithmetic of sequences that lie end to end in one forward, and of its padded number of rows."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray


def ceil_to(n: int, multiple: int) -> int:
    """Return the smallest multiple that isn't below n."""
    return -(-n // multiple) * multiple


def counting(lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return 0 .. n-1 for each n, laid end to end."""
    ends = np.cumsum(lengths)
    return np.arange(lengths.sum()) - np.repeat(ends - lengths, lengths)


def spans(lengths: NDArray[np.int64], budget: int) -> Iterator[slice]:
    """Yield consecutive ranges whose lengths sum to at most `budget`, or that have one entry."""
    start, used = 0, 0
    for row, length in enumerate(lengths.tolist()):
        if row > start and used + length > budget:
            yield slice(start, row)
            start, used = row, 0
        used += length
    if start < len(lengths):
        yield slice(start, len(lengths))
