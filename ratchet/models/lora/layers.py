"""Define the layers that LoRA adds to a linear layer (arXiv:2106.09685, eq. 3): out + scale B A x.

T = tokens, r = rank, i = inputs, o = outputs of the linear layer, p = parts that have an adapter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from hashlib import blake2b
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ratchet.models.layers.quantized import QuantizedMatrix

# A function that multiplies rows by a matrix: (rows [T, i], matrix [o, i]) -> [T, o]. Of experts
# the matrices are stacked, [E, o, i], and each row is multiplied by that of its expert.
Multiply = Callable[[Tensor, Tensor], Tensor]


class SeededDropout(nn.Module):
    """A dropout layer whose mask is a function of a seed.

    So a resumed run gets the same mask, and so do recomputed activations.
    """

    def __init__(self, probability: float, name: str) -> None:
        """Create a layer that drops nothing until `seed` is set.

        Args:
            probability: dropout probability.
            name: name of the adapted matrix in the whole model, so that layers with the same seed
              get different masks.
        """
        super().__init__()
        self.probability = probability
        self.name = name
        self.seed: int | None = None  # None outside of updates: nothing is dropped

    def forward(self, x: Tensor) -> Tensor:
        if self.seed is None or not self.probability:
            return x
        generator = torch.Generator(x.device).manual_seed(derive_mask_seed(self.seed, self.name))
        is_kept = torch.rand(x.shape, generator=generator, device=x.device) >= self.probability
        return x * (is_kept / (1 - self.probability)).to(x.dtype)


def derive_mask_seed(*identifiers: int | str) -> int:
    """Return the seed of a dropout mask, in [0, 2**63), from what identifies it.

    The identifiers are hashed. Products or sums of numbers would collide, and torch's CPU generator
    only reads the lowest 32 bits of its seed.
    """
    digest = blake2b("/".join(map(str, identifiers)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


class SwitchableAdapter(nn.Module):
    """A module that adapts a linear layer, and has no effect while `is_off` is True."""

    is_off = False


class FusedLoRA(SwitchableAdapter):
    """The adapter of one linear layer of the built-in decoder, or of one matrix of all experts.

    The layer's matrix may fuse several matrices of the checkpoint. Each of these parts has its own
    A and B, stacked in `lora_A` [p r, i] and `lora_B` [rows of the parts, r]. Both are
    uninitialised. Those of experts have a first dimension more, over the experts.
    """

    def __init__(
        self,
        weight: Tensor | QuantizedMatrix,
        spans: Sequence[range],
        *,
        rank: int,
        scale: float,
        dropout: float,
        name: str,
    ) -> None:
        """Allocate A and B for each part.

        Args:
            weight: the linear layer's matrix [o, i], or those of all experts [E, o, i].
            spans: the matrix rows of each adapted part; other rows have no adapter.
            name: see `SeededDropout`.
        """
        super().__init__()
        *stack, self.outputs, inputs = weight.shape
        self.spans = tuple(spans)
        self.rank = rank
        self.scale = scale
        empty: Any = {"dtype": weight.dtype, "device": weight.device}
        self.lora_A = nn.Parameter(torch.empty(*stack, rank * len(spans), inputs, **empty))
        self.lora_B = nn.Parameter(torch.empty(*stack, sum(map(len, spans)), rank, **empty))
        self.dropout = SeededDropout(dropout, name)

    def forward(self, x_Ti: Tensor, out_To: Tensor, multiply: Multiply = F.linear) -> Tensor:
        return out_To if self.is_off else out_To + self.delta(x_Ti, multiply)

    def delta(self, x_Ti: Tensor, multiply: Multiply = F.linear) -> Tensor:
        """Return the adapter's term, which is added to the linear layer's output [T, o]."""
        ax_parts = (multiply(self.dropout(x_Ti), self.lora_A) * self.scale).split(self.rank, dim=-1)
        parts = [multiply(ax_Tr, b) for ax_Tr, (_, b) in zip(ax_parts, self.factors(), strict=True)]
        return place_columns(list(zip(self.spans, parts, strict=True)), self.outputs)

    def factors(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield (A, B) of each part."""
        yield from zip(
            self.lora_A.split(self.rank, dim=-2),
            self.lora_B.split([len(span) for span in self.spans], dim=-2),
            strict=True,
        )

    @torch.no_grad()
    def merge_into(self, weight: Tensor) -> None:
        """Add scale B A to the linear layer's matrix, in place."""
        for span, (a, b) in zip(self.spans, self.factors(), strict=True):
            weight[..., span.start : span.stop, :] += (self.scale * (b @ a)).to(weight.dtype)


def place_columns(parts: Sequence[tuple[range, Tensor]], outputs: int) -> Tensor:
    """Return a tensor [..., outputs] with each part in its columns, and zeros in all other columns.

    Args:
        parts: (columns, tensor), in the order of their columns.
    """
    first_part = parts[0][1]
    blocks = []
    end = 0
    for columns, part in parts:
        if columns.start > end:
            blocks.append(first_part.new_zeros(*first_part.shape[:-1], columns.start - end))
        blocks.append(part)
        end = columns.stop
    if end < outputs:
        blocks.append(first_part.new_zeros(*first_part.shape[:-1], outputs - end))
    return torch.cat(blocks, dim=-1) if len(blocks) > 1 else blocks[0]


@contextmanager
def seed_dropout(model: nn.Module, seed: int) -> Iterator[None]:
    """Set the dropout seed of a model's adapters inside the context; no dropout after it."""
    dropouts = [module for module in model.modules() if isinstance(module, SeededDropout)]
    for module in dropouts:
        module.seed = seed
    try:
        yield
    finally:
        for module in dropouts:
            module.seed = None
