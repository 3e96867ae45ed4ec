"""Choose the linear maps of a model that get an adapter, without importing torch."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

from ratchet.config.model_shape.decoder_config import DecoderConfig
from ratchet.config.schema import LoRAConfig
from ratchet.errors import ConfigError

ALL = "all-linear"
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")


def resolve_decoder_targets(config: DecoderConfig, lora: LoRAConfig) -> tuple[str, ...]:
    """Return the names of the built-in decoder's linear maps that get an adapter.

    Raise ConfigError for an unknown name, and in a model with experts for "all-linear" or, if no
    layer is dense, for a name of an MLP map.
    """
    dense = len(config.sparse_layers) < config.n_layers
    names = resolve_target_modules(lora, (*ATTENTION, *MLP))
    if (
        config.n_experts
        and (experts := [name for name in names if name in MLP])
        and (lora.target_modules == ALL or not dense)
    ):
        raise ConfigError(
            f"lora.target_modules={ALL if lora.target_modules == ALL else experts[0]} includes the "
            "experts of a mixture, which "
            f"get no adapters here: set lora.target_modules=[{', '.join(ATTENTION)}]"
        )
    return names


def resolve_target_modules(lora: LoRAConfig, available: Iterable[str]) -> tuple[str, ...]:
    """Return the names in `lora.target_modules`, or all of them for "all-linear".

    Args:
        available: names of the linear maps that the model has.

    Raise ConfigError for a name that no map has, and suggests the nearest one.
    """
    names = list(dict.fromkeys(available))
    if lora.target_modules == ALL:
        return tuple(names)
    for name in lora.target_modules:
        if name not in names:
            near = get_close_matches(name, names, n=1)
            hint = f"did you mean '{near[0]}'?" if near else f"there are {', '.join(names)}"
            raise ConfigError(
                f"lora.target_modules: no linear map of the model's layers is called '{name}'; "
                f"{hint}"
            )
    return tuple(lora.target_modules)
