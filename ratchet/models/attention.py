"""Attention over packed sequences for the learner: exact per sequence, nothing leaks between neighbours.

Neighbours of similar length share one causal call, right-padded inside the call only (a causal query never sees the padding
behind it). Equal lengths, the common case, are a plain view. Everything outside attention stays padding-free.

T = tokens, H = query heads, K = key/value heads, D = head_dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

WASTE = 1.25  # a call may compute at most this many times its real tokens; a call more costs about as much on a CPU


@dataclass(frozen=True)
class Padding:
    """gather: int64 [rows * longest], the token that fills each cell (padding repeats a real one, so that it stays finite);
    cells: int64 [tokens], where each token went."""

    gather: Tensor
    cells: Tensor


@dataclass(frozen=True)
class Bucket:
    """One attention call over consecutive sequences; `padding` is None where they are equally long."""

    rows: int
    longest: int
    tokens: int
    padding: Padding | None


class PackedAttention:
    """`attend` of `Decoder.forward` for sequences laid end to end.

    lengths: tokens of each sequence, each at least 1; they sum to T. Any order is exact; ascending ones make fewest calls.
    """

    def __init__(self, lengths: Sequence[int], device: torch.device | str = "cpu") -> None:
        self.buckets = [_bucket(run, device) for run in _runs(lengths)]

    def __call__(self, layer: int, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor) -> Tensor:
        if len(self.buckets) == 1:
            return _attend(self.buckets[0], q_THD, k_TKD, v_TKD)
        sizes = [bucket.tokens for bucket in self.buckets]
        parts = zip(self.buckets, q_THD.split(sizes), k_TKD.split(sizes), v_TKD.split(sizes), strict=True)
        return torch.cat([_attend(bucket, q, k, v) for bucket, q, k, v in parts])


def _attend(bucket: Bucket, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor) -> Tensor:
    def rows(x: Tensor) -> Tensor:  # [T, heads, D] -> [rows, heads, longest, D]
        cells = x if bucket.padding is None else _Pad.apply(x, bucket.padding)
        return cells.view(bucket.rows, bucket.longest, *x.shape[1:]).transpose(1, 2)

    grouped = q_THD.shape[1] != k_TKD.shape[1]
    out = F.scaled_dot_product_attention(rows(q_THD), rows(k_TKD), rows(v_TKD), is_causal=True, enable_gqa=grouped)
    cells = out.transpose(1, 2).reshape(-1, *q_THD.shape[1:])
    return cells if bucket.padding is None else _Unpad.apply(cells, bucket.padding)


class _Pad(Function):
    """[tokens, ...] -> [rows * longest, ...]. Only real queries reach the loss, and they see no padding: the gradient of
    padding is exactly 0, so the backward merely picks the real cells."""

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
    """Consecutive lengths that share a call: a run ends where its padding would pass WASTE."""
    runs: list[list[int]] = []
    for length in lengths:
        if runs and (len(runs[-1]) + 1) * max(*runs[-1], length) <= WASTE * (sum(runs[-1]) + length):
            runs[-1].append(length)
        else:
            runs.append([length])
    return runs


def _bucket(lengths: list[int], device: torch.device | str) -> Bucket:
    longest, tokens = max(lengths), sum(lengths)
    if longest * len(lengths) == tokens:
        return Bucket(len(lengths), longest, tokens, padding=None)
    lengths_R = torch.tensor(lengths)
    starts_R = lengths_R.cumsum(0) - lengths_R
    offsets = torch.arange(longest)
    gather = starts_R[:, None] + torch.minimum(offsets, lengths_R[:, None] - 1)
    cells = (offsets < lengths_R[:, None]).flatten().nonzero()[:, 0]
    return Bucket(len(lengths), longest, tokens, Padding(gather.flatten().to(device), cells.to(device)))
