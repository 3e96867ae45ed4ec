"""Matrix products of float32 tensors on a CPU with operands in bfloat16 (`precision: bfloat16`).

Both operands are rounded to bfloat16, to nearest even, and oneDNN sums in float32. The result is
rounded to bfloat16 and returned in float32, as under autocast on an accelerator. The same holds for
the two products of the backward. Weights, gradients and everything between products stay float32.

T = tokens, d = inputs, o = outputs.
"""

from __future__ import annotations

from threading import Lock
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.autograd import Function

from ratchet.kernels.build import has_bfloat16_instructions

_enabled = False
_epoch = 0  # number of times that weights may have changed


def set_enabled(enabled: bool, *, on_cpu: bool = True) -> None:
    """Turn products in bfloat16 on or off in this process.

    on_cpu: False if the process computes on an accelerator, whose products are those of autocast.

    Raises OSError if the CPU computes and has no instructions for them: oneDNN would emulate them,
    which takes longer than float32.
    """
    global _enabled
    has_instructions = has_bfloat16_instructions() and torch.backends.mkldnn.is_available()
    if enabled and on_cpu and not has_instructions:
        raise OSError("this processor has neither AVX512-BF16 nor AMX (see `ratchet doctor`)")
    _enabled = enabled


def is_enabled() -> bool:
    """True if this process computes products in bfloat16."""
    return _enabled


def is_supported(x: Tensor, weight_od: Tensor) -> bool:
    """True if products in bfloat16 are on and support these tensors."""
    return (
        _enabled
        and x.dim() == 2
        and weight_od.dtype is torch.float32
        and x.dtype in (torch.float32, torch.bfloat16)
        and x.is_cpu
        and type(weight_od) in (Tensor, nn.Parameter)
    )


def forget_weights() -> None:
    """Let every weight of this process be rounded again at its next use.

    Called where weights may have changed: PyTorch's fused optimizers and `Tensor.data` change
    weights in place without counting a version.
    """
    global _epoch
    _epoch += 1


class RoundedWeight:
    """A weight rounded to bfloat16, which is kept until `forget_weights` or a counted change.

    Threads may use it at the same time.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        # The weight; the epoch, the weight's address and its version; and the rounded weight. It is
        # one tuple, so that a thread never reads a part of another thread's change.
        self._kept: tuple[ref[Tensor], tuple[int, int, int], Tensor] | None = None

    def __reduce__(self) -> tuple[type[RoundedWeight], tuple[()]]:
        """A copy of a model rounds its own weights."""
        return RoundedWeight, ()

    def get(self, weight_od: Tensor) -> Tensor:
        """Return the weight in bfloat16, [o, d]."""
        rounded = self._find(weight_od)
        if rounded is not None:
            return rounded
        with self._lock:
            rounded = self._find(weight_od)  # another thread may have rounded it meanwhile
            if rounded is None:
                state = _epoch, weight_od.data_ptr(), weight_od._version
                # It may be kept for a backward, which inference tensors are not for.
                with torch.inference_mode(False), torch.no_grad():
                    rounded = weight_od.detach().to(torch.bfloat16)
                self._kept = ref(weight_od), state, rounded
        return rounded

    def _find(self, weight_od: Tensor) -> Tensor | None:
        """Return the kept rounded weight; None if it is of another weight or of earlier values."""
        if self._kept is None:
            return None
        weight, state, rounded = self._kept
        is_current = state == (_epoch, weight_od.data_ptr(), weight_od._version)
        return rounded if is_current and weight() is weight_od else None


class SharedRoundedWeight(RoundedWeight):
    """The rounded weight of another parameter, for a parameter in the same memory.

    Args:
        source: Keeps the rounded weight.
        weight_od: The weight that `source` rounds.
    """

    def __init__(self, source: RoundedWeight, weight_od: Tensor) -> None:
        super().__init__()
        self._source = source
        self._source_weight = weight_od

    def get(self, weight_od: Tensor) -> Tensor:
        """Return the weight in bfloat16, [o, d].

        A weight that has moved to memory of its own is rounded here.
        """
        if weight_od.data_ptr() == self._source_weight.data_ptr():
            return self._source.get(self._source_weight)
        return super().get(weight_od)


def product(x_Td: Tensor, weight_od: Tensor, rounded_od: Tensor, dtype: torch.dtype) -> Tensor:
    """Return x W^T, [T, o], in float32 or bfloat16.

    rounded_od: the weight in bfloat16.
    """
    if torch.is_grad_enabled():
        return _Product.apply(x_Td, weight_od, rounded_od, dtype)
    return _multiply(x_Td.to(torch.bfloat16), rounded_od).to(dtype)


def _multiply(x: Tensor, weight: Tensor) -> Tensor:
    # `@` would leave oneDNN for few rows, and the bits of a row must not depend on their number.
    return torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "")


class _Product(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, rounded: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.input_dtype = x.dtype
        x = x.to(torch.bfloat16)
        ctx.save_for_backward(x, rounded)
        return _multiply(x, rounded).to(dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        x, rounded = ctx.saved_tensors
        grad = grads[0].to(torch.bfloat16)
        needs_grad_x, needs_grad_weight, *_ = ctx.needs_input_grad
        grad_x = _multiply(grad, rounded.t()).to(ctx.input_dtype) if needs_grad_x else None
        grad_weight = (grad.t() @ x).float() if needs_grad_weight else None
        return grad_x, grad_weight, None, None
