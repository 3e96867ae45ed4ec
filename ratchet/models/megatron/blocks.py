"""The parameters of a rank of Megatron Core as blocks of canonical weights, and who speaks for
those that several hold."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from megatron.core import parallel_state
from torch import Tensor, nn

from ratchet.models.convert.dimensions import Dimensions
from ratchet.models.convert.megatron import Layout, Place, fill, megatron_layout
from ratchet.models.lora.decoder import of_adapter
from ratchet.models.megatron.build import Stage
from ratchet.models.megatron.low_rank import Factors
from ratchet.models.megatron.sizes import Sizes
from ratchet.models.model_source import Read
from ratchet.models.parallel.sharding import Share
from ratchet.models.weights.weight_layout import Piece

SCALAR = "scalar."  # the scalar head's parameters, in a stage


@dataclass(frozen=True)
class Owned:
    """name: in its stage. first: whether this rank speaks for all that hold the same."""

    name: str
    parameter: nn.Parameter
    pieces: tuple[Piece, ...]
    first: bool


def layout_of(stage: Stage, sizes: Sizes) -> Layout:
    place = Place(
        tensor=Share(parallel_state.get_tensor_model_parallel_rank(), sizes.tensor),
        pipeline=stage.share,
        experts=Share(parallel_state.get_expert_model_parallel_rank(), sizes.experts),
    )
    return megatron_layout(Dimensions.from_config(stage.shape), place)


def adapter_layout(stage: Stage) -> Layout:
    """Of the parameters of its adapters."""
    factors = (
        (path, module) for path, module in stage.named_modules() if isinstance(module, Factors)
    )
    return {
        f"{path}.{which}": pieces
        for path, module in factors
        for which, pieces in module.pieces.items()
    }


def owned(stages: Sequence[Stage], sizes: Sizes) -> Iterator[Owned]:
    """In the order of the stages' parameters."""
    for stage in stages:
        layout = {**layout_of(stage, sizes), **adapter_layout(stage)}
        for name, parameter in stage.named_parameters():
            pieces = (
                _whole(f"head.{name[len(SCALAR) :]}", parameter)
                if name.startswith(SCALAR)
                else layout[name]
            )
            # the first stage has it as its embedding
            copied = name == "output_layer.weight" and stage.shape.tied
            yield Owned(name, parameter, pieces, not copied and _speaks(parameter))


def fill_stages(stages: Sequence[Stage], sizes: Sizes, read: Read) -> None:
    """Copies every block of the model's own weights from where its name, offsets and sizes are
    found."""
    for stage in stages:
        tensors: dict[str, Tensor] = {
            name: p for name, p in stage.named_parameters() if of_model(name)
        }
        fill(tensors, layout_of(stage, sizes), read)


def of_model(name: str) -> bool:
    """Whether a stage's parameter is a weight of the model itself, neither of its adapter nor of
    the scalar head."""
    return not (of_adapter(name) or name.startswith(SCALAR))


def _speaks(parameter: nn.Parameter) -> bool:
    of_experts = not getattr(parameter, "allreduce", True)
    data = (
        parallel_state.get_expert_data_parallel_rank()
        if of_experts
        else parallel_state.get_data_parallel_rank(with_context_parallel=True)
    )
    divided = getattr(parameter, "tensor_model_parallel", False)
    return data == 0 and (divided or parallel_state.get_tensor_model_parallel_rank() == 0)


def _whole(name: str, parameter: Tensor) -> tuple[Piece, ...]:
    shape = tuple(parameter.shape)
    return (Piece(name, shape, (0,) * len(shape), range(shape[0])),)
