"""Collectives of torch.distributed that gradients pass through, over the first dimension where
there is one to choose.

Losses are computed alike on every rank of a tensor- or context-parallel group. So the gradient of
what all ranks hold is the same on each, and the gradient of what was different on each is a
summand: which of the two a tensor is says which way back.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function

Group = dist.ProcessGroup

# torch 2.13 renamed them.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def sum_forward(x: Tensor, group: Group) -> Tensor:
    """The sum of all ranks' x, on every rank; its gradient goes back as it is."""
    return _SumForward.apply(x, group)


def sum_backward(x: Tensor, group: Group) -> Tensor:
    """x, which all ranks have alike; their gradients are summed."""
    return _SumBackward.apply(x, group)


def gather(x: Tensor, group: Group, *, alike: bool = False) -> Tensor:
    """The ranks' equally large parts, one behind the other. alike: what follows is the same on each
    rank, so that a rank's own part of the gradient is all of it; else the parts of all ranks'
    gradients are summed."""
    return _Gather.apply(x, group, alike)


def scatter_sum(x: Tensor, group: Group) -> Tensor:
    """A rank's own part of the sum of all ranks' x, whose length their number divides."""
    return _ScatterSum.apply(x, group)


def gather_uneven(x: Tensor, sizes: Sequence[int], group: Group) -> Tensor:
    """As `gather`, of parts of these lengths, with summed gradients."""
    most = max(sizes)
    padded = torch.cat([x, x.new_zeros(most - len(x), *x.shape[1:])]) if len(x) < most else x
    parts = gather(padded, group).split(most)
    return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])


def gather_columns(x: Tensor, group: Group) -> Tensor:
    """The ranks' equally large parts side by side in the last dimension; what follows is the same
    on each rank."""
    return gather(x.movedim(-1, 0), group, alike=True).movedim(0, -1)


def own_columns(x: Tensor, group: Group) -> Tensor:
    """A rank's part of x, which all ranks have alike, in the last dimension; `gather_columns` the
    other way round."""
    return _OwnRows.apply(x.movedim(-1, 0), group).movedim(0, -1)


def summed(x: Tensor, group: Group) -> Tensor:
    """Without gradient, in a tensor of its own."""
    out = x.detach().clone(memory_format=torch.contiguous_format)
    dist.all_reduce(out, group=group)
    return out


def largest(x: Tensor, group: Group) -> Tensor:
    """Elementwise over the ranks, without gradient."""
    out = x.detach().clone(memory_format=torch.contiguous_format)
    dist.all_reduce(out, op=dist.ReduceOp.MAX, group=group)
    return out


def _gathered(x: Tensor, group: Group) -> Tensor:
    x = x.contiguous()
    out = x.new_empty(len(x) * group.size(), *x.shape[1:])
    _all_gather(out, x, group=group)
    return out


def _scattered(x: Tensor, group: Group) -> Tensor:
    x = x.contiguous()
    out = x.new_empty(len(x) // group.size(), *x.shape[1:])
    _reduce_scatter(out, x, group=group)
    return out


class _SumForward(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        return summed(x, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


class _SumBackward(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return summed(grads[0], ctx.group), None


class _Gather(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, alike: bool) -> Tensor:
        ctx.group, ctx.alike, ctx.size = group, alike, len(x)
        return _gathered(x, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        if ctx.alike:
            return grads[0].narrow(0, ctx.group.rank() * ctx.size, ctx.size), None, None
        return _scattered(grads[0], ctx.group), None, None


class _OwnRows(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return x.tensor_split(group.size())[group.rank()].contiguous()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _gathered(grads[0], ctx.group), None


class _ScatterSum(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return _scattered(x, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _gathered(grads[0], ctx.group), None
