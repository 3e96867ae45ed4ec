"""Add LoRA adapters to the built-in decoder: initial values, weight names and merging.

Names are those of peft's files: `base_model.model.<path of the linear layer>.lora_A.weight` [r,
inputs] and `.lora_B.weight` [outputs, r].
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import blake2b
from typing import cast

import torch
from torch import Tensor, nn

from ratchet.config.lora import LoRAConfig
from ratchet.config.model_shape.lora_targets import resolve_decoder_targets
from ratchet.errors import ModelError
from ratchet.models.decoder import Decoder
from ratchet.models.layers.quantized import QuantizedMatrix
from ratchet.models.lora.layers import FusedLoRA, SwitchableAdapter
from ratchet.models.weights.hf_weights import SavableTensor
from ratchet.models.weights.weight_layout import PEFT_PREFIX, WeightPiece, cut_blocks, list_pieces
from ratchet.protocols import Shard


@dataclass(frozen=True)
class Adapter:
    """The settings of an adapter and its initial values."""

    lora: LoRAConfig
    seed: int = 0  # seed of the initial A
    base_model: str = ""  # directory or Hub id, written to the adapter's files

    def initial_weight(self, name: str, shape: Sequence[int]) -> Tensor:
        """Return the initial value of a whole weight of the adapter.

        It is a function of the seed and the name, so its bits don't depend on how the weight is
        sharded. A is uniform with variance 1 / (3 inputs) (kaiming), or normal with standard
        deviation 1 / rank (gaussian). B is 0.
        """
        if ".lora_B." in name:
            return torch.zeros(*shape)
        seed = int.from_bytes(
            blake2b(f"{self.seed}/{name}".encode(), digest_size=7).digest(), "big"
        )
        generator = torch.Generator().manual_seed(seed)
        a = torch.empty(*shape, device="cpu")
        if self.lora.init == "gaussian":
            return a.normal_(0.0, 1 / self.lora.rank, generator=generator)
        bound = shape[1] ** -0.5
        return a.uniform_(-bound, bound, generator=generator)


def count_adapter_parameters(
    weights: Mapping[str, Tensor], names: Iterable[str], rank: int, experts: Iterable[str] = ()
) -> int:
    """Return the number of parameters of an adapter.

    Args:
        weights: Weights of the model, by canonical name.
        names: Names of the linear layers that get an adapter (last path parts, such as q_proj).
        rank: Rank of the adapter.
        experts: Names of the fused weights of experts [E, ...] that get an adapter.
    """
    target_names = set(names)
    adapted = (
        weight
        for name, weight in weights.items()
        if name.endswith(".weight") and name.split(".")[-2] in target_names
    )
    fused = (weights[name] for name in experts)
    return rank * (
        sum(sum(weight.shape) for weight in adapted)
        + sum(len(weight) * sum(weight.shape[1:]) for weight in fused)
    )


# --- on the built-in decoder


def attach(decoder: Decoder, adapter: Adapter) -> None:
    """Freeze a decoder, quantize its linear layers as `lora.base` says, and add adapters.

    `lora.base` is the quantization of the base weights; None: they are not quantized.

    Raises ConfigError as `resolve_decoder_targets` does.
    """
    resolve_decoder_targets(decoder.config, adapter.lora)
    decoder.requires_grad_(False)
    if adapter.lora.base is not None:
        for _, linear in decoder.layer_linears:
            linear.quantise(adapter.lora.base)
    add_adapters(decoder, adapter)


def add_adapters(decoder: Decoder, adapter: Adapter) -> None:
    """Add adapters with their initial values, which leave all outputs unchanged.

    Raises ConfigError as `resolve_decoder_targets` does.
    """
    lora = adapter.lora
    target_names = resolve_decoder_targets(decoder.config, lora)
    layout = list_pieces(decoder)

    def make(name: str, weight: Tensor | QuantizedMatrix) -> FusedLoRA | None:
        """Return the adapter of a parameter; None if it has no target."""
        spans = [
            piece.rows
            for piece in layout[name]
            # All experts have the spans of the first.
            if piece.name.split(".")[-2] in target_names and piece.rows.stop <= weight.shape[-2]
        ]
        if not spans:
            return None
        return FusedLoRA(
            weight, spans, rank=lora.rank, scale=lora.scale, dropout=lora.dropout, name=name
        )

    for path, linear in decoder.layer_linears:
        linear.adapter = make(
            f"{path}.weight", linear.weight if linear.quantised is None else linear.quantised
        )
    for path, experts in decoder.layer_experts:
        for name, weight in experts.matrices:
            if (expert_adapter := make(f"{path}.{name}", weight)) is not None:
                experts.adapters[name] = expert_adapter
    init_adapters(decoder, adapter, list_pieces(decoder))


@torch.no_grad()
def init_adapters(
    module: nn.Module, adapter: Adapter, layout: Mapping[str, tuple[WeightPiece, ...]]
) -> None:
    """Fill the adapters in a module, or this rank's shard of them, with their initial values.

    Args:
        layout: The pieces of each adapter parameter, by parameter name.
    """
    # Several parameters may have blocks of one weight: those of the experts of a fused parameter.
    blocks_by_weight: dict[str, list[Shard]] = {}
    for name, parameter in adapter_parameters(module):
        for block in cut_blocks(layout[name], parameter):
            blocks_by_weight.setdefault(block.name, []).append(block)
    for weight, blocks in blocks_by_weight.items():
        whole = adapter.initial_weight(weight, blocks[0].shape)
        for block in blocks:
            block.tensor.copy_(
                whole[
                    tuple(
                        slice(offset, offset + size)
                        for offset, size in zip(block.offsets, block.tensor.shape, strict=True)
                    )
                ]
            )


def merge(decoder: Decoder) -> None:
    """Merge the adapters into the (dequantized) weights, remove them, and unfreeze all weights."""
    for _, linear in decoder.layer_linears:
        linear.restore()
        if isinstance(linear.adapter, FusedLoRA):
            linear.adapter.merge_into(linear.weight)
            linear.adapter = None
    for _, experts in decoder.layer_experts:
        for name, adapter in experts.adapters.items():
            cast(FusedLoRA, adapter).merge_into(getattr(experts, name))
        experts.adapters.clear()
    decoder.requires_grad_(True)


def adapter_parameters(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Return the (name, parameter) pairs of the adapters in a module."""
    return (
        (name, parameter)
        for name, parameter in module.named_parameters()
        if is_adapter_parameter(name)
    )


def is_adapter_parameter(name: str) -> bool:
    """True if a name, Ratchet's or peft's, is that of an adapter parameter."""
    return ".lora_A" in name or ".lora_B" in name


def adapter_weights(decoder: Decoder) -> Iterator[tuple[str, Tensor]]:
    """Yield peft's name and a detached view of each adapter weight."""
    layout = list_pieces(decoder)
    for name, parameter in adapter_parameters(decoder):
        for block in cut_blocks(layout[name], parameter.detach()):
            yield block.name, block.tensor


@contextmanager
def disable_adapters(model: nn.Module) -> Iterator[None]:
    """Switch a model's adapters off inside the context."""
    adapters = [module for module in model.modules() if isinstance(module, SwitchableAdapter)]
    for module in adapters:
        module.is_off = True
    try:
        yield
    finally:
        for module in adapters:
            module.is_off = False


# --- merging one weight at a time


@dataclass(frozen=True)
class Factors:
    """The A and B of a weight.

    path: the path of the layer that has them, in peft's names.
    """

    path: str

    def multiply(self, a: Tensor, b: Tensor) -> Tensor:
        """Return B A in the layout of the weight."""
        return b @ a


@dataclass(frozen=True)
class MergedWeight:
    """A weight whose adapter is added each time it is read, in float32 or better.

    It implements `SavableTensor`.
    """

    base: SavableTensor
    a: SavableTensor
    b: SavableTensor
    factors: Factors
    scale: float

    def numel(self) -> int:
        return self.base.numel()

    def to(self, device: str, dtype: torch.dtype, *, copy: bool) -> Tensor:
        merge_dtype = torch.promote_types(dtype, torch.float32)
        base, a, b = (
            part.to(device, merge_dtype, copy=True) for part in (self.base, self.a, self.b)
        )
        return base.add_(self.factors.multiply(a, b), alpha=self.scale).to(dtype)


def merge_lazily(
    weights: Mapping[str, SavableTensor],
    adapter: Mapping[str, SavableTensor],
    scale: float,
    experts: Mapping[str, Factors] | None = None,
) -> dict[str, SavableTensor]:
    """Return the weights of a model with its adapter, which is merged as each weight is read.

    Args:
        weights: The model's weights, by name.
        adapter: The adapter's weights, by peft's names.
        scale: The factor of B A.
        experts: The factors of weights of fused experts, by name. All other weights are those of
            linear layers.

    Raises ModelError if the adapter has a weight for a linear layer that the model lacks.
    """
    unused = set(adapter)
    merged_weights: dict[str, SavableTensor] = {}
    for name, weight in weights.items():
        factors = (experts or {}).get(name) or Factors(name.removesuffix(".weight"))
        a_name, b_name = (f"{PEFT_PREFIX}{factors.path}.lora_{factor}.weight" for factor in "AB")
        if a_name in adapter and b_name in adapter:
            weight = MergedWeight(weight, adapter[a_name], adapter[b_name], factors, scale)
            unused -= {a_name, b_name}
        merged_weights[name] = weight
    if unused:
        raise ModelError(
            f"the adapter's weight '{min(unused)}' is for a linear layer that this model doesn't "
            "have: the adapter belongs to another base model"
        )
    return merged_weights
