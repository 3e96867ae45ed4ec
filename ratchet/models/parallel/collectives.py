"""Collectives of torch.distributed (all-reduce, all-gather, ...) with gradients.

Functions named `..._columns` split and concatenate along the last dimension, all others along the
first.

Every rank of a tensor- or context-parallel group computes the same loss. If all ranks compute the
same values from a shared tensor, each rank has the tensor's complete gradient. Otherwise each rank
has one summand of that gradient. There is a collective for each of these cases, because their
backward passes differ.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function

Group = dist.ProcessGroup


def _get_collective(name: str, name_before_2_13: str) -> Any:
    """Return a collective operation by the name that it has in the installed torch."""
    return getattr(dist, name, None) or getattr(dist, name_before_2_13)


_all_gather = _get_collective("all_gather_single", "all_gather_into_tensor")
_reduce_scatter = _get_collective("reduce_scatter_single", "reduce_scatter_tensor")


def sum_forward(x: Tensor, group: Group) -> Tensor:
    """Return the sum of all ranks' x on every rank (all-reduce).

    The backward returns each rank's gradient unchanged.
    """
    return _SumForward.apply(x, group)


def sum_backward(x: Tensor, group: Group) -> Tensor:
    """Return x, which is equal on all ranks. The backward sums the ranks' gradients."""
    return _SumBackward.apply(x, group)


def gather(x: Tensor, group: Group, *, same_use_on_all_ranks: bool = False) -> Tensor:
    """Return the ranks' parts, concatenated (all-gather). The parts have the same size.

    Args:
        same_use_on_all_ranks: True if all ranks compute the same values from the result. Each rank
            then takes its own part of the gradient. Otherwise the ranks' gradients are summed
            first.
    """
    return _Gather.apply(x, group, same_use_on_all_ranks)


def scatter_sum(x: Tensor, group: Group) -> Tensor:
    """Return this rank's part of the sum of all ranks' x (reduce-scatter).

    The number of ranks must divide len(x).
    """
    return _ScatterSum.apply(x, group)


def gather_uneven(x: Tensor, sizes: Sequence[int], group: Group) -> Tensor:
    """Return the ranks' parts of lengths `sizes`, concatenated. The backward sums gradients."""
    longest = max(sizes)
    padded = torch.cat([x, x.new_zeros(longest - len(x), *x.shape[1:])]) if len(x) < longest else x
    parts = gather(padded, group).split(longest)
    return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])


def gather_columns(x: Tensor, group: Group) -> Tensor:
    """Return the ranks' parts of equal size, concatenated in the last dimension.

    All ranks must compute the same values from the result.
    """
    return gather(x.movedim(-1, 0), group, same_use_on_all_ranks=True).movedim(0, -1)


def take_own_columns(x: Tensor, group: Group) -> Tensor:
    """Return this rank's part of x in the last dimension: the inverse of `gather_columns`.

    x must be equal on all ranks.
    """
    return _TakeOwnRows.apply(x.movedim(-1, 0), group).movedim(0, -1)


def all_reduce_sum(x: Tensor, group: Group) -> Tensor:
    """Return the sum over the ranks, without gradient, as a new tensor."""
    out = x.detach().clone(memory_format=torch.contiguous_format)
    dist.all_reduce(out, group=group)
    return out


def all_reduce_max(x: Tensor, group: Group) -> Tensor:
    """Return the elementwise maximum over the ranks, without gradient, as a new tensor."""
    out = x.detach().clone(memory_format=torch.contiguous_format)
    dist.all_reduce(out, op=dist.ReduceOp.MAX, group=group)
    return out


def _all_gather_tensor(x: Tensor, group: Group) -> Tensor:
    x = x.contiguous()
    out = x.new_empty(len(x) * group.size(), *x.shape[1:])
    _all_gather(out, x, group=group)
    return out


def _reduce_scatter_tensor(x: Tensor, group: Group) -> Tensor:
    x = x.contiguous()
    out = x.new_empty(len(x) // group.size(), *x.shape[1:])
    _reduce_scatter(out, x, group=group)
    return out


class _SumForward(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        return all_reduce_sum(x, group)

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
        return all_reduce_sum(grads[0], ctx.group), None


class _Gather(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, same_use_on_all_ranks: bool) -> Tensor:
        ctx.group = group
        ctx.same_use_on_all_ranks = same_use_on_all_ranks
        ctx.size = len(x)
        return _all_gather_tensor(x, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        if ctx.same_use_on_all_ranks:
            return grads[0].narrow(0, ctx.group.rank() * ctx.size, ctx.size), None, None
        return _reduce_scatter_tensor(grads[0], ctx.group), None, None


class _TakeOwnRows(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return x.tensor_split(group.size())[group.rank()].contiguous()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _all_gather_tensor(grads[0], ctx.group), None


class _ScatterSum(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return _reduce_scatter_tensor(x, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _all_gather_tensor(grads[0], ctx.group), None
