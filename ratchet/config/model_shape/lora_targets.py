"""Choose the linear layers of a model that get an adapter, without importing torch."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

from ratchet.config.lora import LoRAConfig
from ratchet.config.model_shape.decoder_config import FAMILIES, DecoderConfig
from ratchet.errors import ConfigError

ALL = "all-linear"
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")
# Of the matrices of an expert, by the way in which a family writes them.
EXPERTS = {
    moe: (*moe.gate_up, moe.down) for family in FAMILIES.values() if (moe := family.moe) is not None
}
# Of all families.
DECODER_NAMES = (*ATTENTION, *MLP, *(name for names in EXPERTS.values() for name in names))


def resolve_decoder_targets(config: DecoderConfig, lora: LoRAConfig) -> tuple[str, ...]:
    """Return the names of the built-in decoder's linear layers that get an adapter.

    A name selects the matrices with that name in the layers and in all experts of a layer.

    Raises ConfigError for an unknown name.
    """
    dense = () if len(config.sparse_layers) == config.n_layers else MLP
    return resolve_target_modules(lora, (*ATTENTION, *dense, *get_expert_matrices(config)))


def get_expert_matrices(config: DecoderConfig) -> tuple[str, ...]:
    """Return the names of the matrices of an expert; () if no layer has experts."""
    moe = FAMILIES[config.family].moe
    return () if moe is None or not config.sparse_layers else EXPERTS[moe]


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
