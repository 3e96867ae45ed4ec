"""Attention over packed sequences for the learner: exact per sequence, nothing leaks between neighbours.

Sequences of similar length are gathered into one causal call, right-padded inside the call only (a causal query never sees
the padding behind it). Equal lengths, the common case, are a plain view. Everything outside attention stays padding-free.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

WASTE = 1.25  # a bucket may compute at most this many times its real tokens; a call more costs about as much on a CPU


@dataclass(frozen=True)
class Bucket:
    """Rows of one attention call: gather [B, longest] token indices (padding repeats a real token), and the real cells."""

    rows: int
    longest: int
    gather: Tensor  # int64 [B * longest]
    cells: Tensor | None  # int64, flat index of each real cell; None when there is no padding
    identity: bool  # the gather is the whole batch in order: skip it


class PackedAttention:
    """`attend` of `Decoder.forward` for sequences laid end to end.

    lengths: tokens of each sequence; they sum to T.
    """

    def __init__(self, lengths: Sequence[int], device: torch.device | str = "cpu") -> None:
        self.total = sum(lengths)
        self.buckets = [_bucket(rows, lengths, device) for rows in _group_by_length(lengths)]
        order = torch.cat([b.gather if b.cells is None else b.gather[b.cells] for b in self.buckets])
        self.identity = len(self.buckets) == 1 and self.buckets[0].identity
        self.inverse = torch.empty_like(order)
        self.inverse[order] = torch.arange(self.total, device=order.device)

    def __call__(self, layer: int, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor) -> Tensor:
        parts = [self._attend(bucket, q_THD, k_TKD, v_TKD) for bucket in self.buckets]
        if self.identity:
            return parts[0]
        return torch.cat(parts)[self.inverse]

    def _attend(self, bucket: Bucket, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        def rows(x: Tensor) -> Tensor:  # [T, heads, D] -> [B, heads, longest, D]
            picked = x if bucket.identity else x[bucket.gather]
            return picked.view(bucket.rows, bucket.longest, *x.shape[1:]).transpose(1, 2)

        out = F.scaled_dot_product_attention(rows(q), rows(k), rows(v), is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
        flat = out.transpose(1, 2).reshape(-1, q.shape[1], q.shape[2])
        return flat if bucket.cells is None else flat[bucket.cells]


def _group_by_length(lengths: Sequence[int]) -> list[list[int]]:
    """Rows by bucket: ascending lengths, a bucket closed where its padding would pass WASTE."""
    buckets: list[list[int]] = []
    real = 0
    for row in sorted(range(len(lengths)), key=lambda r: lengths[r]):
        if buckets and (len(buckets[-1]) + 1) * lengths[row] <= WASTE * (real + lengths[row]):
            buckets[-1].append(row)
            real += lengths[row]
        else:
            buckets.append([row])
            real = lengths[row]
    return buckets


def _bucket(rows: list[int], lengths: Sequence[int], device: torch.device | str) -> Bucket:
    all_lengths = torch.tensor(list(lengths))
    starts = all_lengths.cumsum(0) - all_lengths
    picked = torch.tensor(rows)
    own = all_lengths[picked]
    longest = int(own.max())
    offsets = torch.arange(longest)
    gather = starts[picked, None] + torch.minimum(offsets, own[:, None] - 1)
    real = offsets < own[:, None]
    even = bool(real.all())
    identity = even and rows == list(range(len(lengths)))
    cells = None if even else real.flatten().nonzero()[:, 0].to(device)
    return Bucket(len(rows), longest, gather.flatten().to(device), cells, identity)
