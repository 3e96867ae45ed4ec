"""Choose the linear layers of a model that get an adapter, without importing torch."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

from ratchet.config.lora import LoRAConfig
from ratchet.config.model_shape.decoder_config import FAMILIES, DecoderConfig
from ratchet.config.model_shape.megatron_decoder import MegatronDecoderConfig
from ratchet.errors import ConfigError

ALL = "all-linear"
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")
# Of the matrices of an expert, by the way in which a family writes them.
EXPERTS = {
    moe: (*moe.gate_up, moe.down) for family in FAMILIES.values() if (moe := family.moe) is not None
}
# The fused parameters of transformers' experts, in its order, with their number of matrices.
FUSED = {"gate_up_proj": 2, "down_proj": 1}
# Of all families.
DECODER_NAMES = (*ATTENTION, *MLP, *(name for names in EXPERTS.values() for name in names))


def resolve_decoder_targets(config: DecoderConfig, lora: LoRAConfig) -> tuple[str, ...]:
    """Return the names of the built-in decoder's linear layers that get an adapter.

    A name selects the matrices with that name in the layers and in all experts of a layer.

    Raises ConfigError for an unknown name.
    """
    if isinstance(config, MegatronDecoderConfig):
        resolve_target_parameters(lora, list_fused_parameters(config))  # refuses unknown names
        return _resolve_megatron_targets(config, lora)
    if lora.target_parameters:
        raise ConfigError(refuse_target_parameters())
    dense = () if len(config.sparse_layers) == config.n_layers else MLP
    return resolve_target_modules(lora, (*ATTENTION, *dense, *get_expert_matrices(config)))


def _resolve_megatron_targets(config: MegatronDecoderConfig, lora: LoRAConfig) -> tuple[str, ...]:
    """Return the names of linear layers that get an adapter in a model that Megatron runs.

    transformers runs the same model in generators, so these are linear layers of transformers too.
    It has the routed experts of a layer in fused parameters, and peft takes the names of MLPs for
    these, except in Qwen2-MoE, where all-linear has the gate of the shared expert.

    Raises ConfigError for a name of another layer, and for all-linear if there are others.
    """
    if config.latent is not None:
        queries = ("q_a_proj", "q_b_proj") if config.latent.q_rank else ("q_proj",)
        names = (*queries, "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")
    else:
        names = (*ATTENTION, *MLP) if config.has_shared_gate else ATTENTION
    unknown = set() if lora.target_modules == ALL else set(lora.target_modules) - set(names)
    has_others = lora.target_modules == ALL and config.shared_intermediate_size > 0
    if has_others or unknown:
        chosen = ALL if has_others else ", ".join(sorted(unknown))
        raise ConfigError(
            f"lora.target_modules={chosen} has linear layers that learner.kind=megatron can't "
            f"adapt in a {config.family} model. Set lora.target_modules=[{', '.join(names)}]."
        )
    return resolve_target_modules(lora, names)


def list_fused_parameters(config: DecoderConfig) -> dict[str, tuple[int, str]]:
    """Return (layer, last part of the name) of the fused parameters of transformers' experts."""
    return {
        f"model.layers.{layer}.mlp.experts.{parameter}": (layer, parameter)
        for layer in config.sparse_layers
        for parameter in FUSED
    }


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


def resolve_target_parameters(lora: LoRAConfig, available: Iterable[str]) -> tuple[str, ...]:
    """Return the parameters that `lora.target_parameters` selects, in the model's order.

    Args:
        available: names of the fused parameters of experts that the model has, in its order.

    Raises ConfigError for a target that selects none.
    """
    names = list(available)
    for target in lora.target_parameters:
        if not any(is_target(name, [target]) for name in names):
            short_names = dict.fromkeys(".".join(name.split(".")[-3:]) for name in names)
            hint = f"has {', '.join(short_names)}" if names else "has none: remove it"
            raise ConfigError(
                f"lora.target_parameters={target} is no fused parameter of the model's experts, "
                f"which {hint}"
            )
    return tuple(name for name in names if is_target(name, lora.target_parameters))


def refuse_target_parameters() -> str:
    """Return why a model of Ratchet's own decoder can't have `lora.target_parameters`."""
    return (
        "lora.target_parameters names fused experts, and Ratchet's own decoder, which this model "
        "has, fuses none. Name the experts' matrices in lora.target_modules"
    )


def is_target(name: str, targets: Iterable[str]) -> bool:
    """True if a parameter's name is one of the targets, or ends with one, as in peft."""
    return any(f".{name}".endswith(f".{target}") for target in targets)
