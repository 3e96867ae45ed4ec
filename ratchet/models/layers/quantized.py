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
FLOAT8_MAX = torch.finfo(torch.float8_e4m3fn).max


class QuantizedMatrix(nn.Module):
    """A quantized matrix of a linear layer. Quantizing a dequantized matrix again changes nothing.

    "nf4" is 4-bit normal floats (arXiv:2305.14314, section 3) by bitsandbytes. The error of a
    number is at most 0.16 of the largest number in its block.

    "float8" is e4m3 with scales that are powers of two, so that scaling has no rounding error. The
    error of a number is at most 1/16 of the number, or for small numbers 2^-17 of the largest
    number in its block.
    """

    codes: Tensor
    scales: Tensor

    def __init__(self, plain: Tensor, quant_format: QuantFormat) -> None:
        super().__init__()
        self.quant_format = quant_format
        self.shape = plain.shape
        self.dtype = plain.dtype
        for name, tensor in zip(("codes", "scales"), self._quantize(plain), strict=True):
            self.register_buffer(name, tensor, persistent=False)
        # The unquantized copy between `begin_write` and `end_write`.
        self.write_buffer: Tensor | None = None

    def plain(self) -> Tensor:
        """Return the dequantized matrix [o, i] in its original dtype."""
        if self.quant_format == "nf4":
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
    def contents(self) -> Tensor:
        """The write buffer if there is one; otherwise the dequantized matrix."""
        return self.plain() if self.write_buffer is None else self.write_buffer

    def begin_write(self) -> None:
        """Make `contents` writable. The quantized matrix does not change before `end_write`."""
        self.write_buffer = self.plain()

    @torch.no_grad()
    def end_write(self) -> None:
        """Quantize the write buffer, and release it."""
        if self.write_buffer is not None:
            codes, scales = self._quantize(self.write_buffer)
            self.codes.copy_(codes)
            self.scales.copy_(scales)
        self.write_buffer = None

    def _quantize(self, plain: Tensor) -> tuple[Tensor, Tensor]:
        """Return (codes, scales) of an unquantized matrix."""
        matrix = plain.detach().float()
        if self.quant_format == "nf4":
            codes, state = load_bitsandbytes().quantize_4bit(
                matrix.contiguous(), blocksize=NF4_BLOCK, quant_type="nf4"
            )
            return codes, state.absmax
        padding = -matrix.shape[1] % FLOAT8_BLOCK
        blocks = F.pad(matrix, (0, padding)).unflatten(1, (-1, FLOAT8_BLOCK))
        # The scale is the power of two just above max |block| / FLOAT8_MAX. So each code fits.
        _, exponents = torch.frexp(blocks.abs().amax(2) / FLOAT8_MAX)
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
