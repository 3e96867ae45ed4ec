"""LoRA adapters of a policy: which maps get one, how they begin, what their weights are called, and
what merging makes of them.

Names are those of peft's files: `base_model.model.<path of the map>.lora_A.weight` [r, inputs],
`lora_B` [outputs, r].
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import blake2b

import torch
from torch import Tensor, nn

from ratchet.config.schema import LoRAConfig
from ratchet.errors import ModelError
from ratchet.models.decoder import Decoder
from ratchet.models.lora.layers import LowRank, Switched
from ratchet.models.lora.targets import targets_of
from ratchet.models.weights.hf_weights import Savable
from ratchet.models.weights.weight_layout import PEFT, Piece, pieces, shards


@dataclass(frozen=True)
class Adapter:
    """seed: of A. base: directory or hub id of the model that it belongs to, for its files."""

    lora: LoRAConfig
    seed: int = 0
    base: str = ""

    def first(self, name: str, shape: Sequence[int]) -> Tensor:
        """A whole weight before the first step, by its name: the same bits whoever asks, and
        wherever it is divided. A: uniform with variance 1 / (3 inputs) (kaiming), or normal with
        deviation 1 / rank (gaussian). B: 0."""
        if ".lora_B." in name:
            return torch.zeros(*shape)
        seed = int.from_bytes(
            blake2b(f"{self.seed}/{name}".encode(), digest_size=7).digest(), "big"
        )
        generator, a = torch.Generator().manual_seed(seed), torch.empty(*shape, device="cpu")
        if self.lora.init == "gaussian":
            return a.normal_(0.0, 1 / self.lora.rank, generator=generator)
        bound = shape[1] ** -0.5
        return a.uniform_(-bound, bound, generator=generator)


def size_of(weights: Mapping[str, Tensor], names: Iterable[str], rank: int) -> int:
    """Parameters of an adapter. weights: of the model. names: of the maps that have one."""
    wanted = set(names)
    adapted = (
        w
        for name, w in weights.items()
        if name.endswith(".weight") and name.split(".")[-2] in wanted
    )
    return sum(rank * sum(w.shape) for w in adapted)


# --- on our decoder


def attach(decoder: Decoder, adapter: Adapter) -> None:
    """As `fit`; and whatever the decoder had trains no more, and rests quantised where the section
    says so."""
    targets_of(decoder.config, adapter.lora)
    decoder.requires_grad_(False)
    if adapter.lora.base is not None:
        for _, linear in decoder.inner_maps:
            linear.quantise(adapter.lora.base)
    fit(decoder, adapter)


def fit(decoder: Decoder, adapter: Adapter) -> None:
    """Gives the decoder's maps adapters as they begin, which change nothing yet. Raises ConfigError
    as `targets_of` does."""
    wanted, lora = targets_of(decoder.config, adapter.lora), adapter.lora
    layout = pieces(decoder)
    for place, (path, linear) in enumerate(decoder.inner_maps):
        parts = [
            piece.rows for piece in layout[f"{path}.weight"] if piece.name.split(".")[-2] in wanted
        ]
        if parts:
            weight = linear.weight if linear.quantised is None else linear.quantised
            linear.adapter = LowRank(
                weight, parts, rank=lora.rank, scale=lora.scale, dropout=lora.dropout, place=place
            )
    begin(decoder, adapter, pieces(decoder))


@torch.no_grad()
def begin(module: nn.Module, adapter: Adapter, layout: Mapping[str, tuple[Piece, ...]]) -> None:
    """Fills the adapters in a module with their first values: of each, what lies here. layout: by
    the parameters' names."""
    for name, parameter in adapter_parameters(module):
        for block in shards(layout[name], parameter):
            whole = adapter.first(block.name, block.shape)
            block.tensor.copy_(
                whole[
                    tuple(
                        slice(o, o + n)
                        for o, n in zip(block.offsets, block.tensor.shape, strict=True)
                    )
                ]
            )


def merge(decoder: Decoder) -> None:
    """Adds the adapters to the matrices, and takes them away; all weights may train then."""
    for _, linear in decoder.inner_maps:
        linear.restore()
        if isinstance(linear.adapter, LowRank):
            linear.adapter.merge_into(linear.weight)
            linear.adapter = None
    decoder.requires_grad_(True)


def adapter_parameters(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    return ((name, parameter) for name, parameter in module.named_parameters() if of_adapter(name))


def of_adapter(name: str) -> bool:
    """Whether a parameter of a module belongs to an adapter, ours or peft's."""
    return ".lora_A" in name or ".lora_B" in name


def adapter_weights(decoder: Decoder) -> Iterator[tuple[str, Tensor]]:
    """(peft's name, detached view into a parameter)"""
    layout = pieces(decoder)
    for name, parameter in adapter_parameters(decoder):
        for block in shards(layout[name], parameter.detach()):
            yield block.name, block.tensor


@contextmanager
def switched_off(model: nn.Module) -> Iterator[None]:
    found = [module for module in model.modules() if isinstance(module, Switched)]
    for module in found:
        module.off = True
    try:
        yield
    finally:
        for module in found:
            module.off = False


# --- merged, weight by weight


@dataclass(frozen=True)
class Merged:
    """Implements `Savable`: a weight with its adapter in it, computed when it is asked for, in
    float32 or better."""

    base: Savable
    a: Savable
    b: Savable
    scale: float

    def numel(self) -> int:
        return self.base.numel()

    def to(self, device: str, dtype: torch.dtype, *, copy: bool) -> Tensor:
        wide = torch.promote_types(dtype, torch.float32)
        w, a, b = (part.to(device, wide, copy=True) for part in (self.base, self.a, self.b))
        return w.add_(b @ a, alpha=self.scale).to(dtype)


def merged(
    weights: Mapping[str, Savable], adapter: Mapping[str, Savable], scale: float
) -> dict[str, Savable]:
    """The weights of a model, those that have an adapter with it. Raises ModelError for one of a
    weight that isn't there."""
    left = set(adapter)
    made: dict[str, Savable] = {}
    for name, weight in weights.items():
        a, b = (f"{PEFT}{name.removesuffix('.weight')}.lora_{which}.weight" for which in "AB")
        has = a in adapter and b in adapter
        made[name] = Merged(weight, adapter[a], adapter[b], scale) if has else weight
        left -= {a, b} if has else set()
    if left:
        raise ModelError(
            f"the adapter's weight '{min(left)}' is of a map that this model doesn't have: it has "
            "another base"
        )
    return made
