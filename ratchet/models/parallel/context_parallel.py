"""Divide the tokens of every sequence over the ranks of a context-parallel group.

Each token attends to all earlier tokens of its sequence, so keys and values are gathered in every
layer. A sequence is cut into twice as many chunks as there are ranks. Rank r takes chunk r from the
front and chunk r from the back, so that all ranks compute about the same amount of attention
("zig-zag": arXiv:2407.21783, section 3.3.2).

T = tokens of the packed sequences, t = tokens of this rank, S = sequences, H = query heads,
K = key/value heads, D = head_dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from ratchet.models.layers.attention import attend_past, plan_branch_calls
from ratchet.models.layers.prefix_tree import Index, PrefixSegment
from ratchet.models.parallel.collectives import Group, gather_uneven
from ratchet.models.parallel.sharding import ShardIndex


@dataclass(frozen=True)
class ContextSplit:
    """The tokens of packed sequences that each rank of a context-parallel group computes."""

    # This rank's segments, in the order of computation. Their `start` is an index into the
    # concatenated tokens of all ranks.
    segments: tuple[PrefixSegment, ...]
    tokens: Index  # indices of this rank's tokens, in the order of computation
    sizes: tuple[int, ...]  # number of tokens of each rank
    gathered_index_T: Index  # index of each token in the concatenated tokens of all ranks
    starts_S: Index  # index of the first token of each sequence

    @classmethod
    def from_lengths(cls, lengths: Sequence[int], context_index: ShardIndex) -> ContextSplit:
        """Return the split of sequences of these lengths.

        context_index: index of this rank in its context-parallel group, and the group's size.
        """
        starts_S = np.cumsum(np.asarray(lengths, dtype=np.int64)) - lengths
        segments_by_rank = [
            _list_segments(lengths, ShardIndex(rank, context_index.count))
            for rank in range(context_index.count)
        ]
        tokens = [_list_tokens(segments, starts_S) for segments in segments_by_rank]
        sizes = tuple(map(len, tokens))
        gathered_index_T = np.empty(sum(lengths), dtype=np.int64)
        gathered_index_T[np.concatenate(tokens)] = np.arange(sum(lengths))
        placed_segments: list[PrefixSegment] = []
        start = sum(sizes[: context_index.index])
        for segment in segments_by_rank[context_index.index]:
            placed_segments.append(PrefixSegment(segment.row, segment.begin, segment.end, start))
            start += segment.length
        return cls(
            tuple(placed_segments), tokens[context_index.index], sizes, gathered_index_T, starts_S
        )

    def past(self, segment: PrefixSegment) -> Index:
        """Return the indices of a segment's past in the concatenated tokens of all ranks.

        The past consists of the earlier tokens of the segment's sequence, in order.
        """
        start = int(self.starts_S[segment.row])
        return self.gathered_index_T[start : start + segment.begin]


# The cache serves the forward pass of a micro-batch and every column that is computed from it. It
# has more than one entry, because a pipeline interleaves micro-batches.
@lru_cache(maxsize=64)
def split_context(lengths: tuple[int, ...], context_index: ShardIndex) -> ContextSplit:
    """Return `ContextSplit.from_lengths`, which is computed once for the same arguments."""
    return ContextSplit.from_lengths(lengths, context_index)


def _list_segments(lengths: Sequence[int], context_index: ShardIndex) -> list[PrefixSegment]:
    """Return the chunks of one rank, sorted by begin, then by length."""
    chunks = 2 * context_index.count
    segments = [
        PrefixSegment(row, length * chunk // chunks, length * (chunk + 1) // chunks)
        for row, length in enumerate(lengths)
        for chunk in (context_index.index, chunks - 1 - context_index.index)
    ]
    return sorted(
        (segment for segment in segments if segment.length),
        key=lambda segment: (segment.begin, segment.length),
    )


def _list_tokens(segments: Sequence[PrefixSegment], starts_S: Index) -> Index:
    """Return the indices of the tokens of segments, in order."""
    spans = [np.arange(s.begin, s.end) + starts_S[s.row] for s in segments]
    return np.concatenate(spans) if spans else np.zeros(0, dtype=np.int64)


class ContextAttention:
    """The `attend` argument of `Decoder.forward` on one context-parallel rank."""

    def __init__(self, context_split: ContextSplit, group: Group, device: torch.device) -> None:
        self.sizes, self.group = context_split.sizes, group
        self.calls = plan_branch_calls(context_split.segments, context_split.past, device)

    def gather(self, k_tKD: Tensor, v_tKD: Tensor) -> tuple[Tensor, Tensor]:
        """Return the keys and values of all ranks [T, K, D], to which the calls' indices refer."""
        gathered = gather_uneven(torch.cat([k_tKD, v_tKD], dim=1), self.sizes, self.group)
        k_TKD, v_TKD = gathered.chunk(2, dim=1)
        return k_TKD, v_TKD

    def __call__(self, layer: int, q_tHD: Tensor, k_tKD: Tensor, v_tKD: Tensor) -> Tensor:
        k_TKD, v_TKD = self.gather(k_tKD, v_tKD)
        # A rank without tokens must take part in the collectives too. The sum keeps the gather in
        # the autograd graph, so that the backward pass runs its collective.
        if not self.calls:
            return q_tHD + k_TKD.sum() * 0
        queries = q_tHD.split([call.query_bucket.tokens for call in self.calls])
        return torch.cat(
            [
                attend_past(call, q, k_TKD, v_TKD)
                for call, q in zip(self.calls, queries, strict=True)
            ]
        )
