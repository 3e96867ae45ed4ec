"""Tensors of which each rank has some blocks, on disk: `rank-N.safetensors` and what lies in it,
`rank-N.json`.

Read by any other number of ranks: each asks for its own blocks, by name, offset and size, and gets
them from whichever files hold parts of them. No rank ever reads a whole tensor that it has a part
of, and nothing in the files can be executed.
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
class Stored:
    """A block in a file, under a key."""

    file: Path
    key: str
    shape: tuple[int, ...]  # of the whole tensor
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


def save_blocks(
    directory: Path, rank: int, blocks: Iterable[Shard], numbers: Mapping[str, Any]
) -> None:
    """One rank's blocks, and some numbers (JSON) that all ranks have alike. Raises CheckpointError
    where it can't write."""
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


class Lies(Protocol):
    """A part of a tensor: where in the whole it lies."""

    @property
    def offsets(self) -> tuple[int, ...]: ...
    @property
    def sizes(self) -> tuple[int, ...]: ...


P = TypeVar("P", bound=Lies)
# (part, from where, to where in the whole) -> these numbers of it
Cut = Callable[[P, Sequence[int], Sequence[int]], Tensor]


def assemble(
    parts: Iterable[P], offsets: Sequence[int], sizes: Sequence[int], cut: Cut[P]
) -> tuple[Tensor | None, int]:
    """(a block of a tensor from those parts that it overlaps, how many of its numbers none of them
    has)."""
    made: Tensor | None = None
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
        own = cut(part, low, high)
        if made is None:
            made = own.new_empty(tuple(sizes))
        made[tuple(slice(a - o, b - o) for a, b, o in zip(low, high, offsets, strict=True))] = own
        missing -= own.numel()
    return made, missing


class Blocks:
    """What the ranks of some earlier run left in a directory. numbers: those of all ranks; what is
    a table has all entries."""

    def __init__(self, directory: Path) -> None:
        """Raises CheckpointError where there is nothing, or it is damaged."""
        self.directory = directory
        self.stored: dict[str, list[Stored]] = {}
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
                    place = Stored(path.with_suffix(".safetensors"), f"b{i}", *at)
                    self.stored.setdefault(entry["name"], []).append(place)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"the index of {directory} can't be read: {error!r}") from error

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Of each whole tensor."""
        return {name: places[0].shape for name, places in self.stored.items()}

    def read(self, name: str, offsets: Sequence[int], sizes: Sequence[int]) -> Tensor:
        """A block, wherever its parts lie, on the CPU. Raises CheckpointError where some of it is
        nowhere."""
        made, missing = assemble(self.stored.get(name, ()), offsets, sizes, _slice)
        if missing or made is None:
            raise CheckpointError(
                f"{self.directory} lacks {missing or 'all'} numbers of '{name}': a file of it is "
                "missing"
            )
        return made

    def whole(self, name: str) -> Lazy:
        return Lazy(self, name)


@dataclass(frozen=True)
class Lazy:
    """A tensor that is read when it is asked for."""

    blocks: Blocks
    name: str

    def numel(self) -> int:
        return torch.Size(self.blocks.shapes[self.name]).numel()

    def to(self, device: str, dtype: torch.dtype, *, copy: bool) -> Tensor:
        shape = self.blocks.shapes[self.name]
        return self.blocks.read(self.name, (0,) * len(shape), shape).to(device, dtype)


def _slice(place: Stored, low: Sequence[int], high: Sequence[int]) -> Tensor:
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
