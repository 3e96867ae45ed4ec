"""Attention of packed segments in float32 on a CPU, as one call forward and one backward.

PyTorch's attention takes rows of equal length. Segments of unlike lengths need many of its calls,
and copies that pad them. `ratchet.models.layers.attention` checks `supports_attention` first.

T = tokens, H = query heads, K = key/value heads, D = head_dim, S = segments.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.autograd import Function

from ratchet.kernels import cpu

Index = NDArray[np.int64]
TILE_COLUMNS = 16  # must equal TILE_COLUMNS in attention.c
# Number of keys up to which the kernel is faster. PyTorch's attention takes keys in blocks that fit
# the cache: of 1,024 keys with head_dim 64 it took 0.8 times as long.
MAX_KEYS = 512


class SegmentPlan:
    """The segments of packed tokens, and the tokens that each of them attends to.

    Args:
        starts_S: First token of each segment.
        lengths_S: Number of tokens of each segment.
        keys_S: Indices of the tokens before each segment, then of its own. None: segments attend
            only to themselves, and lie end to end.
    """

    def __init__(
        self, starts_S: Index, lengths_S: Index, keys_S: Sequence[Index] | None = None
    ) -> None:
        n_keys_S = lengths_S
        keys = np.arange(lengths_S.sum())
        trees = np.arange(len(lengths_S) + 1)
        if keys_S is not None:
            # Threads take whole trees, because the segments of a tree add to the same gradients.
            roots_S = np.array([keys_of_segment[0] for keys_of_segment in keys_S], dtype=np.int64)
            order_S = np.argsort(roots_S, kind="stable")
            starts_S = starts_S[order_S]
            lengths_S = lengths_S[order_S]
            keys = np.concatenate([keys_S[segment] for segment in order_S])
            n_keys_S = np.array([len(keys_S[segment]) for segment in order_S], dtype=np.int64)
            is_first_S = np.diff(roots_S[order_S], prepend=-1) != 0
            trees = np.append(is_first_S.nonzero()[0], len(order_S))
        self.n_tokens = int(lengths_S.sum())
        self.max_keys = int(n_keys_S.max(initial=0))
        self.n_trees = len(trees) - 1
        # The addresses are of these arrays, which the plan keeps alive.
        self.arrays = (
            trees,
            np.stack([starts_S, lengths_S], axis=1),
            np.concatenate([[0], np.cumsum(n_keys_S)]),
            keys,
        )
        assert all(x.dtype == np.int64 and x.flags.c_contiguous for x in self.arrays)
        addresses = [x.ctypes.data for x in self.arrays]
        # As the C functions take them.
        self.arguments = (addresses[0], self.n_trees, *addresses[1:])


def supports_attention(q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, longest: int) -> bool:
    """True if the kernels are on, support these tensors and are fast.

    longest: number of keys that the last token of the longest sequence attends to.
    """
    size = q_THD.shape[2]
    return (
        longest <= MAX_KEYS
        and cpu.is_supported(q_THD, k_TKD, v_TKD)
        and size % TILE_COLUMNS == 0
        and size <= cpu.MAX_HEAD_DIM
        and k_TKD.shape == v_TKD.shape
        and k_TKD.shape[2] == size
    )


def attend_segments(plan: SegmentPlan, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor) -> Tensor:
    """Return the attention of all segments, [T, H, D], in the order of the tokens."""
    assert len(q_THD) == len(k_TKD) == len(v_TKD) == plan.n_tokens
    if torch.is_grad_enabled():
        return _Attention.apply(q_THD, k_TKD, v_TKD, plan)
    return _attend(plan, q_THD, k_TKD, v_TKD, None)


def _attend(plan: SegmentPlan, q: Tensor, k: Tensor, v: Tensor, log_sums: Tensor | None) -> Tensor:
    q, k, v = (cpu.make_rows_contiguous(x) for x in (q, k, v))
    out = q.new_empty(q.shape)
    _call(cpu.get_library().attention, plan, (q, k, v), (out, log_sums))
    return out


def _call(
    function: Callable[..., None],
    plan: SegmentPlan,
    qkv: tuple[Tensor, Tensor, Tensor],
    others: tuple[Tensor | None, ...],
    *first: int,
) -> None:
    """Call one of the C functions, with memory for each thread."""
    q, k, _ = qkv
    n_heads, size = q.shape[1:]
    n_kv_heads = k.shape[1]
    threads = max(1, min(torch.get_num_threads(), plan.n_trees * n_kv_heads))
    scratch = q.new_empty(threads, cpu.get_library().attention_scratch(plan.max_keys, size))
    function(
        *first,
        *cpu.list_addresses_and_strides(*qkv),
        *plan.arguments,
        *map(cpu.get_address, others),
        scratch.data_ptr(),
        threads,
        plan.max_keys,
        n_heads,
        n_kv_heads,
        size,
        size**-0.5,
    )


class _Attention(Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, plan: SegmentPlan) -> Tensor:
        log_sums = q.new_empty(q.shape[:2])
        out = _attend(plan, q, k, v, log_sums)
        ctx.plan = plan
        ctx.save_for_backward(q, k, v, out, log_sums)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        q, k, v, out, log_sums = ctx.saved_tensors
        q, k, v = (cpu.make_rows_contiguous(x) for x in (q, k, v))
        grad = grads[0].contiguous()
        grad_q = torch.empty_like(q, memory_format=torch.contiguous_format)
        grad_k = k.new_zeros(k.shape)
        grad_v = v.new_zeros(v.shape)
        _call(
            cpu.get_library().attention_backward,
            ctx.plan,
            (q, k, v),
            (out, log_sums, grad_q, grad_k, grad_v),
            grad.data_ptr(),
        )
        return grad_q, grad_k, grad_v, None
