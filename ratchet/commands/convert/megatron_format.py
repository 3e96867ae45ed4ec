"""Checkpoints of Megatron-core (`dist_checkpointing`, format "torch_dist") as canonical weights,
and back. Megatron is not needed for it.

A checkpoint does not depend on how ranks divided the model: its tensors are those of a single rank.
Layers of a dense model are stacked along a first dimension, and experts along one of their own. If
layers differ, each has its own tensors.
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
ENDS = (*EMBEDDING, *HEAD)  # of which the vocabulary may be padded


@dataclass(frozen=True)
class Spot:
    """The place of a parameter: at `index` of the first dimensions of tensor `key`, whose sizes are
    `of`."""

    key: str
    index: tuple[int, ...] = ()
    of: tuple[int, ...] = ()


@dataclass(frozen=True)
class _Rows:
    """Rows of a parameter as a block of a weight."""

    piece: WeightPiece
    parameter: str

    @property
    def offsets(self) -> tuple[int, ...]:
        return self.piece.offsets

    @property
    def sizes(self) -> tuple[int, ...]:
        return (len(self.piece.rows), *self.piece.shape[1:])


class MegatronFiles:
    """The canonical weights of a checkpoint. shapes: by their names."""

    def __init__(self, directory: Path, dimensions: Dimensions) -> None:
        """Read the index. Raises CheckpointError if parameters of such a model are missing or have
        another shape."""
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
        """Return a block. Raises CheckpointError if a file is missing or damaged."""
        block, missing = assemble_block(self.rows[name], offsets, sizes, self._cut)
        assert block is not None, f"no block of '{name}' is empty"
        assert not missing, f"the map lacks {missing} numbers of '{name}'"
        return block

    def parameter(self, name: str) -> Tensor:
        """Return a parameter as a model on a single rank has it. Raises CheckpointError."""
        spot, pieces = self.spots[name], self.layout[name]
        sizes = (pieces[-1].rows.stop, *pieces[0].shape[1:])
        return self._read(spot, (0,) * len(sizes), sizes)

    def _read(self, spot: Spot, offsets: Sequence[int], sizes: Sequence[int]) -> Tensor:
        lead = (1,) * len(spot.index)
        return self.files.block(spot.key, (*spot.index, *offsets), (*lead, *sizes)).reshape(
            tuple(sizes)
        )

    def _cut(self, rows: _Rows, low: Sequence[int], high: Sequence[int]) -> Tensor:
        spot, down = self.spots[rows.parameter], rows.piece.rows.start - rows.piece.offsets[0]
        return self._read(
            spot, (low[0] + down, *low[1:]), [b - a for a, b in zip(low, high, strict=True)]
        )

    def _find(self, parameter: str, dimensions: Dimensions) -> Spot:
        tried = [
            spot
            for spelled in spellings(parameter)
            for stacked in (True, False)
            if (spot := find_spot(spelled, dimensions, stacked=stacked)).key in self.files.tensors
        ]
        if not tried:
            raise CheckpointError(
                f"{self.files.directory} lacks '{parameter}': is it of the model that config.json "
                "describes?"
            )
        (spot, *_), pieces = tried, self.layout[parameter]
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
    """Return the names of a parameter in Megatron's own layers and, for a norm, in Transformer
    Engine's."""
    inside = IN_LAYER.fullmatch(parameter)
    if inside is None or inside[2] not in FUSED:
        return [parameter]
    return [parameter, f"decoder.layers.{inside[1]}.{FUSED[inside[2]]}.layer_norm_weight"]


def find_spot(parameter: str, dimensions: Dimensions, *, stacked: bool) -> Spot:
    """Return the place of a parameter. stacked: True if layers lie along the first dimension."""
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
    """Yield the places of a parameter for any kind of layers: norms, which are small, under both
    names."""
    stacked = not dimensions.experts
    yield find_spot(parameter, dimensions, stacked=stacked)
    inside = IN_LAYER.fullmatch(parameter)
    if inside is None or inside[2] not in FUSED:
        return
    rules = find_family_table(dimensions).layer(dimensions.sparse(int(inside[1])))
    if f"{FUSED[inside[2]]}.weight" in rules:
        yield find_spot(spellings(parameter)[1], dimensions, stacked=stacked)


def empty_states(dimensions: Dimensions) -> list[str]:
    """Return keys of the empty extra states of matrices, which Megatron's own layers require."""
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
    """Write the files that Megatron needs beside the index."""
    backend = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
    content: Mapping[str, object] = {
        "content_metadata": {"non_homogeneous_layers": bool(dimensions.experts)}
    }
    torch.save(content, directory / COMMON)
    write_json(
        directory / FORMAT, {**backend, "common_backend": "torch", "common_backend_version": 1}
    )
