"""The decoder's operations in float32 on a CPU, each as one call.

Each call makes a single pass over memory, and matrix products use the faster of oneDNN and MKL.
PyTorch's own operations make several passes, and the interpreter takes some ten microseconds for
each of them, which is most of a decoding step of a small model. Gradients are first-order only.

Callers (`ratchet.models.ops`, and the modules `attention` and `compiled_decode` of
`ratchet.generators.engine`) check `is_supported` first, and compute with PyTorch for other dtypes
and devices.

T = tokens, N = requests, H = query heads, K = key/value heads, L = capacity of a slot in tokens, C
= D / 2, D = head_dim, d = inputs, o = outputs, F = size of the gated layer.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.profiler import record_function

from ratchet.kernels.build import describe_processor, load_library

# These values must equal those of the same name in kernels.c, rows.h and decoding.c.
N_PARTIAL_SUMS = 8
MAX_HEAD_DIM = 512
MAX_CHUNK_ROWS = 64
# Minimum size (elements) of a matrix for which oneDNN is faster than MKL on AMD's processors.
ONEDNN_MIN_SIZE = 2**17

# Types of the C arguments: a pointer, an int64 and a float.
P, N, X = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
SIGNATURES = {
    "norm": (P, P, P, P, N, N, X),
    "norm_backward": (P, P, P, P, P, P, P, N, N),
    "heads": (P, P, P, P, P, P, P, P, N, N, N, N, X),
    "heads_backward": (P, N, P, N, P, N, P, P, P, P, P, P, P, P, P, N, N, N, N),
    "gated": (P, P, N, N),
    "gated_backward": (P, P, P, N, N),
    "gated_bfloat16": (P, P, N, N),
    "gated_backward_bfloat16": (P, P, P, N, N),
    "decode": (P, P, P, N, P, N, P, N, P, P, N, N, N, N, N, X),
    "step": (P, N, ctypes.c_int, *[P] * 7, ctypes.c_int, P, N, N, N, N, N, N, N, X),
    "step_scratch": (N, N, N, N, N),
    "attention": (P, N, P, N, P, N, P, N, *[P] * 6, ctypes.c_int, N, N, N, N, X),
    "attention_backward": (P, P, N, P, N, P, N, P, N, *[P] * 9, ctypes.c_int, N, N, N, N, X),
    "attention_scratch": (N, N),
    "has_bfloat16": (),
}
RESULT_TYPES = {"step_scratch": N, "attention_scratch": N, "has_bfloat16": ctypes.c_int}
PLAIN_TYPES = (Tensor, nn.Parameter)

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
            function.restype = RESULT_TYPES.get(name)
    # MKL's best kernels are for Intel's processors. The choice depends on the vendor and not on a
    # measurement, because a repeated run must have the same bits.
    _onednn = (
        enabled and torch.backends.mkldnn.is_available() and b"AuthenticAMD" in describe_processor()
    )
    _library = compiled


def get_library() -> Any:
    """Return the compiled library; None if this process does not use the kernels."""
    return _library


def is_enabled() -> bool:
    """True if this process uses the kernels."""
    return _library is not None


def is_supported(*tensors: Tensor) -> bool:
    """True if the kernels are on and support these tensors."""
    if _library is None or torch.is_autocast_enabled("cpu") or torch.compiler.is_compiling():
        return False
    # A loop, because a generator expression takes as long as a small operation.
    for t in tensors:
        if t.dtype is not torch.float32 or not t.is_cpu or type(t) not in PLAIN_TYPES:
            return False
    return True


def has_bfloat16_step() -> bool:
    """True if `step` can compute with matrices in bfloat16 here."""
    return _library is not None and bool(_library.has_bfloat16())


def has_layout(x: Tensor, *shape: int) -> bool:
    """True if the tensor is contiguous and has this shape.

    The C code assumes both, and would otherwise read beyond the tensor's end.
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
        x.data_ptr(), weight_d.data_ptr(), out.data_ptr(), get_address(r_T), x.numel() // d, d, eps
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
        partial_sums = x.new_empty(N_PARTIAL_SUMS, len(weight_d))
        tensors = grads[0].contiguous(), x, weight_d, r_T, grad_x, grad_weight, partial_sums
        _library.norm_backward(*map(get_address, tensors), len(r_T), len(weight_d))
        return grad_x, grad_weight, None


# --- Queries, keys and values from their fused product.

Heads = tuple[Tensor, Tensor, Tensor]  # queries, keys, values
Norms = tuple[Tensor | None, Tensor | None]  # weights of the queries' and of the keys' norm


def split_heads(
    qkv: Tensor, norms: Norms, cos_T1D: Tensor, sin_T1C: Tensor, sizes: tuple[int, int], eps: float
) -> Heads:
    """Return queries, keys and values, like `ops.split_heads`."""
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

    sizes: number of query heads and of key/value heads.
    r: buffer for the norms' factors, as in `_normalise`, or None.
    """
    n_tokens, _, size = qkv.shape
    n_heads, n_kv_heads = sizes
    q = qkv.new_empty(n_tokens, n_heads, size)
    k = qkv.new_empty(n_tokens, n_kv_heads, size)
    _library.heads(
        *map(get_address, (qkv, *norms, cos, sin, q, k, r)),
        n_tokens,
        n_heads,
        n_kv_heads,
        size,
        eps,
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
        q, k, v = map(make_rows_contiguous, grads)
        size = q.shape[2]
        grad = q.new_empty(ctx.shape)
        grad_norms = None if q_norm is None else q.new_empty(2, size)
        partial_sums = None if q_norm is None else q.new_empty(N_PARTIAL_SUMS, 2, size)
        addresses = map(
            get_address, (qkv, q_norm, k_norm, cos, sin, r, grad, grad_norms, partial_sums)
        )
        sizes = len(q), q.shape[1], k.shape[1], size
        _library.heads_backward(*list_addresses_and_strides(q, k, v), *addresses, *sizes)
        return (
            grad,
            *((None, None) if grad_norms is None else grad_norms.unbind()),
            None,
            None,
            None,
            None,
        )


# --- silu(gate) * up


def swiglu(gate_up_T2F: Tensor) -> Tensor:
    """Return silu(gate) * up, [T, F], computed in float32.

    gate_up_T2F: float32 or bfloat16; the first F columns are the gate, the last F are `up`.
    """
    if torch.is_grad_enabled():
        return _SwiGLU.apply(gate_up_T2F)
    return _swiglu(gate_up_T2F.contiguous())


def _swiglu(gate_up: Tensor) -> Tensor:
    out = gate_up.new_empty(*gate_up.shape[:-1], gate_up.shape[-1] // 2)
    kernel = _library.gated if gate_up.dtype is torch.float32 else _library.gated_bfloat16
    kernel(gate_up.data_ptr(), out.data_ptr(), out.numel() // out.shape[-1], out.shape[-1])
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
        is_float32 = gate_up.dtype is torch.float32
        kernel = _library.gated_backward if is_float32 else _library.gated_backward_bfloat16
        kernel(
            *map(get_address, (grad, gate_up, out)), grad.numel() // grad.shape[-1], grad.shape[-1]
        )
        return out


# --- Attention of a decoding step.


def decode(
    keys: Tensor, values: Tensor, q_NHD: Tensor, k_NKD: Tensor, v_NKD: Tensor, positions_N: Tensor
) -> Tensor:
    """Store a key and a value for each of the first N slots, and return the attention's output.

    A slot's queries attend to all positions up to its new one. The output is [N, H, D], without
    gradient. The bits of a row do not depend on other rows (batch invariance).

    keys, values: the KV cache, [N or more, K, L, D].
    positions_N: where each slot's key and value are stored, int64.
    """
    q, k, v = map(make_rows_contiguous, (q_NHD, k_NKD, v_NKD))
    out = q.new_empty(q.shape)
    capacity = keys.shape[2]
    size = q.shape[2]
    sizes = len(q), q.shape[1], k.shape[1], capacity, size, size**-0.5
    _library.decode(
        keys.data_ptr(),
        values.data_ptr(),
        *list_addresses_and_strides(q, k, v),
        positions_N.data_ptr(),
        out.data_ptr(),
        *sizes,
    )
    return out


# --- A decoding step as a whole.

# Name of the step in a profile. The number of FLOP is appended, because a profiler can't count FLOP
# in a C call.
STEP = "ratchet::step, FLOP of its products: "


def step(
    layers: Sequence[Sequence[Tensor | None]],
    x_Nd: Tensor,
    norm_d: Tensor,
    rotary_tables: tuple[Tensor, Tensor],
    positions_and_slots: tuple[Tensor, Tensor],
    sizes: Sequence[int],
    eps: float,
    chunk_starts: Sequence[int],
) -> None:
    """Run all layers and the final norm on embeddings x, in place.

    Each token's key and value are stored in the KV cache. The bits of a row do not depend on other
    rows (batch invariance), but on the tokens before it in its slot. There is no gradient.

    layers: the tensors of each layer, in the order of `Layer` in decoding.c. The matrices are all
      in float32, or all in bfloat16 with an even number of columns.
    rotary_tables: cosines [N, 1, D] and sines [N, 1, C].
    positions_and_slots: the position of each token, and the slot of the KV cache in which its key
      and value are stored; int64, [N] each.
    sizes: d, H, K, L, D and F.
    chunk_starts: the first row of each chunk, and N. A thread computes a chunk, of at most
      MAX_CHUNK_ROWS rows. Tokens of one slot are in one chunk, in order.
    """
    d, n_heads, n_kv_heads, _, size, gated_size = sizes
    n_rows = len(x_Nd)
    cos, sin = rotary_tables
    positions_N, slots_N = positions_and_slots
    layouts = (x_Nd, d), (positions_N,), (slots_N,), (cos, 1, size), (sin, 1, size // 2)
    assert all(has_layout(tensor, n_rows, *shape) for tensor, *shape in layouts)
    assert is_supported(x_Nd, norm_d, cos, sin)
    assert positions_N.dtype is slots_N.dtype is torch.int64
    threads = torch.get_num_threads()
    scratch = x_Nd.new_empty(
        threads, _library.step_scratch(d, n_heads, n_kv_heads, size, gated_size)
    )
    assert chunk_starts[0] == 0
    assert chunk_starts[-1] == n_rows
    assert all(0 <= end - start <= MAX_CHUNK_ROWS for start, end in pairwise(chunk_starts))
    dtypes = {x.dtype for layer in layers for x in layer if x is not None and x.dim() == 2}
    has_bfloat16_matrices = torch.bfloat16 in dtypes
    addresses = [get_address(tensor) for layer in layers for tensor in layer]
    tensors = map(get_address, (x_Nd, norm_d, cos, sin, positions_N, slots_N, scratch))
    flop = 2 * n_rows * len(layers) * d * (2 * (n_heads + n_kv_heads) * size + 3 * gated_size)
    with record_function(f"{STEP}{flop}") if torch.autograd._profiler_enabled() else nullcontext():
        _library.step(
            (P * len(addresses))(*addresses),
            len(layers),
            has_bfloat16_matrices,
            *tensors,
            threads,
            (N * len(chunk_starts))(*chunk_starts),
            len(chunk_starts) - 1,
            *sizes,
            eps,
        )


# --- Products.


def prefers_onednn(x_Td: Tensor, weight_od: Tensor) -> bool:
    """True if oneDNN should compute the product.

    The choice depends on the size of the weight and not on the number of rows, because the bits of
    a row must not depend on the number of rows.
    """
    return (
        _onednn
        and weight_od.numel() >= ONEDNN_MIN_SIZE
        and x_Td.dim() == 2
        and is_supported(x_Td, weight_od)
    )


def product(x_Td: Tensor, weight_od: Tensor) -> Tensor:
    """Return x W^T, [T, o], computed by oneDNN."""
    return (
        _Product.apply(x_Td, weight_od)
        if torch.is_grad_enabled()
        else _multiply_by_onednn(x_Td, weight_od)
    )


def _multiply_by_onednn(x: Tensor, weight: Tensor) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "")


class _Product(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return _multiply_by_onednn(x, weight)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        needs_grad_x, needs_grad_weight = ctx.needs_input_grad
        grad_x = _multiply_by_onednn(grads[0], weight.t()) if needs_grad_x else None
        # MKL is as fast for the gradient of the weights.
        grad_weight = grads[0].t() @ x if needs_grad_weight else None
        return grad_x, grad_weight


def get_address(x: Tensor | None) -> int | None:
    """Return the address of the tensor's first element."""
    return None if x is None else x.data_ptr()


def make_rows_contiguous(x: Tensor) -> Tensor:
    """Return x, [T, heads, D], copied unless the elements of each token are contiguous."""
    return x if x.stride(2) == 1 and x.stride(1) == x.shape[2] else x.contiguous()


def list_addresses_and_strides(*tensors: Tensor) -> Iterator[int]:
    """Yield each tensor's address and the distance between its tokens (elements)."""
    for x in tensors:
        yield x.data_ptr()
        yield x.stride(0)
