"""A matrix that rests in 4 or 8 bits a number, and is restored where it is multiplied.

o, i = outputs and inputs of the matrix, n = its numbers.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function

from ratchet.models.layers.lazy_bitsandbytes import bits

Form = Literal["nf4", "float8"]
NF4_BLOCK, FLOAT8_BLOCK = 64, 128  # numbers that share a scale; those of float8 lie in one row
LARGEST = torch.finfo(torch.float8_e4m3fn).max


class Quantised(nn.Module):
    """form: "nf4", 4-bit normal floats (arXiv:2305.14314, section 3) by bitsandbytes; "float8",
    e4m3 whose scales are powers of two, so that scaling rounds nothing. Quantising what was
    restored changes no number.

    Of float8 a number is off by at most a sixteenth of itself, or, where it is small, by 2^-17 of
    its block's largest; of nf4 by at most 0.16 of its block's largest.
    """

    codes: Tensor
    scales: Tensor

    def __init__(self, plain: Tensor, form: Form) -> None:
        super().__init__()
        self.form, self.shape, self.dtype = form, plain.shape, plain.dtype
        for name, tensor in zip(("codes", "scales"), self._quantised(plain), strict=True):
            self.register_buffer(name, tensor, persistent=False)
        self.opened: Tensor | None = None

    def plain(self) -> Tensor:
        """[o, i]: what is multiplied by, in the dtype that the matrix had."""
        if self.form == "nf4":
            made = torch.ops.bitsandbytes.dequantize_4bit(
                self.codes, self.scales, NF4_BLOCK, "nf4", self.shape, torch.float32
            )
        else:
            blocks = self.codes.to(torch.float32).unflatten(
                1, (-1, FLOAT8_BLOCK)
            ) * self.scales.unsqueeze(2)
            made = blocks.flatten(1)[:, : self.shape[1]]
        return made.to(self.dtype)

    def forward(self, x: Tensor, bias: Tensor | None) -> Tensor:
        out = _Product.apply(x, self)
        return out if bias is None else out + bias.to(out.dtype)

    @property
    def device(self) -> torch.device:
        return self.codes.device

    # --- other numbers

    @property
    def shown(self) -> Tensor:
        """What it has, or is to have."""
        return self.plain() if self.opened is None else self.opened

    def open(self) -> None:
        """From now on `shown` may be written to; the matrix stays what it is until `shut`."""
        self.opened = self.plain()

    @torch.no_grad()
    def shut(self) -> None:
        if self.opened is not None:
            codes, scales = self._quantised(self.opened)
            self.codes.copy_(codes)
            self.scales.copy_(scales)
        self.opened = None

    def _quantised(self, plain: Tensor) -> tuple[Tensor, Tensor]:
        wide = plain.detach().float()
        if self.form == "nf4":
            codes, state = bits().quantize_4bit(
                wide.contiguous(), blocksize=NF4_BLOCK, quant_type="nf4"
            )
            return codes, state.absmax
        blocks = F.pad(wide, (0, -wide.shape[1] % FLOAT8_BLOCK)).unflatten(1, (-1, FLOAT8_BLOCK))
        _, exponents = torch.frexp(blocks.abs().amax(2) / LARGEST)
        scales = torch.ldexp(torch.ones_like(blocks[:, :, 0]), exponents)
        return (blocks / scales.unsqueeze(2)).flatten(1).to(torch.float8_e4m3fn), scales


class _Product(Function):
    """x W^T. Autograd would keep every restored matrix for the backward: here it is restored
    again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, matrix: Quantised) -> Tensor:
        ctx.matrix, ctx.dtype = matrix, x.dtype
        return F.linear(x, matrix.plain())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return (grads[0] @ ctx.matrix.plain().to(grads[0].dtype)).to(ctx.dtype), None
