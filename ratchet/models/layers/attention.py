"""Attention over packed sequences for the learner. No sequence attends to another.

Consecutive sequences of similar length share one causal attention call. For this call they are
padded on the right, where causal attention ignores the padding. Sequences of equal length, the
common case, need no padding. Segments of a prefix tree, whose past belongs to other segments, share
masked calls in the same way. The compiled kernel takes all segments in one call, without padding.

T = tokens, H = query heads, K = key/value heads, D = head_dim, R = segments of a call, P = longest
past of a segment, L = longest segment.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd import Function

from ratchet.kernels.attention import SegmentPlan, attend_segments, supports_attention
from ratchet.models.accelerator import attend_grouped
from ratchet.models.layers.prefix_tree import Index, PrefixSegment, PrefixTree
from ratchet.models.layers.varlen import VarlenAttention, can_attend
from ratchet.utils.transfer import upload

# Segments share a call if its number of query-key pairs, padding included, is at most
# MAX_PADDING_FACTOR * (the pairs without padding) + CALL_COST_PAIRS. On a CPU a separate call costs
# about as much as CALL_COST_PAIRS pairs.
MAX_PADDING_FACTOR = 1.25
CALL_COST_PAIRS = 4096
# A function that returns the indices of the tokens before a segment, in order.
Past = Callable[[PrefixSegment], Index]


@dataclass(frozen=True)
class Padding:
    """The indices that pad sequences to rows of equal length, and remove the padding again.

    A cell holds one token of these rows, or padding.
    """

    # int64 [rows * longest]: the token in each cell. A padding cell repeats a token, so that its
    # values are finite.
    cell_tokens: Tensor
    token_cells: Tensor  # int64 [tokens]: the cell of each token


@dataclass(frozen=True)
class Bucket:
    """One attention call over consecutive sequences."""

    rows: int
    longest: int
    tokens: int
    padding: Padding | None  # None if the sequences are equally long


class PackedAttention:
    """The `attend` argument of `Decoder.forward` for sequences laid end to end."""

    def __init__(
        self,
        lengths: Sequence[int],
        device: torch.device | str = "cpu",
        *,
        uses_varlen: bool = False,
    ) -> None:
        """Plan the attention calls.

        Args:
            lengths: Number of tokens of each sequence, at least 1. They sum to T. Ascending lengths
                need the fewest calls.
            uses_varlen: True to use the kernel for variable lengths, for tensors that it takes.
        """
        self.lengths = lengths
        self.device = device
        # Equal lengths need no padding, so one call of ordinary attention does as well.
        needs_padding = len(set(lengths)) > 1
        self.varlen = VarlenAttention(lengths, device) if uses_varlen and needs_padding else None

    @cached_property
    def buckets(self) -> list[Bucket]:
        """The attention calls over padded sequences."""
        return [_make_bucket(group, self.device) for group in _group_lengths(self.lengths)]

    @cached_property
    def plan(self) -> SegmentPlan:
        """The sequences, for the compiled kernel."""
        lengths_S = np.array(self.lengths, dtype=np.int64)
        return SegmentPlan(np.cumsum(lengths_S) - lengths_S, lengths_S)

    def __call__(self, layer: int, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor) -> Tensor:
        if self.varlen is not None and can_attend(q_THD, v_TKD):
            return self.varlen.attend(q_THD, k_TKD, v_TKD)
        if supports_attention(q_THD, k_TKD, v_TKD, max(self.lengths)):
            return attend_segments(self.plan, q_THD, k_TKD, v_TKD)
        if len(self.buckets) == 1:
            return _attend(self.buckets[0], q_THD, k_TKD, v_TKD)
        sizes = [bucket.tokens for bucket in self.buckets]
        parts = zip(
            self.buckets, q_THD.split(sizes), k_TKD.split(sizes), v_TKD.split(sizes), strict=True
        )
        return torch.cat([_attend(bucket, q, k, v) for bucket, q, k, v in parts])


def _attend(bucket: Bucket, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor) -> Tensor:
    """Return the causal attention of a bucket's sequences."""
    q, k, v = (to_cells(bucket, x) for x in (q_THD, k_TKD, v_TKD))
    return to_tokens(bucket, attend_grouped(q, k, v))


def to_cells(bucket: Bucket, x: Tensor) -> Tensor:
    """Pad and reshape [tokens, heads, D] to [rows, heads, longest, D]."""
    cells = x if bucket.padding is None else _Pad.apply(x, bucket.padding)
    return cells.view(bucket.rows, bucket.longest, *x.shape[1:]).transpose(1, 2)


def to_tokens(bucket: Bucket, out: Tensor) -> Tensor:
    """Invert `to_cells`: turn [rows, heads, longest, D] into [tokens, heads, D]."""
    cells = out.transpose(1, 2).reshape(-1, out.shape[1], out.shape[3])
    return cells if bucket.padding is None else _Unpad.apply(cells, bucket.padding)


@dataclass(frozen=True)
class BranchCall:
    """One attention call over consecutive segments of a prefix tree, each with a past."""

    query_bucket: Bucket  # the tokens of the segments
    # int64 [R * (P + L)]: the token in each cell of keys and values. A row has the segment's past,
    # then the segment. Padding cells repeat a token.
    key_tokens: Tensor
    mask: Tensor  # bool [R or 1, 1, L, P + L]: True for the cells that a query attends to
    begin_R: Tensor  # int64 [R or 1], on the CPU: length of the past of each row of the mask

    def to_rows(self, x: Tensor) -> Tensor:
        """Reshape keys or values of all tokens [T, heads, D] to [R, heads, P + L, D]."""
        rows = x.index_select(0, self.key_tokens)
        return rows.view(self.query_bucket.rows, -1, *x.shape[1:]).transpose(1, 2)

    def limit_distance(self, window: int) -> Tensor:
        """Return the mask without cells that are `window` tokens or more before a query."""
        longest, n_keys = self.mask.shape[-2:]
        past_P = torch.arange(n_keys - longest)
        segment_RL = self.begin_R[:, None] + torch.arange(longest)
        keys_RK = torch.cat([past_P.expand(len(self.begin_R), -1), segment_RL], dim=1)
        is_near = segment_RL[:, :, None] - keys_RK[:, None] < window
        return self.mask & upload(is_near[:, None], self.mask.device)


class TreeAttention:
    """The `attend` argument of `Decoder.forward` for the distinct tokens of a prefix tree.

    Tokens are in the order of the tree's segments.
    """

    def __init__(
        self, tree: PrefixTree, device: torch.device | str = "cpu", uses_varlen: bool = False
    ) -> None:
        self.tree = tree
        roots = [segment for segment in tree.segments if not segment.begin]
        self.n_root_tokens = sum(segment.length for segment in roots)
        self.root_attention = PackedAttention(
            [segment.length for segment in roots], device, uses_varlen=uses_varlen
        )
        self.longest = max(segment.end for segment in tree.segments)
        self.device = device

    @cached_property
    def branches(self) -> list[BranchCall]:
        """The attention calls over segments with a past."""
        branches = [segment for segment in self.tree.segments if segment.begin]
        return plan_branch_calls(branches, self.tree.past, self.device)

    @cached_property
    def plan(self) -> SegmentPlan:
        """All segments, for the compiled kernel."""
        segments = self.tree.segments
        starts_S = np.array([segment.distinct_start for segment in segments])
        lengths_S = np.array([segment.length for segment in segments])
        keys_S = [
            np.concatenate([self.tree.past(segment), np.arange(start, start + segment.length)])
            for segment, start in zip(segments, starts_S, strict=True)
        ]
        return SegmentPlan(starts_S, lengths_S, keys_S)

    def __call__(self, layer: int, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor) -> Tensor:
        if supports_attention(q_THD, k_TKD, v_TKD, self.longest):
            return attend_segments(self.plan, q_THD, k_TKD, v_TKD)
        root_queries, *branch_queries = q_THD.split(
            [self.n_root_tokens, *(call.query_bucket.tokens for call in self.branches)]
        )
        parts = [
            self.root_attention(
                layer, root_queries, k_TKD[: self.n_root_tokens], v_TKD[: self.n_root_tokens]
            )
        ]
        for call, q in zip(self.branches, branch_queries, strict=True):
            parts.append(attend_past(call, q, k_TKD, v_TKD))
        return torch.cat(parts)


def attend_past(call: BranchCall, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor) -> Tensor:
    """Return the attention of segments with a past.

    Args:
        q_THD: Queries of the call's segments only.
        k_TKD: Keys of all tokens, also those of the pasts.
        v_TKD: Values of all tokens, also those of the pasts.
    """
    bucket = call.query_bucket
    out = attend_grouped(
        to_cells(bucket, q_THD), call.to_rows(k_TKD), call.to_rows(v_TKD), call.mask
    )
    return to_tokens(bucket, out)


class _Pad(Function):
    """Pad [tokens, ...] to [rows * longest, ...].

    The loss depends on no padding, so the gradient of padding cells is exactly 0. The backward pass
    therefore only selects the cells of tokens.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, padding: Padding) -> Tensor:
        ctx.padding = padding
        return x.index_select(0, padding.cell_tokens)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0].index_select(0, ctx.padding.token_cells), None


class _Unpad(Function):
    """Remove the padding: [rows * longest, ...] to [tokens, ...]."""

    @staticmethod
    def forward(ctx: Any, cells: Tensor, padding: Padding) -> Tensor:
        ctx.padding = padding
        return cells.index_select(0, padding.token_cells)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        padding: Padding = ctx.padding
        grad = grads[0].new_zeros(len(padding.cell_tokens), *grads[0].shape[1:])
        return grad.index_copy_(0, padding.token_cells, grads[0]), None


def _group_lengths(lengths: Sequence[int]) -> list[list[int]]:
    """Group consecutive lengths that share a call."""
    segments = [PrefixSegment(row, 0, length) for row, length in enumerate(lengths)]
    return [[segment.length for segment in group] for group in _group_segments(segments)]


def _make_bucket(lengths: list[int], device: torch.device | str) -> Bucket:
    """Return the call over sequences of these lengths."""
    longest = max(lengths)
    tokens = sum(lengths)
    if longest * len(lengths) == tokens:
        return Bucket(len(lengths), longest, tokens, padding=None)
    lengths_R = torch.tensor(lengths)
    starts_R = lengths_R.cumsum(0) - lengths_R
    offsets = torch.arange(longest)
    gather = starts_R[:, None] + torch.minimum(offsets, lengths_R[:, None] - 1)
    cells = (offsets < lengths_R[:, None]).flatten().nonzero()[:, 0]
    return Bucket(
        len(lengths),
        longest,
        tokens,
        Padding(upload(gather.flatten(), device), upload(cells, device)),
    )


def _group_segments(segments: Sequence[PrefixSegment]) -> list[list[PrefixSegment]]:
    """Group consecutive segments that share a call.

    A group ends where its padding would cost more than another call.
    """
    groups: list[list[PrefixSegment]] = []
    # The last group's number of query-key pairs without padding, longest segment and longest past.
    group_pairs = longest = longest_past = 0
    for segment in segments:
        segment_pairs = segment.length * segment.end
        joint_longest = max(longest, segment.length)
        joint_past = max(longest_past, segment.begin)
        row_pairs = joint_longest * (joint_longest + joint_past)
        padded_pairs = (len(groups[-1]) + 1) * row_pairs if groups else 0
        if (
            groups
            and padded_pairs <= MAX_PADDING_FACTOR * (group_pairs + segment_pairs) + CALL_COST_PAIRS
        ):
            groups[-1].append(segment)
            group_pairs += segment_pairs
            longest = joint_longest
            longest_past = joint_past
        else:
            groups.append([segment])
            group_pairs = segment_pairs
            longest = segment.length
            longest_past = segment.begin
    return groups


def plan_branch_calls(
    segments: Sequence[PrefixSegment], past: Past, device: torch.device | str
) -> list[BranchCall]:
    """Return the attention calls for consecutive segments.

    Segments that are sorted by begin, then by length, need the fewest calls.
    """
    return [_plan_branch_call(group, past, device) for group in _group_segments(segments)]


def _plan_branch_call(
    group: list[PrefixSegment], past_indices: Past, device: torch.device | str
) -> BranchCall:
    """Return the call over one group of segments."""
    bucket = _make_bucket([segment.length for segment in group], device)
    longest_past = max(segment.begin for segment in group)
    past_RP = np.stack([np.resize(past_indices(segment), longest_past) for segment in group])
    starts_R = np.array([segment.distinct_start for segment in group])
    lengths_R = np.array([segment.length for segment in group])
    offsets_L = np.arange(bucket.longest)
    segment_RL = starts_R[:, None] + np.minimum(offsets_L, lengths_R[:, None] - 1)
    keys = torch.from_numpy(np.concatenate([past_RP, segment_RL], axis=1).reshape(-1))
    # Pasts of equal length need only one mask for all rows.
    distinct_begins = {segment.begin for segment in group}
    begin_R = torch.tensor(
        list(distinct_begins) if len(distinct_begins) == 1 else [segment.begin for segment in group]
    )
    causal_LL = torch.ones(bucket.longest, bucket.longest, dtype=torch.bool).tril()
    past_RLP = (torch.arange(longest_past) < begin_R[:, None])[:, None].expand(
        -1, bucket.longest, -1
    )
    mask = torch.cat([past_RLP, causal_LL.expand(len(begin_R), -1, -1)], dim=-1)
    return BranchCall(bucket, upload(keys, device), upload(mask[:, None], device), begin_R)
