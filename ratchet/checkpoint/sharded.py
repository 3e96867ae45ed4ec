"""Save tensors that are divided over ranks: `rank-N.safetensors` with an index in `rank-N.json`.

Any other number of ranks can read them. Each requests its own blocks by name, offset and size,
which are assembled from the files that hold parts of them. No rank reads the whole of a tensor that
it has a block of, and the files can't execute code.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from ratchet.errors import CheckpointError
from ratchet.protocols import Shard
from ratchet.utils import safe_read


@dataclass(frozen=True)
class StoredBlock:
    """A block in a file, under a key."""

    file: Path
    key: str
    shape: tuple[int, ...]  # of the whole tensor
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


def save_blocks(
    directory: Path, rank: int, blocks: Iterable[Shard], numbers: Mapping[str, Any]
) -> None:
    """Write one rank's blocks, and numbers (JSON) that are equal on all ranks.

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
    try:
        directory.mkdir(parents=True, exist_ok=True)
        save_file(tensors, directory / f"rank-{rank}.safetensors")
        (directory / f"rank-{rank}.json").write_text(
            json.dumps({"blocks": index, "numbers": dict(numbers)}), encoding="utf-8"
        )
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"rank {rank} can't write to {directory}: {error}") from error


class BlockSpan(Protocol):
    """A block's place in a whole tensor."""

    @property
    def offsets(self) -> tuple[int, ...]: ...
    @property
    def sizes(self) -> tuple[int, ...]: ...


P = TypeVar("P", bound=BlockSpan)
# Returns numbers of a block: (block, start, end) -> tensor, with start and end in the whole tensor.
Cut = Callable[[P, Sequence[int], Sequence[int]], Tensor]


def assemble_block(
    parts: Iterable[P], offsets: Sequence[int], sizes: Sequence[int], cut: Cut[P]
) -> tuple[Tensor | None, int]:
    """Assemble a block of a tensor from the parts that overlap it.

    Args:
        parts: the available parts of the tensor.
        offsets: start of the block in the tensor.
        sizes: size of the block.
        cut: returns numbers of a part.

    Returns (the block, how many of its numbers no part has). The block is None if no part overlaps
    it.
    """
    block: Tensor | None = None
    missing = torch.Size(sizes).numel()
    seen: set[tuple[tuple[int, ...], tuple[int, ...]]] = set()
    for part in parts:
        low = [max(a, b) for a, b in zip(offsets, part.offsets, strict=True)]
        high = [
            min(a + n, b + m)
            for a, n, b, m in zip(offsets, sizes, part.offsets, part.sizes, strict=True)
        ]
        if (part.offsets, part.sizes) in seen or any(
            a >= b for a, b in zip(low, high, strict=True)
        ):
            continue  # ranks may hold the same block
        seen.add((part.offsets, part.sizes))
        piece = cut(part, low, high)
        if block is None:
            block = piece.new_empty(tuple(sizes))
        block[tuple(slice(a - o, b - o) for a, b, o in zip(low, high, offsets, strict=True))] = (
            piece
        )
        missing -= piece.numel()
    return block, missing


class BlockFiles:
    """The blocks that the ranks of an earlier run wrote to a directory.

    `numbers` merges those of all ranks; a dict has the entries of all.
    """

    def __init__(self, directory: Path) -> None:
        """Read the index of all ranks. Raises CheckpointError if there is none, or it is
        damaged.
        """
        self.directory = directory
        self.stored: dict[str, list[StoredBlock]] = {}
        self.numbers: dict[str, Any] = {}
        files = sorted(
            directory.glob("rank-*.json"), key=lambda path: int(path.stem.partition("-")[2])
        )
        if not files:
            raise CheckpointError(
                f"{directory} holds no blocks of a learner: it was saved by a learner of another "
                "kind"
            )
        try:
            for path in files:
                content = safe_read.read_json(path)
                for key, value in content["numbers"].items():
                    self.numbers[key] = (
                        {**self.numbers.get(key, {}), **value} if isinstance(value, dict) else value
                    )
                for i, entry in enumerate(content["blocks"]):
                    at = (tuple(entry[key]) for key in ("shape", "offsets", "sizes"))
                    place = StoredBlock(path.with_suffix(".safetensors"), f"b{i}", *at)
                    self.stored.setdefault(entry["name"], []).append(place)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"the index of {directory} can't be read: {error!r}") from error

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """The shape of each whole tensor, by name."""
        return {name: places[0].shape for name, places in self.stored.items()}

    def read(self, name: str, offsets: Sequence[int], sizes: Sequence[int]) -> Tensor:
        """Return a block of a tensor on the CPU, assembled from all files that hold parts of it.

        Raises CheckpointError if a part of it is missing.
        """
        block, missing = assemble_block(self.stored.get(name, ()), offsets, sizes, _slice)
        if missing or block is None:
            raise CheckpointError(
                f"{self.directory} lacks {missing or 'all'} numbers of '{name}': a file of it is "
                "missing"
            )
        return block

    def whole(self, name: str) -> LazyTensor:
        """Return a whole tensor, which is read when it is used."""
        return LazyTensor(self, name)


@dataclass(frozen=True)
class LazyTensor:
    """A tensor that is read when it is used. It implements `SavableTensor`."""

    blocks: BlockFiles
    name: str

    def numel(self) -> int:
        return torch.Size(self.blocks.shapes[self.name]).numel()

    def to(self, device: str, dtype: torch.dtype, *, copy: bool) -> Tensor:
        shape = self.blocks.shapes[self.name]
        return self.blocks.read(self.name, (0,) * len(shape), shape).to(device, dtype)


def _slice(place: StoredBlock, low: Sequence[int], high: Sequence[int]) -> Tensor:
    """Return numbers of a stored block."""
    try:
        safe_read.require_file(place.file)
        with safe_open(place.file, framework="pt", device="cpu") as opened:
            if not place.sizes:
                return opened.get_tensor(place.key)
            cut = tuple(
                slice(a - o, b - o) for a, b, o in zip(low, high, place.offsets, strict=True)
            )
            return opened.get_slice(place.key)[cut]
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{place.file} is missing or damaged: {error}") from error
