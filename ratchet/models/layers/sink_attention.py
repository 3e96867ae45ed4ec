"""Attention whose heads have a sink, with a sliding window in some layers (GPT-OSS).

A head's sink is a learned number that joins the scores of each query in the softmax, and has no
value: a query whose scores are low attends to nothing ("attention sinks", arXiv:2309.17453, section
3.3). PyTorch's attention has none, so the sink becomes one more key with the value 0. Its score has
to be the sink of the query's head, which comes with the queries in dimensions of their own.

T = tokens, H = query heads, K = key/value heads, D = head_dim, R, L and P as in `attention`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ratchet.config.model_shape.megatron_decoder import SinkAttentionShape
from ratchet.models.accelerator import attend_grouped
from ratchet.models.layers.attention import (
    BranchCall,
    PackedAttention,
    Past,
    TreeAttention,
    plan_branch_calls,
    to_cells,
    to_tokens,
)
from ratchet.models.layers.prefix_tree import PrefixSegment

# How many dimensions are added to each head. One has the sink; kernels want a multiple of 8.
SINK_DIMS = 8


def add_sinks(
    q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, sinks_H: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries, keys and values with SINK_DIMS more dimensions, for `SinkAttention`.

    The queries are scaled, because attention divides scores by the root of the head's size.
    """
    size = q_THD.shape[-1]
    wide = size + SINK_DIMS
    sinks_H8 = F.pad(sinks_H[:, None].to(q_THD.dtype) * wide**0.5, (0, SINK_DIMS - 1))
    q = torch.cat([q_THD * (wide / size) ** 0.5, sinks_H8.expand(len(q_THD), -1, -1)], dim=-1)
    return q, F.pad(k_TKD, (0, SINK_DIMS)), F.pad(v_TKD, (0, SINK_DIMS))


class GatheringAttention(Protocol):
    """An attention of some tokens to those of all ranks (context parallelism)."""

    calls: list[BranchCall]

    def gather(self, k_tKD: Tensor, v_tKD: Tensor) -> tuple[Tensor, Tensor]:
        """Return the keys and values of all ranks, to which the calls' indices refer."""
        ...


class SinkAttention:
    """The `attend` argument of layers whose queries, keys and values are those of `add_sinks`."""

    def __init__(
        self,
        attend: PackedAttention | TreeAttention | GatheringAttention,
        shape: SinkAttentionShape,
        device: torch.device | str,
    ) -> None:
        """Plan the attention calls.

        Args:
            attend: The attention of the same tokens without sinks and windows.
        """
        self.windowed_layers = shape.windowed_layers
        self._gathering: GatheringAttention | None = None
        if isinstance(attend, TreeAttention):
            self.calls = plan_branch_calls(attend.tree.segments, attend.tree.past, device)
        elif isinstance(attend, PackedAttention):
            self.calls = plan_branch_calls(*_list_segments(attend.lengths), device)
        else:
            self._gathering, self.calls = attend, attend.calls
        self.masks = [_add_sink(call.mask) for call in self.calls]
        self.windowed_masks = (
            [_add_sink(call.limit_distance(shape.window)) for call in self.calls]
            if self.windowed_layers
            else []
        )

    def __call__(self, layer: int, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor) -> Tensor:
        if self._gathering is not None:
            k_TKD, v_TKD = self._gathering.gather(k_TKD, v_TKD)
        # A rank without tokens takes part in the collective of the backward pass too.
        if not self.calls:
            return q_THD + k_TKD.sum() * 0
        masks = self.windowed_masks if layer in self.windowed_layers else self.masks
        queries = q_THD.split([call.query_bucket.tokens for call in self.calls])
        parts = zip(self.calls, queries, masks, strict=True)
        return torch.cat([_attend(call, q, k_TKD, v_TKD, mask) for call, q, mask in parts])


def _attend(call: BranchCall, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, mask: Tensor) -> Tensor:
    """Return the attention of a call's segments. The key of the sink follows all others."""
    k, v = (F.pad(call.to_rows(x), (0, 0, 0, 1)) for x in (k_TKD, v_TKD))
    is_sink = torch.zeros(k.shape[-2:], dtype=k.dtype, device=k.device)
    is_sink[-1, -SINK_DIMS] = 1
    out = attend_grouped(to_cells(call.query_bucket, q_THD), k + is_sink, v, mask)
    return to_tokens(call.query_bucket, out)


def _add_sink(mask: Tensor) -> Tensor:
    """Return a mask with the key of the sink, which all queries attend to."""
    return F.pad(mask, (0, 1), value=True)


def _list_segments(lengths: Sequence[int]) -> tuple[list[PrefixSegment], Past]:
    """Return sequences as segments without a past, and the function that returns their past."""
    starts = np.cumsum([0, *lengths]).tolist()
    segments = [PrefixSegment(row, 0, n, starts[row]) for row, n in enumerate(lengths)]
    return segments, lambda segment: np.zeros(0, dtype=np.int64)
