"""Convert checkpoints of Megatron-core to canonical weights, and back, without Megatron.

The checkpoints are those of `dist_checkpointing`, format "torch_dist". A checkpoint does not depend
on how ranks divided the model: its tensors are those of a single rank. The layers of a dense model
are stacked along the first dimension of a tensor, and experts along a dimension of their own. If
the layers of a model differ, each has its own tensors.
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
from ratchet.models.convert.tables import EMBEDDING, FUSED, HEAD, find_family_table
from ratchet.models.weights.weight_layout import WeightPiece
from ratchet.utils.atomic_files import write_json

FORMAT, COMMON = "metadata.json", "common.pt"
IN_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
OF_EXPERT = re.compile(r"mlp\.experts\.local_experts\.(\d+)\.(.+)")
# Parameters with a row for each token, to which Megatron may add padding rows.
ENDS = (*EMBEDDING, *HEAD)


@dataclass(frozen=True)
class Spot:
    """The place of a parameter in a checkpoint: `tensor[index]` of the tensor named `key`."""

    key: str
    index: tuple[int, ...] = ()  # layer and expert, as far as the tensor stacks them
    of: tuple[int, ...] = ()  # sizes of the dimensions that `index` counts in


@dataclass(frozen=True)
class _Rows:
    """Rows of a Megatron parameter that are a block of a canonical weight."""

    piece: WeightPiece
    parameter: str

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
        spots: The place of each Megatron parameter, by its name.
        rows: The rows of parameters that each weight consists of, by the weight's name.
    """

    def __init__(self, directory: Path, dimensions: Dimensions) -> None:
        """Read the index of the checkpoint.

        Raises CheckpointError if a parameter of a model with these dimensions is missing or has
        another shape.
        """
        self.files = DcpFiles(directory)
        self.layout: Layout = megatron_layout(dimensions, MegatronShard())
        self.spots = {name: self._find(name, dimensions) for name in self.layout}
        self.rows: dict[str, list[_Rows]] = {}
        for parameter, pieces in self.layout.items():
            for piece in pieces:
                self.rows.setdefault(piece.name, []).append(_Rows(piece, parameter))
        self.shapes = {name: rows[0].piece.shape for name, rows in self.rows.items()}

    def dtype(self, name: str) -> torch.dtype:
        return self.files.dtype(self.spots[self.rows[name][0].parameter].key)

    def block(self, name: str, offsets: Sequence[int], sizes: Sequence[int]) -> Tensor:
        """Return a block of a weight. Raises CheckpointError if a file is missing or damaged."""
        block, missing = assemble_block(self.rows[name], offsets, sizes, self._cut)
        assert block is not None, f"no block of '{name}' is empty"
        assert not missing, f"the map lacks {missing} elements of '{name}'"
        return block

    def parameter(self, name: str) -> Tensor:
        """Return a Megatron parameter as a model on a single rank has it.

        Raises CheckpointError if a file is missing or damaged.
        """
        spot, pieces = self.spots[name], self.layout[name]
        sizes = (pieces[-1].rows.stop, *pieces[0].shape[1:])
        return self._read(spot, (0,) * len(sizes), sizes)

    def _read(self, spot: Spot, offsets: Sequence[int], sizes: Sequence[int]) -> Tensor:
        """Return a block of the parameter at a place."""
        stacked_sizes = (1,) * len(spot.index)
        block = self.files.block(spot.key, (*spot.index, *offsets), (*stacked_sizes, *sizes))
        return block.reshape(tuple(sizes))

    def _cut(self, rows: _Rows, low: Sequence[int], high: Sequence[int]) -> Tensor:
        """Return the numbers from `low` to `high` of a weight, which lie within `rows`."""
        # Rows are counted from the start of the weight there, and of the parameter here.
        shift = rows.piece.rows.start - rows.piece.offsets[0]
        sizes = [b - a for a, b in zip(low, high, strict=True)]
        return self._read(self.spots[rows.parameter], (low[0] + shift, *low[1:]), sizes)

    def _find(self, parameter: str, dimensions: Dimensions) -> Spot:
        """Return the place of a parameter, under whichever name and stacking the checkpoint has it.

        Raises CheckpointError if it is missing or has another shape.
        """
        spots = [
            spot
            for name in spellings(parameter)
            for stacked in (True, False)
            if (spot := find_spot(name, dimensions, stacked=stacked)).key in self.files.tensors
        ]
        if not spots:
            raise CheckpointError(
                f"{self.files.directory} lacks '{parameter}': is it of the model that config.json "
                "describes?"
            )
        spot, pieces = spots[0], self.layout[parameter]
        rows, shape = pieces[-1].rows.stop, self.files.shape(spot.key)
        expected = (*spot.of, rows, *pieces[0].shape[1:])
        padded = parameter in ENDS and shape[0] > rows and shape[1:] == expected[1:]
        if shape != expected and not padded:
            raise CheckpointError(
                f"'{spot.key}' in {self.files.directory} is {shape}, by config.json it is "
                f"{expected}"
            )
        return spot


def spellings(parameter: str) -> list[str]:
    """Return the names that a parameter may have in a checkpoint.

    The first is its name in Megatron's own layers. A norm that Transformer Engine's layers fuse
    into the matrix behind it has a second one.
    """
    inside = IN_LAYER.fullmatch(parameter)
    if inside is None or inside[2] not in FUSED:
        return [parameter]
    return [parameter, f"decoder.layers.{inside[1]}.{FUSED[inside[2]]}.layer_norm_weight"]


def find_spot(parameter: str, dimensions: Dimensions, *, stacked: bool) -> Spot:
    """Return the place of a parameter.

    Args:
        parameter: Its name in a model on a single rank.
        dimensions: The dimensions of the model.
        stacked: True if the layers are stacked along the first dimension of one tensor; False if
            each layer has tensors of its own.
    """
    inside = IN_LAYER.fullmatch(parameter)
    if inside is None:
        return Spot(parameter)
    layer, rest = int(inside[1]), inside[2]
    index, of = ((layer,), (dimensions.layers,)) if stacked else ((), ())
    if expert := OF_EXPERT.fullmatch(rest):
        index, of = (*index, int(expert[1])), (*of, dimensions.experts)
        rest = f"mlp.experts.experts.{expert[2]}"
    return Spot(
        f"decoder.layers.{rest}" if stacked else f"decoder.layers.{layer}.{rest}", index, of
    )


# --- writing


def written_spots(parameter: str, dimensions: Dimensions) -> Iterator[Spot]:
    """Yield the places that a parameter is written to.

    Megatron's own layers and Transformer Engine's can both load the result: a norm, which is small,
    is written under the names of both.
    """
    stacked = not dimensions.experts
    yield find_spot(parameter, dimensions, stacked=stacked)
    inside = IN_LAYER.fullmatch(parameter)
    if inside is None or inside[2] not in FUSED:
        return
    rules = find_family_table(dimensions).layer(dimensions.sparse(int(inside[1])))
    if f"{FUSED[inside[2]]}.weight" in rules:
        yield find_spot(spellings(parameter)[1], dimensions, stacked=stacked)


def empty_states(dimensions: Dimensions) -> list[str]:
    """Return the keys of the empty extra states that Megatron's own layers require.

    Each matrix of a linear layer has one.
    """
    matrices = [
        name
        for name in megatron_layout(dimensions, MegatronShard())
        if ".linear_" in name and name.endswith(".weight")
    ]
    spots = [next(written_spots(name, dimensions)) for name in matrices]
    return [
        f"{spot.key.removesuffix('weight')}_extra_state/"
        f"shard_{_joined(spot.index or (0,))}_{_joined(spot.of or (1,))}"
        for spot in spots
    ]


def _joined(numbers: tuple[int, ...]) -> str:
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
