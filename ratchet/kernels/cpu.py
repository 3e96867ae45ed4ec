"""The decoder's operations in float32 on a CPU, each as one call.

Each makes a single pass over memory, and matrix products use the faster of oneDNN and MKL.
PyTorch's own operations make several passes, and the interpreter takes some ten microseconds for
each, which is most of a decoding step of a small model. Callers check `is_supported` first. The
PyTorch code for every other dtype and device stands beside each call (`ratchet.models.ops`;
`attention`, `scheduler` of `ratchet.generators.engine`). Gradients are first-order only.

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

from ratchet.kernels.build import load_library, processor

# The same as PARTS in kernels.c and WIDEST in rows.h.
PARTS = 8
WIDEST_HEAD = 512
# Minimum size (elements) of a matrix for which oneDNN beats MKL on AMD's processors.
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


def set_enabled(enabled: bool) -> None:
    """Turn the kernels of this process on or off.

    Raises OSError if they can't be compiled.
    """
    global _library, _onednn
    compiled: Any = load_library() if enabled else None
    if compiled is not None:
        for name, types in SIGNATURES.items():
            function = getattr(compiled, name)
            function.argtypes = types
            function.restype = N if name == "step_scratch" else None
    # MKL's best kernels are for Intel's processors. The choice is by vendor, not by a measurement,
    # because a repeated run must have the same bits.
    _onednn = enabled and torch.backends.mkldnn.is_available() and b"AuthenticAMD" in processor()
    _library = compiled


def is_enabled() -> bool:
    """True if this process uses the kernels."""
    return _library is not None


def is_supported(*tensors: Tensor) -> bool:
    """True if the kernels are on and support these tensors."""
    if _library is None or torch.is_autocast_enabled("cpu") or torch.compiler.is_compiling():
        return False
    # A loop, because a generator expression takes as long as a small operation.
    for t in tensors:
        if t.dtype is not torch.float32 or not t.is_cpu or type(t) not in PLAIN:
            return False
    return True


def has_layout(x: Tensor, *shape: int) -> bool:
    """True if the tensor has the layout that the C code assumes.

    Otherwise the C code would read beyond its end.
    """
    return x.shape == shape and x.is_contiguous()


# --- y = w x / sqrt(mean(x^2) + eps)


def rms_norm(x: Tensor, weight_d: Tensor, eps: float) -> Tensor:
    """Return w x / sqrt(mean(x^2) + eps) over the last dimension."""
    if torch.is_grad_enabled():
        return _RMSNorm.apply(x, weight_d, eps)
    return _normalise(x.contiguous(), weight_d, eps, None)


def _normalise(x: Tensor, weight_d: Tensor, eps: float, r_T: Tensor | None) -> Tensor:
    """Return the normalised x.

    r_T: buffer for each row's factor 1 / sqrt(mean(x^2) + eps), or None.
    """
    out = torch.empty_like(x)
    d = x.shape[-1]
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
        return _normalise(x, weight_d, eps, r_T)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight_d, r_T = ctx.saved_tensors
        grad_x = torch.empty_like(x)
        grad_weight = torch.empty_like(weight_d)
        parts = x.new_empty(PARTS, len(weight_d))
        tensors = grads[0].contiguous(), x, weight_d, r_T, grad_x, grad_weight, parts
        _library.norm_backward(*map(_address, tensors), len(r_T), len(weight_d))
        return grad_x, grad_weight, None


# --- Queries, keys and values from their fused product.

Heads = tuple[Tensor, Tensor, Tensor]
Norms = tuple[Tensor | None, Tensor | None]


def heads(
    qkv: Tensor, norms: Norms, cos_T1D: Tensor, sin_T1C: Tensor, sizes: tuple[int, int], eps: float
) -> Heads:
    """Return queries, keys and values, like `ops.heads`."""
    if torch.is_grad_enabled():
        return _Heads.apply(qkv, *norms, cos_T1D, sin_T1C, sizes, eps)
    qkv = qkv.contiguous()
    return *_rotate(qkv, norms, cos_T1D, sin_T1C, sizes, eps, None), qkv[:, sum(sizes) :]


def _rotate(
    qkv: Tensor,
    norms: Norms,
    cos: Tensor,
    sin: Tensor,
    sizes: tuple[int, int],
    eps: float,
    r: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Return the queries and keys, normalised and with rotary positions.

    r: buffer for the norms' factors, as in `_normalise`, or None.
    """
    n_tokens, _, size = qkv.shape
    n_heads, n_kv_heads = sizes
    q = qkv.new_empty(n_tokens, n_heads, size)
    k = qkv.new_empty(n_tokens, n_kv_heads, size)
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
        q, k = _rotate(qkv, (q_norm, k_norm), cos, sin, sizes, eps, r)
        ctx.save_for_backward(qkv if q_norm is not None else None, q_norm, k_norm, cos, sin, r)
        ctx.shape = qkv.shape
        return q, k, qkv[:, sum(sizes) :].contiguous()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        qkv, q_norm, k_norm, cos, sin, r = ctx.saved_tensors
        q, k, v = map(_token_rows, grads)
        size = q.shape[2]
        grad = q.new_empty(ctx.shape)
        grad_norms = None if q_norm is None else q.new_empty(2, size)
        parts = None if q_norm is None else q.new_empty(PARTS, 2, size)
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
    """Return silu(gate) * up. [T, 2 F] -> [T, F]"""
    if torch.is_grad_enabled():
        return _SwiGLU.apply(gate_up_TF)
    return _swiglu(gate_up_TF.contiguous())


def _swiglu(gate_up: Tensor) -> Tensor:
    out = gate_up.new_empty(*gate_up.shape[:-1], gate_up.shape[-1] // 2)
    _library.gated(gate_up.data_ptr(), out.data_ptr(), out.numel() // out.shape[-1], out.shape[-1])
    return out


class _SwiGLU(Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        gate_up = gate_up.contiguous()
        ctx.save_for_backward(gate_up)
        return _swiglu(gate_up)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (gate_up,) = ctx.saved_tensors
        grad = grads[0].contiguous()
        out = torch.empty_like(gate_up)
        _library.gated_backward(
            *map(_address, (grad, gate_up, out)), grad.numel() // grad.shape[-1], grad.shape[-1]
        )
        return out


# --- Attention of a decoding step.


def decode(
    keys: Tensor, values: Tensor, q_NHD: Tensor, k_NKD: Tensor, v_NKD: Tensor, positions_N: Tensor
) -> Tensor:
    """Store a key and a value for each of the first N slots, and return the attention's output.

    A slot's queries attend to all positions up to its new one. The output is [N, H, D], without
    gradient, and the bits of a row do not depend on other rows.

    keys, values: the KV cache, [N or more, K, L, D].
    positions_N: where each slot's key and value are stored, int64.
    """
    q, k, v = map(_token_rows, (q_NHD, k_NKD, v_NKD))
    out = q.new_empty(q.shape)
    capacity = keys.shape[2]
    size = q.shape[2]
    strided = (x for each in (q, k, v) for x in (each.data_ptr(), each.stride(0)))
    sizes = len(q), q.shape[1], k.shape[1], capacity, size, size**-0.5
    _library.decode(
        keys.data_ptr(), values.data_ptr(), *strided, positions_N.data_ptr(), out.data_ptr(), *sizes
    )
    return out


# --- A decoding step as a whole.

# Name of the step in a profile. Its FLOP follow, which a profiler can't count in a C call.
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
    """Run all layers and the final norm on embeddings x, in place.

    Each token's key and value are stored in the KV cache. The bits of a row do not depend on other
    rows. There is no gradient.

    layers: the tensors of each layer, in the order of `Layer` in decoding.c.
    tables: cosines [N, 1, D] and sines [N, 1, C].
    places: positions and slots, int64 [N] both.
    sizes: d, H, K, L, D and F.
    """
    d, n_heads, n_kv_heads, _, size, gated = sizes
    count = len(x_Nd)
    cos, sin = tables
    positions_N, slots_N = places
    layouts = (x_Nd, d), (positions_N,), (slots_N,), (cos, 1, size), (sin, 1, size // 2)
    assert all(has_layout(tensor, count, *shape) for tensor, *shape in layouts)
    assert is_supported(x_Nd, norm_d, cos, sin)
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


# --- Products.


def prefers_onednn(x_Td: Tensor, weight_od: Tensor) -> bool:
    """True if oneDNN should compute the product.

    The choice depends on the size of the matrix and not on the number of rows, because the bits of
    a row must not depend on how many there are.
    """
    return (
        _onednn and weight_od.numel() >= WIDE and x_Td.dim() == 2 and is_supported(x_Td, weight_od)
    )


def product(x_Td: Tensor, weight_od: Tensor) -> Tensor:
    """Return x W^T, [T, o], computed by oneDNN."""
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
        x, weight = ctx.saved_tensors
        for_x, for_weight = ctx.needs_input_grad
        grad_x = _onednn_product(grads[0], weight.t()) if for_x else None
        # MKL is as fast for the gradient of the weights.
        grad_weight = grads[0].t() @ x if for_weight else None
        return grad_x, grad_weight


def _address(x: Tensor | None) -> int | None:
    return None if x is None else x.data_ptr()


def _token_rows(x: Tensor) -> Tensor:
    """Return [T, heads, D] with each token's elements contiguous."""
    return x if x.stride(2) == 1 and x.stride(1) == x.shape[2] else x.contiguous()
