"""Add LoRA adapters to a transformers model by injecting peft's layers.

Initial values and dropout are not peft's: both follow from a seed, as in the built-in decoder.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ratchet.errors import ModelError
from ratchet.models.lora.decoder import (
    Adapter,
    adapter_parameters,
    init_adapters,
    is_adapter_parameter,
)
from ratchet.models.lora.experts import list_expert_parameters, strip_base_layers
from ratchet.models.lora.files import peft_config
from ratchet.models.lora.layers import SeededDropout
from ratchet.models.transformers.expert_parallel import LocalExperts
from ratchet.models.weights.weight_layout import PEFT_PREFIX, WeightPiece, make_whole_piece

ADAPTER_NAME = "default"  # peft's name for an unnamed adapter


def list_linear_layers(layers: Sequence[nn.Module]) -> list[str]:
    """Return the names of the linear layers in modules without adapters, such as q_proj."""
    paths = (
        path
        for layer in layers
        for path, module in layer.named_modules()
        if isinstance(module, nn.Linear)
    )
    return list(dict.fromkeys(path.rpartition(".")[2] for path in paths))


@torch.no_grad()
def attach(
    model: nn.Module,
    adapter: Adapter,
    names: Sequence[str],
    experts: Collection[str] = (),
    *,
    pieces: Mapping[str, tuple[WeightPiece, ...]] | None = None,
    divided: Sequence[LocalExperts] = (),
    within: nn.Module | None = None,
) -> None:
    """Inject an adapter into a model, with its initial values, and freeze all other weights.

    A pipeline stage may lack some of the layers and parameters.

    Args:
        names: Names of the linear layers to adapt.
        experts: Names of the fused parameters of experts to adapt.
        pieces: This rank's pieces of the adapter's weights that it has a part of, by name.
        divided: This rank's experts, if ranks divide them.
        within: The part of the model that gets the adapter; None: the whole model.

    Raises ModelError if peft can't adapt the model, or takes the names of linear layers for
    matrices of experts.
    """
    from peft import inject_adapter_in_model
    from peft.tuners.lora.layer import ParamWrapper

    from ratchet.models.lora.expert_layer import ExpertLoRA, apply_inside

    model.requires_grad_(False)
    available = list_linear_layers([within or model])
    names = [name for name in names if name in available]
    experts = [name for name in list_expert_parameters(model) if name in experts]
    if not names and not experts:
        return
    config = peft_config(adapter, names)
    if not experts:
        config.target_parameters = None
    try:
        inject_adapter_in_model(config, within or model, adapter_name=ADAPTER_NAME)
    except (ValueError, NotImplementedError) as error:
        raise ModelError(f"peft can't give {type(model).__name__} an adapter: {error}") from None
    layers = _find_lora_layers(model)
    expert_layers = {path for path, layer in layers.items() if isinstance(layer, ParamWrapper)}
    # peft takes the names of an expert's matrices for the fused parameters of all experts.
    linear_names = {path.rpartition(".")[2] for path in layers.keys() - expert_layers}
    if not linear_names.issuperset(names) or len(expert_layers) != len(experts):
        others = ", ".join(name for name in names if name in linear_names)
        raise ModelError(
            f"lora.target_modules names matrices of experts, which {type(model).__name__} has in "
            f"fused parameters. Set lora.target_modules=[{others}], and lora.target_parameters for "
            "experts."
        )
    for path, layer in layers.items():
        if path in expert_layers:
            layer.__class__ = ExpertLoRA  # peft has no way to choose the class of these layers
            continue
        _widen(layer, adapter.lora.rank)
        layer.lora_dropout[ADAPTER_NAME] = SeededDropout(adapter.lora.dropout, path)
    apply_inside(model, divided)
    _set_initial_weights(model, adapter, pieces or {})


def _set_initial_weights(
    model: nn.Module, adapter: Adapter, pieces: Mapping[str, tuple[WeightPiece, ...]]
) -> None:
    """Give the weights of an adapter their initial values, and let an optimizer train them."""
    layout: dict[str, tuple[WeightPiece, ...]] = {}
    for name, parameter in adapter_parameters(model):
        parameter.requires_grad_(True)
        weight_name = get_canonical_name(name)
        layout[name] = pieces.get(weight_name, (make_whole_piece(weight_name, parameter),))
    init_adapters(model, adapter, layout)


def _widen(layer: Any, rank: int) -> None:
    """Give a layer's factors the sizes of the whole matrix.

    peft gives them the sizes of this rank's rows where FSDP divides the matrix, but FSDP gathers
    the matrix before it is used.
    """
    linear = layer.get_base_layer()
    sizes = {"A": (rank, linear.in_features), "B": (linear.out_features, rank)}
    for factor, size in sizes.items():
        part = getattr(layer, f"lora_{factor}")[ADAPTER_NAME]
        if part.weight.shape != size:
            part.weight = nn.Parameter(part.weight.new_empty(size))


def merge(model: nn.Module) -> None:
    """Add the adapter to the weights, remove it, and unfreeze all weights."""
    layers = _find_lora_layers(model)
    for path, layer in layers.items():
        layer.merge()
        parent, _, name = path.rpartition(".")
        if parent not in layers:
            setattr(model.get_submodule(parent), name, layer.get_base_layer())
    model.requires_grad_(True)


def canonical_weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield (Hugging Face name, detached tensor) of each weight that is not the adapter's."""
    for name, parameter in model.named_parameters():
        if not is_adapter_parameter(name):
            yield get_canonical_name(name), parameter.detach()


def adapter_weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield (peft's name, detached tensor) of the adapter's weights."""
    for name, parameter in adapter_parameters(model):
        yield get_canonical_name(name), parameter.detach()


@contextmanager
def disable_peft_adapters(model: nn.Module) -> Iterator[None]:
    """Switch a model's adapter off inside the context."""
    layers = _find_lora_layers(model).values()
    for layer in layers:
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)


def _find_lora_layers(model: nn.Module) -> dict[str, Any]:
    """Return peft's layers by path."""
    from peft.tuners.lora import LoraLayer

    return {path: module for path, module in model.named_modules() if isinstance(module, LoraLayer)}


def get_canonical_name(name: str) -> str:
    """Return the name of a parameter in files: Hugging Face's, or peft's for an adapter's."""
    if is_adapter_parameter(name):
        return f"{PEFT_PREFIX}{name.replace(f'.{ADAPTER_NAME}.', '.')}"
    return strip_base_layers(name)
