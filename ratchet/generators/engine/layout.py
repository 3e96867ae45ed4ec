"""Helpers for packed sequences: laid end to end for one forward, padded to a multiple of rows."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray


def round_up_to(n: int, multiple: int) -> int:
    """Return n rounded up to a multiple."""
    return -(-n // multiple) * multiple


def concatenate_ranges(lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return 0 .. n-1 for each length n, concatenated."""
    ends = np.cumsum(lengths)
    return np.arange(lengths.sum()) - np.repeat(ends - lengths, lengths)


def split_spans(lengths: NDArray[np.int64], budget: int) -> Iterator[slice]:
    """Yield consecutive ranges of entries whose lengths sum to at most `budget`.

    An entry longer than `budget` is a range by itself.
    """
    start, tokens_used = 0, 0
    for row, length in enumerate(lengths.tolist()):
        if row > start and tokens_used + length > budget:
            yield slice(start, row)
            start, tokens_used = row, 0
        tokens_used += length
    if start < len(lengths):
        yield slice(start, len(lengths))
