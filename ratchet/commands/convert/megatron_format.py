"""Convert checkpoints of Megatron-core to canonical weights, and back, without Megatron.

The checkpoints are those of `dist_checkpointing`, format "torch_dist". A checkpoint does not depend
on the sharding: its tensors are those of a single rank. The layers of a dense model are stacked
along the first dimension of a tensor, and experts along a second one. If the layers of a model
differ, each layer has its own tensors.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ratchet.checkpoint.sharded import assemble_block
from ratchet.commands.convert.dcp import DcpFiles
from ratchet.errors import CheckpointError
from ratchet.models.convert.dimensions import Dimensions
from ratchet.models.convert.megatron import Layout, MegatronShard, megatron_layout
from ratchet.models.convert.tables import EMBEDDING, FUSED, HEAD, find_layer_rules
from ratchet.models.weights.weight_layout import WeightPiece
from ratchet.utils.atomic_files import write_json

FORMAT, COMMON = "metadata.json", "common.pt"
# The layer's prefix, its number (None for layers of multi-token prediction), and the name in it.
LAYER_PARAMETER = re.compile(
    r"(decoder\.layers\.(\d+)\.|mtp\.layers\.\d+\.transformer_layer\.)(.+)"
)
EXPERT_PARAMETER = re.compile(r"mlp\.experts\.local_experts\.(\d+)\.(.+)")
# Parameters with a row for each token, to which Megatron may add padding rows.
VOCABULARY_PARAMETERS = (*EMBEDDING, *HEAD)


@dataclass(frozen=True)
class ParameterLocation:
    """The location of a parameter in a checkpoint: `tensor[index]` of the tensor named `key`."""

    key: str
    index: tuple[int, ...] = ()  # layer, expert or both, if the tensor stacks them
    stack_sizes: tuple[int, ...] = ()  # sizes of the dimensions of `index`


@dataclass(frozen=True)
class _Rows:
    """Rows of a Megatron parameter that are a block of a canonical weight.

    `offsets` and `sizes` are those of the block in the weight.
    """

    piece: WeightPiece
    parameter: str  # name of the parameter

    @property
    def offsets(self) -> tuple[int, ...]:
        return self.piece.offsets

    @property
    def sizes(self) -> tuple[int, ...]:
        return (len(self.piece.rows), *self.piece.shape[1:])


class MegatronFiles:
    """The canonical weights of a Megatron checkpoint.

    Attributes:
        shapes: The shape of each weight, by its name.
        locations: The location of each Megatron parameter, by its name.
        rows_by_weight: The rows of Megatron parameters that make up each weight, by its name.
    """

    def __init__(self, directory: Path, dimensions: Dimensions) -> None:
        """Read the index of the checkpoint.

        Raises CheckpointError if a parameter of a model with these dimensions is missing or has
        another shape.
        """
        self.files = DcpFiles(directory)
        self.layout: Layout = megatron_layout(dimensions, MegatronShard())
        self.locations = {name: self._find_location(name, dimensions) for name in self.layout}
        self.rows_by_weight: dict[str, list[_Rows]] = {}
        for parameter, pieces in self.layout.items():
            for piece in pieces:
                self.rows_by_weight.setdefault(piece.name, []).append(_Rows(piece, parameter))
        self.shapes = {name: rows[0].piece.shape for name, rows in self.rows_by_weight.items()}

    def dtype(self, name: str) -> torch.dtype:
        return self.files.dtype(self.locations[self.rows_by_weight[name][0].parameter].key)

    def block(self, name: str, offsets: Sequence[int], sizes: Sequence[int]) -> Tensor:
        """Return a block of a weight. Raises CheckpointError if a file is missing or damaged."""
        block, missing = assemble_block(self.rows_by_weight[name], offsets, sizes, self._slice_rows)
        assert block is not None, f"no block of '{name}' is empty"
        assert not missing, f"the layout lacks {missing} elements of '{name}'"
        return block

    def parameter(self, name: str) -> Tensor:
        """Return a Megatron parameter as a model on a single rank has it.

        Raises CheckpointError if a file is missing or damaged.
        """
        location, pieces = self.locations[name], self.layout[name]
        sizes = (pieces[-1].rows.stop, *pieces[0].shape[1:])
        return self._read(location, (0,) * len(sizes), sizes)

    def _read(
        self, location: ParameterLocation, offsets: Sequence[int], sizes: Sequence[int]
    ) -> Tensor:
        """Return a block of the parameter at a location."""
        stacked_sizes = (1,) * len(location.index)
        block = self.files.block(
            location.key, (*location.index, *offsets), (*stacked_sizes, *sizes)
        )
        return block.reshape(tuple(sizes))

    def _slice_rows(self, rows: _Rows, starts: Sequence[int], ends: Sequence[int]) -> Tensor:
        """Return the values from `starts` to `ends` of a weight, which lie within `rows`."""
        # `starts` counts rows of the weight, and `_read` counts rows of the parameter.
        shift = rows.piece.rows.start - rows.piece.offsets[0]
        sizes = [end - start for start, end in zip(starts, ends, strict=True)]
        return self._read(self.locations[rows.parameter], (starts[0] + shift, *starts[1:]), sizes)

    def _find_location(self, parameter: str, dimensions: Dimensions) -> ParameterLocation:
        """Return the location of a parameter, tried under all names and with and without stacking.

        Raises CheckpointError if it is missing or has another shape.
        """
        locations = [
            location
            for name in list_possible_names(parameter)
            for stacked in (True, False)
            if (location := make_location(name, dimensions, stacked=stacked)).key
            in self.files.tensors
        ]
        if not locations:
            raise CheckpointError(
                f"{self.files.directory} lacks '{parameter}', which the model in config.json has"
            )
        location, pieces = locations[0], self.layout[parameter]
        n_rows, shape = pieces[-1].rows.stop, self.files.shape(location.key)
        expected_shape = (*location.stack_sizes, n_rows, *pieces[0].shape[1:])
        is_padded = (
            parameter in VOCABULARY_PARAMETERS
            and shape[0] > n_rows
            and shape[1:] == expected_shape[1:]
        )
        if shape != expected_shape and not is_padded:
            raise CheckpointError(
                f"'{location.key}' in {self.files.directory} has shape {shape}, but config.json "
                f"implies {expected_shape}"
            )
        return location


def list_possible_names(parameter: str) -> list[str]:
    """Return the names that a parameter may have in a checkpoint.

    The first name is the one in Megatron's own layers. Transformer Engine's layers fuse some norms
    into the matrix that follows them; such a norm has a second name.
    """
    match = LAYER_PARAMETER.fullmatch(parameter)
    if match is None or match[3] not in FUSED:
        return [parameter]
    return [parameter, f"{match[1]}{FUSED[match[3]]}.layer_norm_weight"]


def make_location(parameter: str, dimensions: Dimensions, *, stacked: bool) -> ParameterLocation:
    """Return the location of a parameter.

    Args:
        parameter: Its name in a model on a single rank.
        dimensions: The dimensions of the model.
        stacked: True if the layers are stacked along the first dimension of one tensor; False if
            each layer has tensors of its own.
    """
    match = LAYER_PARAMETER.fullmatch(parameter)
    if match is None:
        return ParameterLocation(parameter)
    prefix, layer, suffix = match.groups()
    index: tuple[int, ...] = ()
    stack_sizes: tuple[int, ...] = ()
    if stacked and layer is not None:
        prefix, index, stack_sizes = "decoder.layers.", (int(layer),), (dimensions.layers,)
    if expert := EXPERT_PARAMETER.fullmatch(suffix):
        index = (*index, int(expert[1]))
        stack_sizes = (*stack_sizes, dimensions.experts)
        suffix = f"mlp.experts.experts.{expert[2]}"
    return ParameterLocation(prefix + suffix, index, stack_sizes)


# --- writing


def list_written_locations(parameter: str, dimensions: Dimensions) -> Iterator[ParameterLocation]:
    """Yield the locations that a parameter is written to.

    A fused norm is written under both of its names, so that Megatron's own layers and Transformer
    Engine's can both load the result.
    """
    # The layers of a model with experts may differ, so they are not stacked.
    stacked = not dimensions.experts
    yield make_location(parameter, dimensions, stacked=stacked)
    match = LAYER_PARAMETER.fullmatch(parameter)
    if match is None or match[3] not in FUSED:
        return
    rules = find_layer_rules(dimensions, int(match[2] or dimensions.layers))
    if f"{FUSED[match[3]]}.weight" in rules:
        yield make_location(list_possible_names(parameter)[1], dimensions, stacked=stacked)


def list_empty_states(dimensions: Dimensions) -> list[str]:
    """Return the keys of the empty extra states that Megatron's own layers require.

    Each matrix of a linear layer has one extra state.
    """
    matrices = [
        name
        for name in megatron_layout(dimensions, MegatronShard())
        if name.endswith(".weight") and (".linear_" in name or ".eh_proj." in name)
    ]
    locations = [next(list_written_locations(name, dimensions)) for name in matrices]
    return [
        f"{location.key.removesuffix('weight')}_extra_state/"
        f"shard_{_join_numbers(location.index or (0,))}"
        f"_{_join_numbers(location.stack_sizes or (1,))}"
        for location in locations
    ]


def _join_numbers(numbers: tuple[int, ...]) -> str:
    return ".".join(map(str, numbers))


def write_format(directory: Path, dimensions: Dimensions) -> None:
    """Write the two files that Megatron needs beside the index: the format and the common state."""
    backend = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
    content: Mapping[str, object] = {
        "content_metadata": {"non_homogeneous_layers": bool(dimensions.experts)}
    }
    torch.save(content, directory / COMMON)
    write_json(
        directory / FORMAT, {**backend, "common_backend": "torch", "common_backend_version": 1}
    )
