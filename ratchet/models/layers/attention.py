"""Attention over packed sequences for the learner: exact per sequence, nothing leaks between
neighbours.

Neighbours of similar length share one causal call, right-padded inside the call only (a causal
query never sees the padding behind it). Equal lengths, the common case, are a plain view.
Everything outside attention stays padding-free. Segments of a tree, whose past was computed
elsewhere, share masked calls in the same way.

T = tokens, H = query heads, K = key/value heads, D = head_dim, R = segments of a call, P = most
tokens of their pasts, L = most of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from ratchet.models.layers.prefix_tree import Index, PrefixTree, Segment

# a call may compute at most this many times its real cells (pairs of a query and a key) ...
WASTE = 1.25
FREE = 4096  # ... and so many more, as a call costs a CPU about as much
# where the keys and values of the tokens before a segment lie, in order
Past = Callable[[Segment], Index]


@dataclass(frozen=True)
class Padding:
    """gather: int64 [rows * longest], the token that fills each cell (padding repeats a real one,
    so that it stays finite); cells: int64 [tokens], where each token went."""

    gather: Tensor
    cells: Tensor


@dataclass(frozen=True)
class Bucket:
    """One attention call over consecutive sequences; `padding` is None where they are equally
    long."""

    rows: int
    longest: int
    tokens: int
    padding: Padding | None


class PackedAttention:
    """`attend` of `Decoder.forward` for sequences laid end to end.

    lengths: tokens of each sequence, each at least 1; they sum to T. Any order is exact; ascending
    ones make fewest calls.
    """

    def __init__(self, lengths: Sequence[int], device: torch.device | str = "cpu") -> None:
        self.buckets = [_bucket(run, device) for run in _runs(lengths)]

    def __call__(self, layer: int, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor) -> Tensor:
        if len(self.buckets) == 1:
            return _attend(self.buckets[0], q_THD, k_TKD, v_TKD)
        sizes = [bucket.tokens for bucket in self.buckets]
        parts = zip(
            self.buckets, q_THD.split(sizes), k_TKD.split(sizes), v_TKD.split(sizes), strict=True
        )
        return torch.cat([_attend(bucket, q, k, v) for bucket, q, k, v in parts])


def _attend(bucket: Bucket, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor) -> Tensor:
    grouped = q_THD.shape[1] != k_TKD.shape[1]
    q, k, v = (_cells(bucket, x) for x in (q_THD, k_TKD, v_TKD))
    return _tokens(
        bucket, F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
    )


def _cells(bucket: Bucket, x: Tensor) -> Tensor:
    """[tokens, heads, D] -> [rows, heads, longest, D]"""
    cells = x if bucket.padding is None else _Pad.apply(x, bucket.padding)
    return cells.view(bucket.rows, bucket.longest, *x.shape[1:]).transpose(1, 2)


def _tokens(bucket: Bucket, out: Tensor) -> Tensor:
    """The way back."""
    cells = out.transpose(1, 2).reshape(-1, out.shape[1], out.shape[3])
    return cells if bucket.padding is None else _Unpad.apply(cells, bucket.padding)


@dataclass(frozen=True)
class Branches:
    """One attention call over consecutive segments of a tree, each with a past.

    keys: int64 [R * (P + L)], the token that fills each cell of keys and values: the past, then the
    segment; padding repeats a real token. seen: bool [R or 1, 1, L, P + L], what each query attends
    to.
    """

    own: Bucket
    keys: Tensor
    seen: Tensor


class TreeAttention:
    """`attend` of `Decoder.forward` for the distinct tokens of a tree, in the order of its
    segments."""

    def __init__(self, tree: PrefixTree, device: torch.device | str = "cpu") -> None:
        roots = [segment for segment in tree.segments if not segment.begin]
        self.roots = sum(segment.length for segment in roots)
        self.whole = PackedAttention([segment.length for segment in roots], device)
        self.branches = branches(tree.segments[len(roots) :], tree.past, device)

    def __call__(self, layer: int, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor) -> Tensor:
        first, *queries = q_THD.split(
            [self.roots, *(branches.own.tokens for branches in self.branches)]
        )
        parts = [self.whole(layer, first, k_TKD[: self.roots], v_TKD[: self.roots])]
        for branches, q in zip(self.branches, queries, strict=True):
            parts.append(attend_past(branches, q, k_TKD, v_TKD))
        return torch.cat(parts)


def attend_past(branches: Branches, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor) -> Tensor:
    own = branches.own

    def past(x: Tensor) -> Tensor:  # [T, heads, D] -> [R, heads, P + L, D]
        return x.index_select(0, branches.keys).view(own.rows, -1, *x.shape[1:]).transpose(1, 2)

    grouped = q_THD.shape[1] != k_TKD.shape[1]
    q = _cells(own, q_THD)
    out = F.scaled_dot_product_attention(
        q, past(k_TKD), past(v_TKD), attn_mask=branches.seen, enable_gqa=grouped
    )
    return _tokens(own, out)


class _Pad(Function):
    """[tokens, ...] -> [rows * longest, ...]. Only real queries reach the loss, and they see no
    padding: the gradient of padding is exactly 0, so the backward merely picks the real cells."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, padding: Padding) -> Tensor:
        ctx.padding = padding
        return x.index_select(0, padding.gather)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0].index_select(0, ctx.padding.cells), None


class _Unpad(Function):
    """[rows * longest, ...] -> [tokens, ...]."""

    @staticmethod
    def forward(ctx: Any, cells: Tensor, padding: Padding) -> Tensor:
        ctx.padding = padding
        return cells.index_select(0, padding.cells)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        padding: Padding = ctx.padding
        grad = grads[0].new_zeros(len(padding.gather), *grads[0].shape[1:])
        return grad.index_copy_(0, padding.cells, grads[0]), None


def _runs(lengths: Sequence[int]) -> list[list[int]]:
    """Consecutive lengths that share a call."""
    segments = [Segment(row, 0, length) for row, length in enumerate(lengths)]
    return [[segment.length for segment in run] for run in _shared_calls(segments)]


def _bucket(lengths: list[int], device: torch.device | str) -> Bucket:
    longest, tokens = max(lengths), sum(lengths)
    if longest * len(lengths) == tokens:
        return Bucket(len(lengths), longest, tokens, padding=None)
    lengths_R = torch.tensor(lengths)
    starts_R = lengths_R.cumsum(0) - lengths_R
    offsets = torch.arange(longest)
    gather = starts_R[:, None] + torch.minimum(offsets, lengths_R[:, None] - 1)
    cells = (offsets < lengths_R[:, None]).flatten().nonzero()[:, 0]
    return Bucket(
        len(lengths), longest, tokens, Padding(gather.flatten().to(device), cells.to(device))
    )


def _shared_calls(segments: Sequence[Segment]) -> list[list[Segment]]:
    """Consecutive segments that share a call: a run ends where its padding would cost more than
    another call."""
    runs: list[list[Segment]] = []
    used = own = past = 0  # of the last run: cells, its longest segment, its longest past
    for segment in segments:
        cost = segment.length * segment.end
        longest, behind = max(own, segment.length), max(past, segment.begin)
        if (
            runs
            and (len(runs[-1]) + 1) * longest * (longest + behind) <= WASTE * (used + cost) + FREE
        ):
            runs[-1].append(segment)
            used, own, past = used + cost, longest, behind
        else:
            runs.append([segment])
            used, own, past = cost, segment.length, segment.begin
    return runs


def branches(segments: Sequence[Segment], past: Past, device: torch.device | str) -> list[Branches]:
    """The calls for segments laid end to end, best in ascending order of their begin and length."""
    return [_branches(run, past, device) for run in _shared_calls(segments)]


def _branches(run: list[Segment], past_of: Past, device: torch.device | str) -> Branches:
    own = _bucket([segment.length for segment in run], device)
    past = max(segment.begin for segment in run)
    past_RP = np.stack([np.resize(past_of(s), past) for s in run])
    starts_R = np.array([s.start for s in run])
    lengths_R = np.array([s.length for s in run])
    offsets_L = np.arange(own.longest)
    own_RL = starts_R[:, None] + np.minimum(offsets_L, lengths_R[:, None] - 1)
    keys = torch.from_numpy(np.concatenate([past_RP, own_RL], axis=1).reshape(-1))
    begins = sorted({s.begin for s in run})
    begin_R = torch.tensor(begins if len(begins) == 1 else [s.begin for s in run])
    causal_LL = torch.ones(own.longest, own.longest, dtype=torch.bool).tril()
    behind_RLP = (torch.arange(past) < begin_R[:, None])[:, None].expand(-1, own.longest, -1)
    seen = torch.cat([behind_RLP, causal_LL.expand(len(begin_R), -1, -1)], dim=-1)
    return Branches(own, keys.to(device), seen[:, None].to(device))
