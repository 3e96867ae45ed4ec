"""The elementwise and linear operations of the decoder.

`ratchet.kernels.cpu` runs them if it is enabled and supports the inputs; otherwise PyTorch does.

The elementwise operations have a hand-written backward, because autograd's version of the same
formulas reads and writes memory two to three times as often. This saves a third of an optimizer
step for models of 0.1 to 10 M parameters on a CPU, which spend about as much time in these
operations as in matrix products.

T = tokens, H = query heads, K = key/value heads (in a shape without K, H is any number of heads),
D = head_dim, C = D / 2, F = size of the gated layer, d = inputs, o = outputs.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from ratchet.kernels import bfloat16, cpu
from ratchet.models.weight_casts import cast_weight


def linear(
    x: Tensor,
    weight_od: Tensor,
    bias_o: Tensor | None = None,
    rounded: bfloat16.RoundedWeight | None = None,
    *,
    before_swiglu: bool = False,
) -> Tensor:
    """Return `x W^T + bias` over the last dimension.

    Args:
        rounded: Keeps the weight in bfloat16 between calls, if this process computes products so.
        before_swiglu: True if only `swiglu` reads the result, which then may be in bfloat16.
    """
    if bfloat16.is_supported(x, weight_od):
        rounded = rounded or bfloat16.RoundedWeight()
        stays_rounded = before_swiglu and bias_o is None and cpu.is_enabled()
        dtype = torch.bfloat16 if stays_rounded else torch.float32
        out = bfloat16.product(x, weight_od, rounded.get(weight_od), dtype)
    elif cpu.prefers_onednn(x, weight_od):
        out = cpu.product(x, weight_od)
    else:
        return F.linear(x, cast_weight(weight_od), bias_o)
    return out if bias_o is None else out + bias_o


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return `weight * x / sqrt(mean(x^2) + eps)` over the last dimension.

    This is RMSNorm (arXiv:1910.07467) eq. 4. The result has the dtype of x. The mean is computed in
    float32 or better.

    Args:
        weight: Has the shape of the last dimension of x, or of its last two (a weight per head).
    """
    if cpu.is_supported(x, weight) and cpu.has_layout(weight, x.shape[-1]):
        return cpu.rms_norm(x, weight, eps)
    # PyTorch has one CUDA kernel for this, forward and backward.
    if x.is_cuda:
        if weight.dim() == 1:
            return F.rms_norm(x, weight.shape, weight.to(x.dtype), eps)
        return F.rms_norm(x, x.shape[-1:], None, eps) * weight.to(x.dtype)
    # The same result as `_RMSNorm`, without autograd's overhead, which is large in small decoding
    # steps.
    if not torch.is_grad_enabled():
        return _normalise(x, eps)[0].mul_(weight.to(x.dtype))
    return _RMSNorm.apply(x, weight, eps)


def split_heads(
    qkv: Tensor,
    norms: cpu.Norms,
    cos_T1D: Tensor,
    sin_T1C: Tensor,
    sizes: tuple[int, int],
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Split the fused projection [T, H + 2 K, D] into queries, keys and values.

    Queries and keys are normalised if `norms` has weights, and rotated by their positions.

    Args:
        norms: Norm weights [D] for queries and for keys; None for no norms.
        sizes: (H, K).

    Returns queries [T, H, D], keys [T, K, D] and values [T, K, D].
    """
    q_weight, k_weight = norms
    if _kernel_supports_heads(qkv, norms, cos_T1D, sin_T1C):
        return cpu.split_heads(qkv, norms, cos_T1D, sin_T1C, sizes, eps)
    # Autocast would store the normalised heads in float32. The kernels compute in float32 anyhow,
    # and attention rounds to bfloat16.
    with torch.autocast(qkv.device.type, enabled=False):
        qk, v_TKD = qkv.split([sum(sizes), sizes[1]], dim=1)
        # Queries and keys are normalised together: small models are bound by the number of
        # operations.
        if q_weight is not None and k_weight is not None:
            weights = q_weight.expand(sizes[0], -1), k_weight.expand(sizes[1], -1)
            qk = rms_norm(qk, torch.cat(weights), eps)
        q_THD, k_TKD = rotate(qk, cos_T1D, sin_T1C).split(sizes, dim=1)
    return q_THD, k_TKD, v_TKD


def _kernel_supports_heads(qkv: Tensor, norms: cpu.Norms, cos: Tensor, sin: Tensor) -> bool:
    """True if the compiled kernel supports these inputs."""
    rows, _, size = qkv.shape
    q, k = norms
    if size > cpu.MAX_HEAD_DIM or not cpu.is_supported(qkv, cos, sin):
        return False
    if (
        q is not None
        and k is not None
        and not (cpu.is_supported(q, k) and cpu.has_layout(q, size) and cpu.has_layout(k, size))
    ):
        return False
    return cpu.has_layout(cos, rows, 1, size) and cpu.has_layout(sin, rows, 1, size // 2)


def rotate(x_THD: Tensor, cos_T1D: Tensor, sin_T1C: Tensor) -> Tensor:
    """Apply rotary position embedding (arXiv:2104.09864, eq. 34) to the pairs (i, i + D/2).

    This is the layout of Hugging Face weights. Both entries of a pair have the same angle. `cos`
    has every value twice, but `sin` has only C = D/2 columns. `cos` and `sin` get no gradient.
    """
    if not torch.is_grad_enabled():
        return _rotate(x_THD, cos_T1D, sin_T1C, 1)
    return _Rotate.apply(x_THD, cos_T1D, sin_T1C)


def swiglu(gate_up_T2F: Tensor) -> Tensor:
    """Return `silu(gate) * up`, [T, F] (arXiv:2002.05202, eq. 6), in the dtype of the input.

    gate_up_T2F: the first F columns are the gate, the last F are `up`.
    """
    is_rounded = (
        gate_up_T2F.dtype is torch.bfloat16
        and gate_up_T2F.is_cpu
        and bfloat16.is_enabled()
        and cpu.is_enabled()
    )
    if (is_rounded or cpu.is_supported(gate_up_T2F)) and not gate_up_T2F.shape[-1] % 2:
        return cpu.swiglu(gate_up_T2F)
    if not torch.is_grad_enabled():
        return _swiglu(gate_up_T2F)
    return _SwiGLU.apply(gate_up_T2F)


def select_rows(x: Tensor, index: Tensor) -> Tensor:
    """Return `x[index]` for distinct int64 indices [n].

    Because they are distinct, the backward pass copies gradients instead of summing them.
    """
    return _SelectRows.apply(x, index) if torch.is_grad_enabled() else x.index_select(0, index)


class _SelectRows(Function):
    """`select_rows` with a backward that copies."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor) -> Tensor:
        ctx.index, ctx.rows = index, len(x)
        return x.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        grad = grads[0].new_zeros(ctx.rows, *grads[0].shape[1:])
        return grad.index_copy_(0, ctx.index, grads[0]), None


class _RMSNorm(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        n, r = _normalise(x, eps)
        ctx.save_for_backward(n, r, weight)
        return n * weight.to(n.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        """Return the gradients of x and weight.

        Let g be the gradient of y = w n, with n = x r and r = (mean(x^2) + eps)^-1/2. Then
        dw = sum(g n) and dx = r (g w - n mean(g w n)).
        """
        n, r, weight = ctx.saved_tensors
        grad = grads[0].to(r.dtype)
        n = n.to(r.dtype)
        w = weight.to(r.dtype)
        size = weight.shape[-1]
        g_n = grad * n
        grad_weight = g_n.reshape(-1, *weight.shape).sum(0)
        sum_gwn = (g_n @ w) if w.dim() == 1 else (g_n * w).sum(-1)
        mean_gwn = sum_gwn.unsqueeze(-1).div_(size)
        grad_x = (grad * w).addcmul_(n, mean_gwn, value=-1).mul_(r)
        return grad_x.to(grads[0].dtype), grad_weight.to(weight.dtype), None


def _normalise(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return (x * r in the dtype of x, r in float32 or better) with r = (mean(x^2) + eps)^-1/2."""
    precise_x = x.to(torch.promote_types(x.dtype, torch.float32))
    size = x.shape[-1]
    # r = sqrt(size) / hypot(|x|, sqrt(size eps)) takes few operations. vector_norm sums squares
    # without storing them.
    r = torch.linalg.vector_norm(precise_x, dim=-1, keepdim=True)
    torch.div(_square_root(size, r.dtype), r.hypot_(_square_root(size * eps, r.dtype)), out=r)
    return (precise_x * r).to(x.dtype), r


@cache
def _square_root(square: float, dtype: torch.dtype) -> Tensor:
    """Return the square root of `square` as a cached tensor.

    PyTorch converts a Python number in every operation, which takes as long as a small operation.
    """
    with torch.inference_mode(False):
        return torch.tensor(square, dtype=dtype, device="cpu").sqrt_()


class _Rotate(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotate(x, cos, sin, 1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        # The transpose of a rotation is the rotation in the other direction.
        return _rotate(grads[0], cos, sin, -1), None, None


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, direction: int) -> Tensor:
    """Return x rotated by its positions. direction: 1, or -1 to rotate back."""
    # In the wider of the two dtypes, so that the result is rounded once.
    out = torch.mul(x, cos)
    first, second = x.chunk(2, dim=-1)
    out_first, out_second = out.chunk(2, dim=-1)
    out_first.addcmul_(second, sin, value=-direction)
    out_second.addcmul_(first, sin, value=direction)
    return out.to(x.dtype)


class _SwiGLU(Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up)
        return _swiglu(gate_up)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (gate_up,) = ctx.saved_tensors
        gate, up = gate_up.chunk(2, dim=-1)
        grad_gate_up = torch.empty_like(gate_up)
        grad_gate, grad_up = grad_gate_up.chunk(2, dim=-1)
        # Recompute silu(gate), which would take memory if the forward pass kept it.
        torch.mul(grads[0], F.silu(gate), out=grad_up)
        torch.ops.aten.silu_backward.grad_input(grads[0] * up, gate, grad_input=grad_gate)
        return grad_gate_up


def _swiglu(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)
