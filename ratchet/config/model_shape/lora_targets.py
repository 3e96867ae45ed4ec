"""Choose the linear layers of a model that get an adapter, without importing torch."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

from ratchet.config.lora import LoRAConfig
from ratchet.config.model_shape.decoder_config import DecoderConfig
from ratchet.errors import ConfigError

ALL = "all-linear"
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")


def resolve_decoder_targets(config: DecoderConfig, lora: LoRAConfig) -> tuple[str, ...]:
    """Return the names of the built-in decoder's linear layers that get an adapter.

    Raises ConfigError for an unknown name. In a model with experts it also raises for "all-linear",
    and for the name of an MLP map if every layer has experts.
    """
    has_dense_layers = len(config.sparse_layers) < config.n_layers
    names = resolve_target_modules(lora, (*ATTENTION, *MLP))
    if (
        config.n_experts
        and (experts := [name for name in names if name in MLP])
        and (lora.target_modules == ALL or not has_dense_layers)
    ):
        raise ConfigError(
            f"lora.target_modules={ALL if lora.target_modules == ALL else experts[0]} includes "
            f"experts, which get no adapters: set lora.target_modules=[{', '.join(ATTENTION)}]"
        )
    return names


def resolve_target_modules(lora: LoRAConfig, available: Iterable[str]) -> tuple[str, ...]:
    """Return the names in `lora.target_modules`, or all of them for "all-linear".

    Args:
        available: names of the linear layers that the model has.

    Raises ConfigError for a name that no map has; the error suggests the nearest name.
    """
    names = list(dict.fromkeys(available))
    if lora.target_modules == ALL:
        return tuple(names)
    for name in lora.target_modules:
        if name not in names:
            near = get_close_matches(name, names, n=1)
            hint = f"did you mean '{near[0]}'?" if near else f"there are {', '.join(names)}"
            raise ConfigError(
                f"lora.target_modules: no linear layer of the model is called '{name}'; {hint}"
            )
    return tuple(lora.target_modules)
