"""The decoder's operations in float32 on a CPU, each one call: single passes over memory, and
products by the quicker library.

PyTorch's own take several passes, and the interpreter some ten microseconds for each, which is what
a decoding step of a small model consists of. Who calls these has asked `fits`; the same in
PyTorch's operations, for every other dtype and device, stands beside each call
(`ratchet.models.ops`; `attention`, `scheduler` of `ratchet.generators.engine`). Gradients are
written out, of first order.

T = tokens, N = requests, H = query heads, K = key/value heads, L = capacity of a slot in tokens, C
= D / 2, D = head_dim, d = inputs, o = outputs, F = size of the gated layer.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.profiler import record_function

from ratchet.kernels.build import library, processor

PARTS, WIDEST_HEAD = 8, 512  # as in kernels.c and rows.h
# elements of a matrix from which oneDNN's products are quicker than MKL's, where MKL isn't at home
WIDE = 2**17

P, N, X = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
SIGNATURES = {
    "norm": (P, P, P, P, N, N, X),
    "norm_backward": (P, P, P, P, P, P, P, N, N),
    "heads": (P, P, P, P, P, P, P, P, N, N, N, N, X),
    "heads_backward": (P, N, P, N, P, N, P, P, P, P, P, P, P, P, P, N, N, N, N),
    "gated": (P, P, N, N),
    "gated_backward": (P, P, P, N, N),
    "decode": (P, P, P, N, P, N, P, N, P, P, N, N, N, N, N, X),
    "step": (P, N, P, P, P, P, P, P, P, ctypes.c_int, N, N, N, N, N, N, N, X),
    "step_scratch": (N, N, N, N, N),
}
PLAIN = (Tensor, nn.Parameter)

_library: Any = None
_onednn = False


def use(wanted: bool) -> None:
    """From now on this process computes with these, or without. Raises OSError where they can't be
    compiled."""
    global _library, _onednn
    found: Any = library() if wanted else None
    if found is not None:
        for name, types in SIGNATURES.items():
            function = getattr(found, name)
            function.argtypes, function.restype = types, N if name == "step_scratch" else None
    # MKL keeps its best kernels for Intel's processors. By vendor, not by a probe: a run must come
    # to the same bits again.
    _onednn = wanted and torch.backends.mkldnn.is_available() and b"AuthenticAMD" in processor()
    _library = found


def used() -> bool:
    return _library is not None


def fits(*tensors: Tensor) -> bool:
    """Whether these functions are for such tensors, here and now."""
    if _library is None or torch.is_autocast_enabled("cpu") or torch.compiler.is_compiling():
        return False
    for t in tensors:  # noqa: SIM110 -- a generator takes as long as a small operation
        if t.dtype is not torch.float32 or not t.is_cpu or type(t) not in PLAIN:
            return False
    return True


def laid(x: Tensor, *shape: int) -> bool:
    """Whether it is as the C takes for granted that it is: who is not would be read behind its
    end."""
    return x.shape == shape and x.is_contiguous()


# --- y = w x / sqrt(mean(x^2) + eps)


def rms_norm(x: Tensor, weight_d: Tensor, eps: float) -> Tensor:
    """Over the last dimension."""
    if torch.is_grad_enabled():
        return _RMSNorm.apply(x, weight_d, eps)
    return _normed(x.contiguous(), weight_d, eps, None)


def _normed(x: Tensor, weight_d: Tensor, eps: float, r_T: Tensor | None) -> Tensor:
    """r_T: is filled with the factors on x."""
    out, d = torch.empty_like(x), x.shape[-1]
    _library.norm(
        x.data_ptr(), weight_d.data_ptr(), out.data_ptr(), _address(r_T), x.numel() // d, d, eps
    )
    return out


class _RMSNorm(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_d: Tensor, eps: float) -> Tensor:
        x = x.contiguous()
        r_T = x.new_empty(x.numel() // x.shape[-1])
        ctx.save_for_backward(x, weight_d, r_T)
        return _normed(x, weight_d, eps, r_T)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight_d, r_T = ctx.saved_tensors
        grad_x, grad_weight, parts = (
            torch.empty_like(x),
            torch.empty_like(weight_d),
            x.new_empty(PARTS, len(weight_d)),
        )
        tensors = grads[0].contiguous(), x, weight_d, r_T, grad_x, grad_weight, parts
        _library.norm_backward(*map(_address, tensors), len(r_T), len(weight_d))
        return grad_x, grad_weight, None


# --- queries, keys and values out of their fused product

Heads = tuple[Tensor, Tensor, Tensor]
Norms = tuple[Tensor | None, Tensor | None]


def heads(
    qkv: Tensor, norms: Norms, cos_T1D: Tensor, sin_T1C: Tensor, sizes: tuple[int, int], eps: float
) -> Heads:
    """As `ops.heads`."""
    if torch.is_grad_enabled():
        return _Heads.apply(qkv, *norms, cos_T1D, sin_T1C, sizes, eps)
    qkv = qkv.contiguous()
    return *_turned(qkv, norms, cos_T1D, sin_T1C, sizes, eps, None), qkv[:, sum(sizes) :]


def _turned(
    qkv: Tensor,
    norms: Norms,
    cos: Tensor,
    sin: Tensor,
    sizes: tuple[int, int],
    eps: float,
    r: Tensor | None,
) -> tuple[Tensor, Tensor]:
    (n_tokens, _, size), (n_heads, n_kv_heads) = qkv.shape, sizes
    q, k = qkv.new_empty(n_tokens, n_heads, size), qkv.new_empty(n_tokens, n_kv_heads, size)
    _library.heads(
        *map(_address, (qkv, *norms, cos, sin, q, k, r)), n_tokens, n_heads, n_kv_heads, size, eps
    )
    return q, k


class _Heads(Function):
    @staticmethod
    def forward(
        ctx: Any,
        qkv: Tensor,
        q_norm: Tensor | None,
        k_norm: Tensor | None,
        cos: Tensor,
        sin: Tensor,
        sizes: Any,
        eps: float,
    ) -> Heads:
        qkv = qkv.contiguous()
        r = None if q_norm is None else qkv.new_empty(len(qkv), sum(sizes))
        q, k = _turned(qkv, (q_norm, k_norm), cos, sin, sizes, eps, r)
        ctx.save_for_backward(qkv if q_norm is not None else None, q_norm, k_norm, cos, sin, r)
        ctx.shape = qkv.shape
        return q, k, qkv[:, sum(sizes) :].contiguous()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        qkv, q_norm, k_norm, cos, sin, r = ctx.saved_tensors
        q, k, v = map(_rows, grads)
        grad, size = q.new_empty(ctx.shape), q.shape[2]
        grad_norms, parts = (
            (None, None) if q_norm is None else (q.new_empty(2, size), q.new_empty(PARTS, 2, size))
        )
        strided = (x for grad_out in (q, k, v) for x in (grad_out.data_ptr(), grad_out.stride(0)))
        rest = map(_address, (qkv, q_norm, k_norm, cos, sin, r, grad, grad_norms, parts))
        _library.heads_backward(*strided, *rest, len(q), q.shape[1], k.shape[1], size)
        return (
            grad,
            *((None, None) if grad_norms is None else grad_norms.unbind()),
            None,
            None,
            None,
            None,
        )


# --- silu(gate) * up


def swiglu(gate_up_TF: Tensor) -> Tensor:
    """[T, 2 F] -> [T, F]"""
    if torch.is_grad_enabled():
        return _SwiGLU.apply(gate_up_TF)
    return _gated(gate_up_TF.contiguous())


def _gated(gate_up: Tensor) -> Tensor:
    out = gate_up.new_empty(*gate_up.shape[:-1], gate_up.shape[-1] // 2)
    _library.gated(gate_up.data_ptr(), out.data_ptr(), out.numel() // out.shape[-1], out.shape[-1])
    return out


class _SwiGLU(Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        gate_up = gate_up.contiguous()
        ctx.save_for_backward(gate_up)
        return _gated(gate_up)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (gate_up,) = ctx.saved_tensors
        grad, out = grads[0].contiguous(), torch.empty_like(gate_up)
        _library.gated_backward(
            *map(_address, (grad, gate_up, out)), grad.numel() // grad.shape[-1], grad.shape[-1]
        )
        return out


# --- attention of a decoding step


def decode(
    keys: Tensor, values: Tensor, q_NHD: Tensor, k_NKD: Tensor, v_NKD: Tensor, positions_N: Tensor
) -> Tensor:
    """Stores a key and a value of each of the first N slots at its position (int64), and lets its
    queries attend to all up to there: [N, H, D], of any row the same bits whatever the others are.
    keys, values: [N or more, K, L, D]. Without gradient."""
    q, k, v = map(_rows, (q_NHD, k_NKD, v_NKD))
    out, capacity, size = q.new_empty(q.shape), keys.shape[2], q.shape[2]
    strided = (x for each in (q, k, v) for x in (each.data_ptr(), each.stride(0)))
    sizes = len(q), q.shape[1], k.shape[1], capacity, size, size**-0.5
    _library.decode(
        keys.data_ptr(), values.data_ptr(), *strided, positions_N.data_ptr(), out.data_ptr(), *sizes
    )
    return out


# --- a decoding step as a whole

# and how many: what a profile is told of it, as it sees no call of C
STEP = "ratchet::step, FLOP of its products: "


def step(
    layers: Sequence[Sequence[Tensor | None]],
    x_Nd: Tensor,
    norm_d: Tensor,
    tables: tuple[Tensor, Tensor],
    places: tuple[Tensor, Tensor],
    sizes: Sequence[int],
    eps: float,
) -> None:
    """Takes embeddings x through all layers, in place, up to the normalised hidden states; a key
    and a value of each join the cache. A row's bits depend on no other's. Without gradient.

    layers: tensors as `Layer` of decoding.c has them, laid out row by row. tables: cosines [N, 1,
    D] and sines [N, 1, C]. places: positions and slots, int64 [N] both. sizes: d, H, K, L, D and F.
    """
    d, n_heads, n_kv_heads, _, size, gated = sizes
    count, (cos, sin), (positions_N, slots_N) = len(x_Nd), tables, places
    wanted = (x_Nd, d), (positions_N,), (slots_N,), (cos, 1, size), (sin, 1, size // 2)
    assert all(laid(tensor, count, *shape) for tensor, *shape in wanted)
    assert fits(x_Nd, norm_d, cos, sin)
    assert positions_N.dtype is slots_N.dtype is torch.int64
    threads = torch.get_num_threads()
    scratch = x_Nd.new_empty(threads, _library.step_scratch(d, n_heads, n_kv_heads, size, gated))
    addresses = [_address(tensor) for layer in layers for tensor in layer]
    tensors = map(_address, (x_Nd, norm_d, cos, sin, positions_N, slots_N, scratch))
    flop = 2 * count * len(layers) * d * (2 * (n_heads + n_kv_heads) * size + 3 * gated)
    with record_function(f"{STEP}{flop}") if torch.autograd._profiler_enabled() else nullcontext():
        _library.step(
            (P * len(addresses))(*addresses), len(layers), *tensors, threads, count, *sizes, eps
        )


# --- products


def prefers_onednn(x_Td: Tensor, weight_od: Tensor) -> bool:
    """For matrices of this size, whatever the number of rows: their bits must not depend on it."""
    return _onednn and weight_od.numel() >= WIDE and x_Td.dim() == 2 and fits(x_Td, weight_od)


def product(x_Td: Tensor, weight_od: Tensor) -> Tensor:
    """x W^T by oneDNN: [T, o]."""
    return (
        _Product.apply(x_Td, weight_od)
        if torch.is_grad_enabled()
        else _onednn_product(x_Td, weight_od)
    )


def _onednn_product(x: Tensor, weight: Tensor) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "")


class _Product(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return _onednn_product(x, weight)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """For the weights MKL is as quick."""
        x, weight = ctx.saved_tensors
        for_x, for_weight = ctx.needs_input_grad
        return _onednn_product(grads[0], weight.t()) if for_x else None, grads[
            0
        ].t() @ x if for_weight else None


def _address(x: Tensor | None) -> int | None:
    return None if x is None else x.data_ptr()


def _rows(x: Tensor) -> Tensor:
    """[T, heads, D] with each token's own in one piece."""
    return x if x.stride(2) == 1 and x.stride(1) == x.shape[2] else x.contiguous()
