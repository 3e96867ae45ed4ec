"""A matrix that is stored in 4 or 8 bits per number, and dequantized for each product (QLoRA).

o, i = outputs and inputs of the matrix.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function

from ratchet.models.layers.lazy_bitsandbytes import load_bitsandbytes

QuantFormat = Literal["nf4", "float8"]
# Block sizes: how many numbers share a scale. A float8 block lies within one row.
NF4_BLOCK = 64
FLOAT8_BLOCK = 128
LARGEST = torch.finfo(torch.float8_e4m3fn).max


class QuantizedMatrix(nn.Module):
    """A quantized matrix of a linear map. Quantizing a dequantized matrix again changes nothing.

    Form "nf4" is 4-bit normal floats (arXiv:2305.14314, section 3) by bitsandbytes. The error of a
    number is at most 0.16 of the largest number in its block.

    Form "float8" is e4m3 with scales that are powers of two, so that scaling has no rounding error.
    The error of a number is at most 1/16 of the number, or for small numbers 2^-17 of the largest
    number in its block.
    """

    codes: Tensor
    scales: Tensor

    def __init__(self, plain: Tensor, form: QuantFormat) -> None:
        super().__init__()
        self.form = form
        self.shape = plain.shape
        self.dtype = plain.dtype
        for name, tensor in zip(("codes", "scales"), self._quantize(plain), strict=True):
            self.register_buffer(name, tensor, persistent=False)
        self.opened: Tensor | None = None  # the unquantized copy between `open` and `shut`

    def plain(self) -> Tensor:
        """Return the dequantized matrix [o, i] in its original dtype."""
        if self.form == "nf4":
            restored = torch.ops.bitsandbytes.dequantize_4bit(
                self.codes, self.scales, NF4_BLOCK, "nf4", self.shape, torch.float32
            )
        else:
            blocks = self.codes.to(torch.float32).unflatten(
                1, (-1, FLOAT8_BLOCK)
            ) * self.scales.unsqueeze(2)
            restored = blocks.flatten(1)[:, : self.shape[1]]
        return restored.to(self.dtype)

    def forward(self, x: Tensor, bias: Tensor | None) -> Tensor:
        out = _Product.apply(x, self)
        return out if bias is None else out + bias.to(out.dtype)

    @property
    def device(self) -> torch.device:
        return self.codes.device

    # --- changing the matrix

    @property
    def shown(self) -> Tensor:
        """The writable copy between `open` and `shut`; otherwise the dequantized matrix."""
        return self.plain() if self.opened is None else self.opened

    def open(self) -> None:
        """Make `shown` a writable copy. The quantized matrix does not change before `shut`."""
        self.opened = self.plain()

    @torch.no_grad()
    def shut(self) -> None:
        """Quantize the writable copy, and end writing."""
        if self.opened is not None:
            codes, scales = self._quantize(self.opened)
            self.codes.copy_(codes)
            self.scales.copy_(scales)
        self.opened = None

    def _quantize(self, plain: Tensor) -> tuple[Tensor, Tensor]:
        """Return (codes, scales) of an unquantized matrix."""
        matrix = plain.detach().float()
        if self.form == "nf4":
            codes, state = load_bitsandbytes().quantize_4bit(
                matrix.contiguous(), blocksize=NF4_BLOCK, quant_type="nf4"
            )
            return codes, state.absmax
        padding = -matrix.shape[1] % FLOAT8_BLOCK
        blocks = F.pad(matrix, (0, padding)).unflatten(1, (-1, FLOAT8_BLOCK))
        # The scale is the power of two just above max |block| / LARGEST, so that each code fits.
        _, exponents = torch.frexp(blocks.abs().amax(2) / LARGEST)
        scales = torch.ldexp(torch.ones_like(blocks[:, :, 0]), exponents)
        return (blocks / scales.unsqueeze(2)).flatten(1).to(torch.float8_e4m3fn), scales


class _Product(Function):
    """The product x W^T, which dequantizes W again in the backward pass.

    Autograd would keep the dequantized matrices of all layers until the backward.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, matrix: QuantizedMatrix) -> Tensor:
        ctx.matrix, ctx.dtype = matrix, x.dtype
        return F.linear(x, matrix.plain())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return (grads[0] @ ctx.matrix.plain().to(grads[0].dtype)).to(ctx.dtype), None
