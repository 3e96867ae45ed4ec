"""Merge an adapter into a model's weights lazily: a weight is computed when it is read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor

from ratchet.commands.convert.formats import Weights
from ratchet.models.lora.decoder import MergedWeight, merge_lazily
from ratchet.models.lora.experts import locate_stored_experts
from ratchet.models.lora.files import StoredAdapter


@dataclass(frozen=True)
class _StoredTensor:
    """A `SavableTensor` that is read from disk."""

    weights: Weights
    name: str

    def numel(self) -> int:
        return torch.Size(self.weights.shapes[self.name]).numel()

    def to(self, device: str, dtype: torch.dtype, *, copy: bool) -> Tensor:
        return self.weights.read_whole(self.name).to(device, dtype, copy=copy)


def merge_adapter(weights: Weights, stored: StoredAdapter, family: str) -> Weights:
    """Return the weights merged with the adapter.

    family: The `model_type` of the model.

    The sums are computed in float32 or better, and each weight keeps its dtype. Raises ModelError
    if the adapter belongs to another base model.
    """
    experts = locate_stored_experts(stored, weights.shapes, family)
    stored.check(weights.shapes, experts)
    merged_weights = merge_lazily(
        {name: _StoredTensor(weights, name) for name in weights.shapes},
        stored.weights,
        stored.adapter.lora.scale,
        experts,
    )

    @lru_cache(maxsize=3)  # a fused matrix of Megatron (QKV) alternates between three weights
    def read_merged(name: str) -> Tensor:
        return merged_weights[name].to("cpu", weights.dtypes[name], copy=True)

    def read(name: str, offsets: Sequence[int], sizes: Sequence[int]) -> Tensor:
        if not isinstance(merged_weights[name], MergedWeight):
            return weights.read(name, offsets, sizes)
        # The whole weight is merged, so that its bits do not depend on the block. Merging only the
        # block could round differently, because its matrix product has another shape.
        return read_merged(name)[
            tuple(slice(start, start + size) for start, size in zip(offsets, sizes, strict=True))
        ]

    return replace(weights, read=read)
