"""Find shared prefixes in packed sequences. Tokens with equal pasts have equal hidden states.

Sequences with a common beginning (the attempts of a group, answers that branch) form a tree. Each
of its segments is computed once, and everything behind it attends to it.

U = distinct tokens of the tree, T = all tokens laid end to end, N = segments.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

Index = NDArray[np.int64]

# A shared prefix of fewer tokens is computed again, which costs less than sharing it.
SHORTEST = 4


@dataclass(frozen=True)
class PrefixSegment:
    """Tokens [begin, end) of a sequence, which all sequences that contain the segment share."""

    row: int  # one of the sequences
    begin: int  # also the number of tokens before the segment
    end: int
    start: int = 0  # index of its first token among the U distinct ones

    @property
    def length(self) -> int:
        """The number of tokens in the segment."""
        return self.end - self.begin


@dataclass(frozen=True)
class PrefixTree:
    """The distinct tokens of packed sequences, as segments of a prefix tree.

    Segments without a past come first, then they are in order of the length of their past and their
    own.
    """

    segments: tuple[PrefixSegment, ...]  # in the order in which their tokens are laid end to end
    tokens_U: Index  # index among the T tokens of each distinct token
    distinct_T: Index  # index among the U distinct tokens of each token
    starts_S: Index  # index of the first token of each sequence

    @classmethod
    def from_sequences(cls, tokens_T: Index, lengths: Sequence[int]) -> PrefixTree:
        """Build the tree of packed sequences.

        Args:
            tokens_T: tokens, or keys of `compute_path_keys`.
            lengths: tokens of each sequence, each at least 1; they sum to T.
        """
        ends_S = np.cumsum(np.asarray(lengths, dtype=np.int64))
        starts_S = ends_S - lengths
        rows = [
            tokens_T[start:end]
            for start, end in zip(starts_S.tolist(), ends_S.tolist(), strict=True)
        ]
        paths = _paths(rows)
        segment_at: dict[tuple[int, int], PrefixSegment] = {
            (segment.row, segment.begin): segment for path in paths for segment in path
        }
        segments: list[PrefixSegment] = []
        start = 0
        for segment in sorted(
            segment_at.values(), key=lambda segment: (segment.begin, segment.length)
        ):
            placed = PrefixSegment(segment.row, segment.begin, segment.end, start)
            segments.append(placed)
            segment_at[segment.row, segment.begin] = placed
            start += segment.length
        distinct_T = np.empty(len(tokens_T), dtype=np.int64)
        for first, path in zip(starts_S.tolist(), paths, strict=True):
            for part in path:
                at = segment_at[part.row, part.begin].start
                distinct_T[first + part.begin : first + part.end] = np.arange(at, at + part.length)
        tokens_U = np.empty(start, dtype=np.int64)
        for segment in segments:
            first = int(starts_S[segment.row]) + segment.begin
            tokens_U[segment.start : segment.start + segment.length] = np.arange(
                first, first + segment.length
            )
        return cls(tuple(segments), tokens_U, distinct_T, starts_S)

    def past(self, segment: PrefixSegment) -> Index:
        """Return the distinct tokens that come before a segment, in order."""
        start = int(self.starts_S[segment.row])
        return self.distinct_T[start : start + segment.begin]


def compute_path_keys(tokens_T: Tensor, routes_TLK: Tensor | None = None) -> Index:
    """Return a key per token [T]: tokens with equal pasts and equal keys are one computation.

    The keys are the tokens, hashed with their experts if these are replayed. Different tokens share
    a key with a probability of at most 2^-48.
    """
    tokens = tokens_T.cpu().numpy()
    if routes_TLK is None:
        return tokens
    routes = routes_TLK.flatten(1).cpu().numpy().astype(np.uint64)
    factors = np.random.default_rng(0).integers(
        0, 2**64, routes.shape[1] + 1, dtype=np.uint64
    ) | np.uint64(1)
    hashed = tokens.astype(np.uint64) * factors[-1]
    for column, factor in zip(routes.T, factors, strict=False):
        hashed += column * factor
    return hashed.view(np.int64)


def count_shared_prefix(rows: Sequence[Index]) -> int:
    """Return the number of first tokens that all rows have in common."""
    return min((_common_prefix(rows[0], row) for row in rows[1:]), default=len(rows[0]))


def _common_prefix(a: Index, b: Index) -> int:
    """Return the number of first tokens that two rows have in common."""
    shortest = min(len(a), len(b))
    differs = a[:shortest] != b[:shortest]
    first = int(differs.argmax()) if shortest else 0
    return first if shortest and differs[first] else shortest


def _paths(rows: Sequence[Index]) -> list[list[PrefixSegment]]:
    """Return the segments of each row, from its first token to its last."""
    # As big-endian bytes, rows sort as their numbers do. So rows with a common prefix become
    # neighbours.
    order = sorted(range(len(rows)), key=lambda i: rows[i].astype(">i8").tobytes())
    common_with_next = [_common_prefix(rows[a], rows[b]) for a, b in pairwise(order)]
    paths: list[list[PrefixSegment]] = [[] for _ in rows]
    # (low, high, depth): neighbours whose first `depth` tokens are equal and have their segments
    waiting = [(0, len(order), 0)]
    while waiting:
        low, high, depth = waiting.pop()
        if high - low == 1:
            row = order[low]
            if len(rows[row]) > depth:
                paths[row].append(PrefixSegment(row, depth, len(rows[row])))
            continue
        common = min(common_with_next[low : high - 1])
        if common - depth >= SHORTEST:
            segment, depth = PrefixSegment(order[low], depth, common), common
            for place in range(low, high):
                paths[order[place]].append(segment)
        cuts = [
            low,
            *(place + 1 for place in range(low, high - 1) if common_with_next[place] == common),
            high,
        ]
        waiting += [(a, b, depth) for a, b in pairwise(cuts)]
    return paths
