"""What LoRA adds to a linear map (arXiv:2106.09685, eq. 3): out + scale B A x.

T = tokens, r = rank, i = inputs, o = outputs of the map, p = parts that have an adapter.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from hashlib import blake2b
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ratchet.models.layers.quantized import Quantised


class SeededDropout(nn.Module):
    """Dropout whose mask is a function of a seed: a resumed run, and activations that are computed
    again, see the same one. seed: None outside of updates, and then nothing is dropped. place:
    other masks in other places."""

    def __init__(self, share: float, place: int) -> None:
        super().__init__()
        self.share, self.place = share, place
        self.seed: int | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.seed is None or not self.share:
            return x
        generator = torch.Generator(x.device).manual_seed(mask_seed(self.seed, self.place))
        kept = torch.rand(x.shape, generator=generator, device=x.device) >= self.share
        return x * (kept / (1 - self.share)).to(x.dtype)


def mask_seed(*names: int) -> int:
    """Return the seed of what is dropped, in [0, 2**63), by the numbers that name it.

    It is a hash, as products and sums of the numbers would meet, and torch's generator on a CPU
    reads the lowest 32 bits alone.
    """
    digest = blake2b("/".join(map(str, names)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


class Switched(nn.Module):
    """Whatever adapts a map: without effect while it is off."""

    off = False


class LowRank(Switched):
    """The adapter of one map of our decoder, whose matrix may be several canonical ones, fused:
    each part has an A and a B of its own, one below the other in `lora_A` [p r, i] and `lora_B`
    [rows of the parts, r]. Uninitialised.

    spans: the rows of the map's matrix that are a part of it; the others stay as they are.
    """

    def __init__(
        self,
        weight: Tensor | Quantised,
        spans: Sequence[range],
        *,
        rank: int,
        scale: float,
        dropout: float,
        place: int,
    ) -> None:
        super().__init__()
        self.outputs, inputs = weight.shape
        self.spans, self.rank, self.scale = tuple(spans), rank, scale
        empty: Any = {"dtype": weight.dtype, "device": weight.device}
        self.lora_A = nn.Parameter(torch.empty(rank * len(spans), inputs, **empty))
        self.lora_B = nn.Parameter(torch.empty(sum(map(len, spans)), rank, **empty))
        self.dropout = SeededDropout(dropout, place)

    def forward(self, x_Ti: Tensor, out_To: Tensor) -> Tensor:
        return out_To if self.off else out_To + self.delta(x_Ti)

    def delta(self, x_Ti: Tensor) -> Tensor:
        """[T, o]"""
        low_Tr = (F.linear(self.dropout(x_Ti), self.lora_A) * self.scale).split(self.rank, dim=-1)
        parts = [F.linear(own_Tr, b) for own_Tr, (_, b) in zip(low_Tr, self.factors(), strict=True)]
        return side_by_side(list(zip(self.spans, parts, strict=True)), self.outputs)

    def factors(self) -> Iterator[tuple[Tensor, Tensor]]:
        """(A, B) of each part."""
        yield from zip(
            self.lora_A.split(self.rank),
            self.lora_B.split([len(span) for span in self.spans]),
            strict=True,
        )

    @torch.no_grad()
    def merge_into(self, weight: Tensor) -> None:
        """Adds the product to the map's matrix, in place."""
        for span, (a, b) in zip(self.spans, self.factors(), strict=True):
            weight[span.start : span.stop] += (self.scale * (b @ a)).to(weight.dtype)


def side_by_side(parts: Sequence[tuple[range, Tensor]], outputs: int) -> Tensor:
    """[..., outputs]: each part in the columns that are its own, zeros elsewhere. parts: in the
    order of their columns."""
    like, laid, end = parts[0][1], [], 0
    for columns, part in parts:
        if columns.start > end:
            laid.append(like.new_zeros(*like.shape[:-1], columns.start - end))
        laid.append(part)
        end = columns.stop
    if end < outputs:
        laid.append(like.new_zeros(*like.shape[:-1], outputs - end))
    return torch.cat(laid, dim=-1) if len(laid) > 1 else laid[0]


@contextmanager
def dropping(model: nn.Module, seed: int) -> Iterator[None]:
    """Meanwhile the model's adapters drop what this seed says."""
    found = [module for module in model.modules() if isinstance(module, SeededDropout)]
    for module in found:
        module.seed = seed
    try:
        yield
    finally:
        for module in found:
            module.seed = None
