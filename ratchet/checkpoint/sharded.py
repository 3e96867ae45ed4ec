"""Save and read sharded tensors: `rank-N.safetensors` with an index in `rank-N.json`.

A checkpoint can be read with another number of ranks (resharding). Each rank requests its blocks by
name, offset and size. A block is assembled from the files that hold parts of the block, so no rank
has to read a whole tensor. Reading the files can't execute code.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ratchet.checkpoint.serialization import write_or_defer
from ratchet.errors import CheckpointError
from ratchet.models.weights.tensor_files import save_tensors
from ratchet.protocols import Shard
from ratchet.utils import safe_read


@dataclass(frozen=True)
class StoredBlock:
    """The location of one block of a tensor: the file, and the key in that file."""

    file: Path
    key: str
    shape: tuple[int, ...]  # of the whole tensor
    offsets: tuple[int, ...]  # start of the block in the whole tensor, per dimension
    sizes: tuple[int, ...]  # of the block


def save_blocks(
    directory: Path, rank: int, blocks: Iterable[Shard], metadata: Mapping[str, Any]
) -> None:
    """Write one rank's blocks and metadata to a directory, or later inside of `defer_writes`.

    Args:
        directory: The directory, the same for all ranks.
        rank: The rank that writes.
        blocks: The rank's blocks.
        metadata: JSON values by name. They must be equal on all ranks, except for dicts, whose
            entries `BlockFiles` merges.

    Raises CheckpointError if the files can't be written.
    """
    tensors: dict[str, Tensor] = {}
    index: list[dict[str, Any]] = []
    for block in blocks:
        key = f"b{len(index)}"
        tensors[key] = block.tensor.detach().to("cpu", copy=True).contiguous()
        index.append(
            {
                "name": block.name,
                "shape": block.shape,
                "offsets": block.offsets,
                "sizes": tuple(block.tensor.shape),
            }
        )
    numbers = dict(metadata)
    write_or_defer(lambda root: _write_blocks(root / directory, rank, tensors, index, numbers))


def _write_blocks(
    directory: Path,
    rank: int,
    tensors: Mapping[str, Tensor],
    index: Sequence[Mapping[str, Any]],
    metadata: Mapping[str, Any],
) -> None:
    """Write the two files of a rank."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        save_tensors(tensors, directory / f"rank-{rank}.safetensors")
        # The file keeps the metadata under "numbers", as the files of older checkpoints do.
        (directory / f"rank-{rank}.json").write_text(
            json.dumps({"blocks": index, "numbers": metadata}), encoding="utf-8"
        )
    except OSError as error:
        raise CheckpointError(f"rank {rank} can't write to {directory}: {error}") from error


class BlockSpan(Protocol):
    """The position and size of a block in a whole tensor."""

    @property
    def offsets(self) -> tuple[int, ...]: ...
    @property
    def sizes(self) -> tuple[int, ...]: ...


Part = TypeVar("Part", bound=BlockSpan)
# (part, starts, ends) -> the part's values between starts and ends. Both are positions in the whole
# tensor, not in the part.
SlicePart = Callable[[Part, Sequence[int], Sequence[int]], Tensor]


def assemble_block(
    parts: Iterable[Part], offsets: Sequence[int], sizes: Sequence[int], slice_part: SlicePart[Part]
) -> tuple[Tensor | None, int]:
    """Assemble a block of a tensor from the parts that overlap it.

    Args:
        parts: the available parts of the tensor.
        offsets: start of the block in the tensor.
        sizes: size of the block.
        slice_part: returns the values of a part between two positions in the tensor.

    Returns (block, n_missing): the block, or None if no part overlaps it, and the number of the
    block's elements that no part holds.
    """
    block: Tensor | None = None
    n_missing = torch.Size(sizes).numel()
    used_spans: set[tuple[tuple[int, ...], tuple[int, ...]]] = set()
    for part in parts:
        # The overlap of the requested block and this part is [starts, ends) in the whole tensor.
        starts = [max(a, b) for a, b in zip(offsets, part.offsets, strict=True)]
        ends = [
            min(a + n, b + m)
            for a, n, b, m in zip(offsets, sizes, part.offsets, part.sizes, strict=True)
        ]
        # Ranks may hold copies of the same block. Only the first copy is used.
        if (part.offsets, part.sizes) in used_spans or any(
            a >= b for a, b in zip(starts, ends, strict=True)
        ):
            continue
        used_spans.add((part.offsets, part.sizes))
        piece = slice_part(part, starts, ends)
        if block is None:
            block = piece.new_empty(tuple(sizes))
        target = tuple(slice(a - o, b - o) for a, b, o in zip(starts, ends, offsets, strict=True))
        block[target] = piece
        n_missing -= piece.numel()
    return block, n_missing


class BlockFiles:
    """The blocks that all ranks of an earlier run wrote to a directory.

    `metadata` merges the metadata of all ranks. A dict in it has the entries of all ranks.
    """

    def __init__(self, directory: Path) -> None:
        """Read the index files of all ranks.

        Raises CheckpointError if there are no index files, or if one of them is damaged.
        """
        self.directory = directory
        self.blocks_by_name: dict[str, list[StoredBlock]] = {}
        self.metadata: dict[str, Any] = {}
        files = sorted(
            directory.glob("rank-*.json"), key=lambda path: int(path.stem.partition("-")[2])
        )
        if not files:
            raise CheckpointError(
                f"{directory} holds no sharded weights: a learner of another kind saved it. Resume "
                "with that learner.kind."
            )
        try:
            for path in files:
                content = safe_read.read_json(path)
                for key, value in content["numbers"].items():
                    self.metadata[key] = (
                        {**self.metadata.get(key, {}), **value}
                        if isinstance(value, dict)
                        else value
                    )
                for i, entry in enumerate(content["blocks"]):
                    geometry = (tuple(entry[key]) for key in ("shape", "offsets", "sizes"))
                    stored_block = StoredBlock(path.with_suffix(".safetensors"), f"b{i}", *geometry)
                    self.blocks_by_name.setdefault(entry["name"], []).append(stored_block)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"the index of {directory} can't be read: {error!r}") from error

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """The shape of each whole tensor, by name."""
        return {name: blocks[0].shape for name, blocks in self.blocks_by_name.items()}

    def read(self, name: str, offsets: Sequence[int], sizes: Sequence[int]) -> Tensor:
        """Return a block of a tensor on the CPU, assembled from all files that hold parts of it.

        Raises CheckpointError if a part of the block is missing.
        """
        block, n_missing = assemble_block(self.blocks_by_name.get(name, ()), offsets, sizes, _slice)
        if n_missing or block is None:
            raise CheckpointError(
                f"{self.directory} lacks {n_missing or 'all'} elements of '{name}': a file is "
                "missing"
            )
        return block

    def get_lazy_tensor(self, name: str) -> LazyTensor:
        """Return a handle to a whole tensor, which is read from disk when it is used."""
        return LazyTensor(self, name)


@dataclass(frozen=True)
class LazyTensor:
    """A tensor that is read from disk when it is used. It implements `SavableTensor`."""

    blocks: BlockFiles
    name: str

    def numel(self) -> int:
        return torch.Size(self.blocks.shapes[self.name]).numel()

    def to(self, device: str, dtype: torch.dtype, *, copy: bool) -> Tensor:
        shape = self.blocks.shapes[self.name]
        return self.blocks.read(self.name, (0,) * len(shape), shape).to(device, dtype)


def _slice(stored_block: StoredBlock, starts: Sequence[int], ends: Sequence[int]) -> Tensor:
    """Return the values of a stored block between two positions in the whole tensor.

    Raises CheckpointError if the file is missing or damaged.
    """
    try:
        safe_read.require_file(stored_block.file)
        with safe_open(stored_block.file, framework="pt", device="cpu") as file:
            # A tensor without dimensions has nothing to slice.
            if not stored_block.sizes:
                return file.get_tensor(stored_block.key)
            slices = tuple(
                slice(a - o, b - o)
                for a, b, o in zip(starts, ends, stored_block.offsets, strict=True)
            )
            return file.get_slice(stored_block.key)[slices]
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{stored_block.file} is missing or damaged: {error}") from error
