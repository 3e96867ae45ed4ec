"""Name, split and multiply the adapters of fused experts, in peft's form (`target_parameters`).

transformers keeps the experts of a layer in one module, with parameters such as gate_up_proj. peft
wraps this module once for each adapted parameter. Its A [E r, i] has the rows of one expert after
those of another, and its B [o, r E] has the columns of all experts side by side for each rank.

E = experts, r = rank, i = inputs, o = outputs of an expert's matrix.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from torch import Tensor, nn

from ratchet.config.lora import LoRAConfig
from ratchet.config.model_shape.lora_targets import (
    EXPERTS,
    FUSED,
    MLP,
    is_target,
    list_fused_parameters,
    resolve_target_parameters,
)
from ratchet.config.model_shape.megatron_decoder import MegatronDecoderConfig
from ratchet.errors import ModelError
from ratchet.models.lora.decoder import Factors
from ratchet.models.lora.files import StoredAdapter
from ratchet.models.transformers.expert_parallel import find_stacked_experts
from ratchet.models.weights.weight_layout import PEFT_PREFIX

BASE_LAYER = "base_layer"  # peft's name of what a layer wraps
# Families whose files have the parameters of experts as the model has them, [E, i, o].
TRANSPOSED_FAMILIES = ("gpt_oss",)


@dataclass(frozen=True)
class ExpertFactors(Factors):
    """The A and B of a fused parameter.

    is_transposed: True for a parameter [E, i, o], False for [E, o, i].
    """

    n_experts: int
    is_transposed: bool

    def split(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        """Return two stacks of E matrices, whose products have the parameter's layout."""
        a_Eri = a.unflatten(0, (self.n_experts, -1))
        b_Eor = b.unflatten(1, (-1, self.n_experts)).permute(2, 0, 1)
        return (a_Eri.mT, b_Eor.mT) if self.is_transposed else (b_Eor, a_Eri)

    def multiply(self, a: Tensor, b: Tensor) -> Tensor:
        first, second = self.split(a, b)
        return first @ second


def list_expert_parameters(model: nn.Module) -> dict[str, ExpertFactors]:
    """Return the fused parameters of a model without adapter, by name, in the model's order."""
    fused: dict[str, ExpertFactors] = {}
    for path, module in find_stacked_experts(model).items():
        is_transposed = bool(vars(module).get("is_transposed", False))
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.dim() == 3:
                fused[f"{path}.{name}"] = ExpertFactors(path, len(parameter), is_transposed)
    return fused


def resolve_expert_factors(
    lora: LoRAConfig, parameters: Mapping[str, ExpertFactors]
) -> dict[str, ExpertFactors]:
    """Return the factors of the parameters that `lora.target_parameters` selects, by name.

    Args:
        parameters: The fused parameters of the model, in its order.

    Raises ConfigError for a target that selects none of them.
    """
    names = resolve_target_parameters(lora, parameters)
    paths = nest_paths(names)
    return {name: replace(parameters[name], path=paths[name]) for name in names}


def nest_paths(names: Sequence[str]) -> dict[str, str]:
    """Return the path of each parameter's adapter.

    peft wraps the module of the first parameter, then the wrapper, so that the last parameter of a
    module has the outermost one.
    """
    paths: dict[str, str] = {}
    depths: dict[str, int] = {}
    for name in reversed(names):
        module = name.rpartition(".")[0]
        depth = depths.get(module, 0)
        paths[name] = module + f".{BASE_LAYER}" * depth
        depths[module] = depth + 1
    return paths


def strip_base_layers(name: str) -> str:
    """Return the name that a module or parameter had before peft wrapped it."""
    return ".".join(part for part in name.split(".") if part != BASE_LAYER)


@dataclass(frozen=True)
class ExpertMatrix(Factors):
    """The A and B of one expert's matrix, which is one of `n_parts` parts of a fused parameter."""

    n_experts: int
    expert: int
    part: int
    n_parts: int

    def multiply(self, a: Tensor, b: Tensor) -> Tensor:
        a_ri = a.unflatten(0, (self.n_experts, -1))[self.expert]
        b_or = b.unflatten(1, (-1, self.n_experts))[..., self.expert]
        return b_or.chunk(self.n_parts)[self.part] @ a_ri


def locate_stored_experts(
    stored: StoredAdapter, shapes: Mapping[str, tuple[int, ...]], family: str
) -> dict[str, Factors]:
    """Return the factors of the expert weights of a base, as its files have them, by name.

    Files have a matrix for each expert, or in a few families the parameters themselves.

    Args:
        shapes: Shapes of the base's weights, by name.
        family: The base's `model_type`.

    Raises ModelError if the base lacks a weight of these experts, or has another shape of it.
    """
    targets = stored.adapter.lora.target_parameters
    located: dict[str, Factors] = {}
    for module in dict.fromkeys(map(strip_base_layers, sorted(stored.fused_paths))):
        parameters = [f"{module}.{name}" for name in FUSED]
        paths = nest_paths([name for name in parameters if is_target(name, targets)])
        for parameter, path in paths.items():
            a, b = (
                stored.weights[f"{PEFT_PREFIX}{path}.lora_{factor}.weight"].to("meta")
                for factor in "AB"
            )
            n_experts = len(a) // stored.adapter.lora.rank
            factors = _name_in_files(parameter, path, n_experts, shapes, family)
            for name, of_weight in factors.items():
                shape = tuple(of_weight.multiply(a, b).shape)
                if shapes.get(name) != shape:
                    raise ModelError(
                        f"the adapter's '{path}' is for a weight '{name}' of shape {shape}, but "
                        f"the base model has {shapes.get(name, 'none')}: the adapter belongs to "
                        "another base model"
                    )
            located |= factors
    return located


def _name_in_files(
    parameter: str, path: str, n_experts: int, shapes: Mapping[str, object], family: str
) -> dict[str, Factors]:
    """Return the factors of a fused parameter's weights in files.

    Returns {} if no rule finds any, and for a base with more experts.
    """
    if parameter in shapes and family in TRANSPOSED_FAMILIES:
        return {parameter: ExpertFactors(path, n_experts, is_transposed=True)}
    module, _, kind = parameter.rpartition(".")
    for file_module in (module, module.replace(".mlp.", ".block_sparse_moe.")):
        for *gate_up, down in EXPERTS.values():
            parts = [down] if kind == "down_proj" else gate_up
            if f"{file_module}.0.{parts[0]}.weight" not in shapes:
                continue
            if f"{file_module}.{n_experts}.{parts[0]}.weight" in shapes:
                return {}
            return _split_experts(file_module, parts, path, n_experts)
    return {}


def _split_experts(
    module: str, parts: Sequence[str], path: str, n_experts: int
) -> dict[str, Factors]:
    """Return the factors of each expert's matrices, which are parts of a fused parameter."""
    return {
        f"{module}.{expert}.{name}.weight": ExpertMatrix(path, n_experts, expert, part, len(parts))
        for expert in range(n_experts)
        for part, name in enumerate(parts)
    }


def locate_decoder_experts(shape: MegatronDecoderConfig, lora: LoRAConfig) -> dict[str, Factors]:
    """Return the factors of a decoder's expert weights that an adapter adapts, by name in files.

    Raises ConfigError for a target that selects none of them.
    """
    located: dict[str, Factors] = {}
    for parameter, factors in resolve_decoder_factors(shape, lora).items():
        if factors.is_transposed:
            located[parameter] = factors
            continue
        module, _, kind = parameter.rpartition(".")
        *gate_up, down = MLP
        parts = [down] if kind == "down_proj" else gate_up
        located |= _split_experts(module, parts, factors.path, factors.n_experts)
    return located


def resolve_decoder_factors(
    shape: MegatronDecoderConfig, lora: LoRAConfig
) -> dict[str, ExpertFactors]:
    """Return the factors of a decoder's fused parameters that an adapter adapts, by name.

    Raises ConfigError for a target that selects none of them.
    """
    is_transposed = shape.family in TRANSPOSED_FAMILIES
    every = ExpertFactors("", shape.n_experts, is_transposed)
    return resolve_expert_factors(lora, dict.fromkeys(list_fused_parameters(shape), every))
