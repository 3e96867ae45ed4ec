"""Map the parameters of a Megatron rank to blocks of canonical weights.

If several ranks hold the same block, exactly one of them saves and sends it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from megatron.core import parallel_state
from megatron.core.tensor_parallel import param_is_not_tensor_parallel_duplicate
from torch import Tensor, nn

from ratchet.models.convert.dimensions import Dimensions
from ratchet.models.convert.megatron import Layout, MegatronShard, fill_parameters, megatron_layout
from ratchet.models.convert.packed_experts import read_single_experts
from ratchet.models.convert.tables import EMBEDDING
from ratchet.models.lora.decoder import is_adapter_parameter
from ratchet.models.megatron.build import MegatronStage
from ratchet.models.megatron.low_rank import LoRAFactors, belongs_to_expert
from ratchet.models.model_source import ReadBlock
from ratchet.models.parallel.megatron_sizes import MegatronSizes
from ratchet.models.parallel.sharding import ShardIndex
from ratchet.models.weights.weight_layout import WeightPiece, make_whole_piece

ROUTER_BIAS = ".expert_bias"  # the end of the name of a router's bias
SCALAR = "scalar."  # prefix of the scalar head's parameters in a stage


@dataclass(frozen=True)
class StageParameter:
    """A parameter of a stage with its blocks."""

    name: str  # name in its stage
    parameter: Tensor  # a parameter, or the bias of a router, which is a buffer
    pieces: tuple[WeightPiece, ...]
    is_owner: bool  # True if this rank saves and sends the parameter


def make_stage_layout(stage: MegatronStage, sizes: MegatronSizes) -> Layout:
    """Return the pieces of a stage's model weights (without adapters), by parameter name."""
    shard = MegatronShard(
        tensor=ShardIndex(parallel_state.get_tensor_model_parallel_rank(), sizes.tensor),
        pipeline=stage.stage_index,
        experts=ShardIndex(parallel_state.get_expert_model_parallel_rank(), sizes.experts),
    )
    return megatron_layout(Dimensions.from_config(stage.shape), shard)


def make_adapter_layout(stage: MegatronStage) -> Layout:
    """Return the pieces of a stage's adapters, by parameter name."""
    factors = (
        (path, module) for path, module in stage.named_modules() if isinstance(module, LoRAFactors)
    )
    return {
        f"{path}.{factor}": pieces
        for path, module in factors
        for factor, pieces in module.pieces.items()
    }


def list_stage_parameters(
    stages: Sequence[MegatronStage], sizes: MegatronSizes
) -> Iterator[StageParameter]:
    """Yield all parameters of the stages, in order."""
    for stage in stages:
        layout = {**make_stage_layout(stage, sizes), **make_adapter_layout(stage)}
        for name, parameter in list_weights(stage):
            pieces = (
                (make_whole_piece(f"head.{name[len(SCALAR) :]}", parameter),)
                if name.startswith(SCALAR)
                else layout[name]
            )
            # A tied head is a copy of the embedding, which the first stage saves and sends. A last
            # stage with MTP layers has a copy under the embedding's own name.
            is_copy = (name == "output_layer.weight" and stage.shape.tied) or (
                name in EMBEDDING and not stage.pre_process
            )
            yield StageParameter(name, parameter, pieces, not is_copy and _is_owner(parameter))


def fill_stages(stages: Sequence[MegatronStage], sizes: MegatronSizes, read: ReadBlock) -> None:
    """Copy every block of the model weights from `read` into the stages."""
    if Dimensions.from_config(stages[0].shape).has_packed_experts:
        read = read_single_experts(read)
    for stage in stages:
        tensors = {name: weight for name, weight in list_weights(stage) if is_model_weight(name)}
        fill_parameters(tensors, make_stage_layout(stage, sizes), read)


def list_weights(stage: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, tensor) of all parameters, and of the biases of routers, which are buffers."""
    yield from stage.named_parameters()
    for name, buffer in stage.named_buffers():
        if name.endswith(ROUTER_BIAS):
            yield name, buffer


def is_model_weight(name: str) -> bool:
    """True if a parameter belongs to neither an adapter nor the scalar head."""
    return not (is_adapter_parameter(name) or name.startswith(SCALAR))


def _is_owner(parameter: Tensor) -> bool:
    """True if this rank is the first of the ranks that hold the same parameter."""
    data_rank = (
        parallel_state.get_expert_data_parallel_rank()
        if belongs_to_expert(parameter)
        else parallel_state.get_data_parallel_rank(with_context_parallel=True)
    )
    return data_rank == 0 and param_is_not_tensor_parallel_duplicate(parameter)
