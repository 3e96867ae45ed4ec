"""Which tokens of packed sequences are one computation: where the whole past of two is equal, so
are their hidden states.

Sequences that begin alike (the attempts of a group, answers that branch) form a tree. Each of its
segments is computed once; what follows attends to it. U = distinct tokens of the tree, T = all
tokens laid end to end, N = segments.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

Index = NDArray[np.int64]

# tokens: a shared beginning that is shorter is computed again, which costs less than to share it
SHORTEST = 4


@dataclass(frozen=True)
class Segment:
    """Tokens [begin, end) of a sequence, the same in all that pass through it. row: one of these.
    begin is also how many tokens come before it; start: index of its first token among the U
    distinct ones."""

    row: int
    begin: int
    end: int
    start: int = 0

    @property
    def length(self) -> int:
        return self.end - self.begin


@dataclass(frozen=True)
class PrefixTree:
    """segments: in the order in which their tokens are laid end to end, those without a past first,
    then by the length of their past and their own. tokens_U: where each distinct token comes from,
    of the T. distinct_T: where each token went."""

    segments: tuple[Segment, ...]
    tokens_U: Index
    distinct_T: Index
    starts_S: Index

    @classmethod
    def of(cls, tokens_T: Index, lengths: Sequence[int]) -> PrefixTree:
        """lengths: of each sequence, at least 1 each; they sum to T."""
        ends_S = np.cumsum(np.asarray(lengths, dtype=np.int64))
        starts_S = ends_S - lengths
        rows = [
            tokens_T[start:end]
            for start, end in zip(starts_S.tolist(), ends_S.tolist(), strict=True)
        ]
        paths = _paths(rows)
        known: dict[tuple[int, int], Segment] = {
            (s.row, s.begin): s for path in paths for s in path
        }
        segments: list[Segment] = []
        start = 0
        for segment in sorted(known.values(), key=lambda s: (s.begin, s.length)):
            placed = Segment(segment.row, segment.begin, segment.end, start)
            segments.append(placed)
            known[segment.row, segment.begin] = placed
            start += segment.length
        distinct_T = np.empty(len(tokens_T), dtype=np.int64)
        for first, path in zip(starts_S.tolist(), paths, strict=True):
            for part in path:
                at = known[part.row, part.begin].start
                distinct_T[first + part.begin : first + part.end] = np.arange(at, at + part.length)
        tokens_U = np.empty(start, dtype=np.int64)
        for s in segments:
            first = int(starts_S[s.row]) + s.begin
            tokens_U[s.start : s.start + s.length] = np.arange(first, first + s.length)
        return cls(tuple(segments), tokens_U, distinct_T, starts_S)

    def past(self, segment: Segment) -> Index:
        """The distinct tokens that come before a segment, in order."""
        start = int(self.starts_S[segment.row])
        return self.distinct_T[start : start + segment.begin]


def path_keys(tokens_T: Tensor, routes_TLK: Tensor | None = None) -> Index:
    """[T]: equal where two tokens are one computation, given equal pasts: for equal tokens and,
    where their experts are given, equal routes. Those are hashed: of different ones 2^-48 or less
    have one key."""
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


def shared_beginning(rows: Sequence[Index]) -> int:
    """How many first tokens all of the rows have in common."""
    return min((_alike(rows[0], row) for row in rows[1:]), default=len(rows[0]))


def _alike(a: Index, b: Index) -> int:
    shortest = min(len(a), len(b))
    differs = a[:shortest] != b[:shortest]
    first = int(differs.argmax()) if shortest else 0
    return first if shortest and differs[first] else shortest


def _paths(rows: Sequence[Index]) -> list[list[Segment]]:
    """The segments of each row, from its first token to its last."""
    # As big-endian bytes rows sort as their numbers do, and those that begin alike become
    # neighbours.
    order = sorted(range(len(rows)), key=lambda i: rows[i].astype(">i8").tobytes())
    alike = [_alike(rows[a], rows[b]) for a, b in pairwise(order)]
    paths: list[list[Segment]] = [[] for _ in rows]
    # neighbours low to high, alike up to a depth that has its segments
    waiting = [(0, len(order), 0)]
    while waiting:
        low, high, depth = waiting.pop()
        if high - low == 1:
            row = order[low]
            if len(rows[row]) > depth:
                paths[row].append(Segment(row, depth, len(rows[row])))
            continue
        common = min(alike[low : high - 1])
        if common - depth >= SHORTEST:
            segment, depth = Segment(order[low], depth, common), common
            for place in range(low, high):
                paths[order[place]].append(segment)
        cuts = [low, *(place + 1 for place in range(low, high - 1) if alike[place] == common), high]
        waiting += [(a, b, depth) for a, b in pairwise(cuts)]
    return paths
