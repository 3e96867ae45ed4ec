"""Expert parallelism: each rank of a group holds some of a layer's experts, and computes the rows
of all ranks that chose them.

N = rows of this rank, sorted by expert, M = rows that come to it, E = experts of the layer, L =
experts of a rank, R = ranks, d = hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function

from ratchet.models.layers.moe import Compute
from ratchet.models.parallel.collectives import Group


class ExpertExchange:
    """`exchange` of a `SparseMLP`: two all-to-alls a layer (arXiv:2006.16668, section 3.2), and no
    row is ever dropped."""

    def __init__(self, group: Group) -> None:
        self.group = group

    def __call__(self, compute: Compute, x_Nd: Tensor, counts_E: Tensor) -> Tensor:
        ranks = self.group.size()
        theirs_E = torch.empty_like(counts_E)
        dist.all_to_all_single(theirs_E, counts_E, group=self.group)
        sent_R, came_RL = counts_E.view(ranks, -1).sum(1).tolist(), theirs_E.view(ranks, -1)
        came_R = came_RL.sum(1).tolist()
        x_Md = _AllToAll.apply(x_Nd, sent_R, came_R, self.group)
        order_M = _by_expert(came_RL)
        y_Md = compute(x_Md.index_select(0, order_M), came_RL.sum(0))
        back_M = torch.empty_like(order_M).index_copy_(
            0, order_M, torch.arange(len(order_M), device=order_M.device)
        )
        return _AllToAll.apply(y_Md.index_select(0, back_M), came_R, sent_R, self.group)


def _by_expert(came_RL: Tensor) -> Tensor:
    """Rows that came sorted by rank, then by expert: their order by expert, then by rank. int64
    [M]."""
    experts_RL = torch.arange(came_RL.shape[1], device=came_RL.device).expand_as(came_RL)
    return experts_RL.flatten().repeat_interleave(came_RL.flatten()).argsort(stable=True)


class _AllToAll(Function):
    """Rows go to the ranks, so many to each, and as many come from them."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, sent: Sequence[int], came: Sequence[int], group: Group
    ) -> Tensor:
        ctx.sent, ctx.came, ctx.group = sent, came, group
        return _exchanged(x, sent, came, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        return _exchanged(grads[0], ctx.came, ctx.sent, ctx.group), None, None, None


def _exchanged(x: Tensor, sent: Sequence[int], came: Sequence[int], group: Group) -> Tensor:
    out = x.new_empty(sum(came), *x.shape[1:])
    dist.all_to_all_single(out, x.contiguous(), list(came), list(sent), group=group)
    return out
