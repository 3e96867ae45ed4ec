"""Divide a layer's experts over the ranks of an expert-parallel group.

Each rank runs its own experts on the rows that all ranks send to them.

N = rows of this rank, sorted by expert, M = rows that this rank receives, E = experts of the layer,
L = experts of a rank, R = ranks, d = hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function

from ratchet.models.layers.moe import ComputeExperts
from ratchet.models.parallel.collectives import Group


class ExpertExchange:
    """The `exchange` of a `SparseMLP` whose experts are divided over ranks.

    It runs two all-to-alls per layer (arXiv:2006.16668, section 3.2), and drops no row.
    """

    def __init__(self, group: Group) -> None:
        self.group = group

    def __call__(self, compute: ComputeExperts, x_Nd: Tensor, counts_E: Tensor) -> Tensor:
        ranks = self.group.size()
        received_E = torch.empty_like(counts_E)
        dist.all_to_all_single(received_E, counts_E, group=self.group)
        sent_R = counts_E.view(ranks, -1).sum(1).tolist()
        received_RL = received_E.view(ranks, -1)
        received_R = received_RL.sum(1).tolist()
        x_Md = _AllToAll.apply(x_Nd, sent_R, received_R, self.group)
        order_M = _sort_by_expert(received_RL)
        y_Md = compute(x_Md.index_select(0, order_M), received_RL.sum(0))
        # The inverse of order_M: outputs return in the order in which their rows arrived.
        inverse_M = torch.empty_like(order_M).index_copy_(
            0, order_M, torch.arange(len(order_M), device=order_M.device)
        )
        return _AllToAll.apply(y_Md.index_select(0, inverse_M), received_R, sent_R, self.group)


def _sort_by_expert(received_RL: Tensor) -> Tensor:
    """Return the indices that sort received rows by expert, then by rank (int64 [M]).

    The rows arrive sorted by rank, then by expert.
    """
    experts_RL = torch.arange(received_RL.shape[1], device=received_RL.device).expand_as(
        received_RL
    )
    return experts_RL.flatten().repeat_interleave(received_RL.flatten()).argsort(stable=True)


class _AllToAll(Function):
    """An all-to-all with a gradient. `sent` and `received` are numbers of rows per rank."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, sent: Sequence[int], received: Sequence[int], group: Group
    ) -> Tensor:
        ctx.sent = sent
        ctx.received = received
        ctx.group = group
        return _exchange_rows(x, sent, received, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        return _exchange_rows(grads[0], ctx.received, ctx.sent, ctx.group), None, None, None


def _exchange_rows(x: Tensor, sent: Sequence[int], received: Sequence[int], group: Group) -> Tensor:
    out = x.new_empty(sum(received), *x.shape[1:])
    dist.all_to_all_single(out, x.contiguous(), list(received), list(sent), group=group)
    return out
