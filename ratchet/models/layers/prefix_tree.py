"""Find shared prefixes in packed sequences, so that each prefix is computed once.

A token's hidden state depends only on the token and its past, the tokens before it. Sequences with
a shared prefix (attempts at the same prompt, answers that branch) form a tree. Each segment of the
tree is computed once, and all tokens after it attend to it.

U = distinct tokens of the tree, T = all tokens of the packed sequences, S = sequences.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

Index = NDArray[np.int64]

# Minimum length of a shared segment. Sharing fewer tokens costs more than computing them again.
MIN_SHARED_LENGTH = 4


@dataclass(frozen=True)
class PrefixSegment:
    """A run of tokens that one or several sequences have in common, after the same past.

    Each of these sequences has these tokens at the positions [begin, end).
    """

    row: int  # index of one of the sequences that contain the segment
    begin: int  # also the number of tokens before the segment
    end: int
    distinct_start: int = 0  # index of its first token among the U distinct tokens

    @property
    def length(self) -> int:
        """Return the number of tokens in the segment."""
        return self.end - self.begin


@dataclass(frozen=True)
class PrefixTree:
    """The distinct tokens of packed sequences, as segments of a prefix tree.

    Segments are sorted by the length of their past, then by their length. So segments without a
    past come first.
    """

    segments: tuple[PrefixSegment, ...]  # in the order of their tokens among the U distinct ones
    token_index_U: Index  # for each distinct token, an index among the T tokens
    distinct_index_T: Index  # for each token, its index among the U distinct tokens
    starts_S: Index  # for each sequence, the index of its first token among the T tokens

    @classmethod
    def from_sequences(cls, tokens_T: Index, lengths: Sequence[int]) -> PrefixTree:
        """Build the tree of packed sequences.

        Args:
            tokens_T: Tokens, or the keys that `compute_path_keys` returns.
            lengths: Number of tokens of each sequence, at least 1. Their sum is T.
        """
        ends_S = np.cumsum(np.asarray(lengths, dtype=np.int64))
        starts_S = ends_S - lengths
        rows = [
            tokens_T[start:end]
            for start, end in zip(starts_S.tolist(), ends_S.tolist(), strict=True)
        ]
        paths = _find_paths(rows)
        segment_by_key: dict[tuple[int, int], PrefixSegment] = {
            (segment.row, segment.begin): segment for path in paths for segment in path
        }
        segments: list[PrefixSegment] = []
        n_distinct = 0
        for segment in sorted(
            segment_by_key.values(), key=lambda segment: (segment.begin, segment.length)
        ):
            placed = PrefixSegment(segment.row, segment.begin, segment.end, n_distinct)
            segments.append(placed)
            segment_by_key[segment.row, segment.begin] = placed
            n_distinct += segment.length
        distinct_index_T = np.empty(len(tokens_T), dtype=np.int64)
        for sequence_start, path in zip(starts_S.tolist(), paths, strict=True):
            for segment in path:
                # The segments in `paths` have no `distinct_start`, but the placed ones have.
                start = segment_by_key[segment.row, segment.begin].distinct_start
                distinct_index_T[sequence_start + segment.begin : sequence_start + segment.end] = (
                    np.arange(start, start + segment.length)
                )
        token_index_U = np.empty(n_distinct, dtype=np.int64)
        for segment in segments:
            first_token = int(starts_S[segment.row]) + segment.begin
            token_index_U[segment.distinct_start : segment.distinct_start + segment.length] = (
                np.arange(first_token, first_token + segment.length)
            )
        return cls(tuple(segments), token_index_U, distinct_index_T, starts_S)

    def past(self, segment: PrefixSegment) -> Index:
        """Return the indices of a segment's past among the U distinct tokens, in order."""
        start = int(self.starts_S[segment.row])
        return self.distinct_index_T[start : start + segment.begin]


def compute_path_keys(tokens_T: Tensor, routes_TLK: Tensor | None = None) -> Index:
    """Return a key per token [T]. Tokens with equal pasts and equal keys are computed once.

    Without `routes_TLK` (the experts to replay for each token), the keys are the tokens. With it, a
    key is a hash of the token and its experts. Different tokens have the same key with a
    probability of at most 2^-48.
    """
    tokens = tokens_T.cpu().numpy()
    if routes_TLK is None:
        return tokens
    routes = routes_TLK.flatten(1).cpu().numpy().astype(np.uint64)
    # The factors are odd, so that different values of a column never have equal products.
    factors = np.random.default_rng(0).integers(
        0, 2**64, routes.shape[1] + 1, dtype=np.uint64
    ) | np.uint64(1)
    hashed = tokens.astype(np.uint64) * factors[-1]
    for column, factor in zip(routes.T, factors, strict=False):
        hashed += column * factor
    return hashed.view(np.int64)


def count_shared_prefix(rows: Sequence[Index]) -> int:
    """Return the length of the longest prefix that all rows share."""
    return min((_count_common_prefix(rows[0], row) for row in rows[1:]), default=len(rows[0]))


def _count_common_prefix(a: Index, b: Index) -> int:
    """Return the length of the longest prefix that two rows share."""
    shortest = min(len(a), len(b))
    differs = a[:shortest] != b[:shortest]
    first = int(differs.argmax()) if shortest else 0
    return first if shortest and differs[first] else shortest


def _find_paths(rows: Sequence[Index]) -> list[list[PrefixSegment]]:
    """Return the segments of each row, from its first token to its last."""
    # Rows with a common prefix have a common prefix of big-endian bytes too. So they are neighbours
    # if rows are sorted by bytes.
    order = sorted(range(len(rows)), key=lambda i: rows[i].astype(">i8").tobytes())
    common_with_next = [_count_common_prefix(rows[a], rows[b]) for a, b in pairwise(order)]
    paths: list[list[PrefixSegment]] = [[] for _ in rows]
    # (low, high, depth): the rows order[low:high] share their first `depth` tokens, which their
    # paths already contain.
    pending = [(0, len(order), 0)]
    while pending:
        low, high, depth = pending.pop()
        if high - low == 1:
            row = order[low]
            if len(rows[row]) > depth:
                paths[row].append(PrefixSegment(row, depth, len(rows[row])))
            continue
        common = min(common_with_next[low : high - 1])
        if common - depth >= MIN_SHARED_LENGTH:
            segment, depth = PrefixSegment(order[low], depth, common), common
            for i in range(low, high):
                paths[order[i]].append(segment)
        # Neighbours that share only `common` tokens branch after these. Cut between them.
        cuts = [
            low,
            *(i + 1 for i in range(low, high - 1) if common_with_next[i] == common),
            high,
        ]
        pending += [(a, b, depth) for a, b in pairwise(cuts)]
    return paths
