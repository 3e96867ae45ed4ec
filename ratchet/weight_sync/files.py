"""Files in a directory that all ends reach: each rank's blocks as safetensors, a directory a
version.

A directory has its name once it is complete; the one before goes after the commit, what a broken
push left at the next one.

Peak extra memory: each rank's share of the model bytes at the ranks, while the blocks are converted
and written; at a receiver the pages of the files that it has mapped, at most model bytes, which the
system may take back; and model bytes of disk, twice for a moment (where the directory lies in
memory, /dev/shm, of that).
"""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from ratchet.errors import LinkError
from ratchet.protocols import Ranks
from ratchet.weight_sync.checksums import as_bytes, copy_summed
from ratchet.weight_sync.transaction import PushLink, Waiting
from ratchet.weight_sync.weight_blocks import Block, Open, Outgoing, Part, aligned


class FilesLink(PushLink):
    """directory: of this link alone, made if it is absent."""

    writer = "ratchet.weight_sync.files:write"
    receiver = "ratchet.weight_sync.files:read"

    def __init__(
        self, senders: Ranks, receivers: Ranks, *, directory: Path, **options: Any
    ) -> None:
        super().__init__(senders, receivers, **options)
        self.directory = directory.absolute()
        # Not told by times of modification: a clock that was set back would make an older push the
        # newest.
        self._committed: Path | None = None
        self._complete: Path | None = None

    async def _transfer(
        self, blocks: Sequence[Sequence[Block]], version: int, since: Mapping[str, Any] | None
    ) -> tuple[list[list[Part]], Waiting | None]:
        draft = self.directory / f".draft-{uuid.uuid4().hex[:8]}"
        complete = self.directory / f"push-{version}-{draft.name[-8:]}"
        self._keep(self._committed)
        draft.mkdir(parents=True)
        parts = await self._sent({"directory": str(draft)}, since)
        draft.rename(complete)
        self._complete = complete
        return parts, (self.receiver, {"directory": str(complete)})

    async def _push(self, version: int) -> None:
        await super()._push(version)
        self._committed = self._complete
        self._keep(self._committed)

    async def close(self) -> None:
        await super().close()
        self._keep(None)

    def _keep(self, kept: Path | None) -> None:
        for path in (*self.directory.glob("push-*"), *self.directory.glob(".draft-*")):
            if path != kept:
                shutil.rmtree(path, ignore_errors=True)


def write(outgoing: Iterator[Outgoing], rank: int, *, directory: str) -> list[Part]:
    tensors: dict[str, Tensor] = {}
    parts, place = [], 0
    for item in outgoing:
        numbers = torch.empty(item.tensor.numel(), dtype=item.dtype)
        parts.append(item.at(place, copy_summed(as_bytes(numbers), item.tensor, item.dtype)))
        tensors[_key(parts[-1])] = numbers
        place += aligned(item.n_bytes)
    path = _file(directory, rank)
    try:
        save_file(tensors, path.with_suffix(".tmp"))
        os.replace(path.with_suffix(".tmp"), path)
    except (OSError, SafetensorError) as error:
        raise LinkError(
            f"rank {rank} can't write {path}: {error}; is there room, and do all ranks share it?",
            rank=rank,
        ) from error
    return parts


def read(blocks: Sequence[Sequence[Block]], receiver: int, *, directory: str) -> Open:
    files: dict[int, Any] = {}

    def numbers(rank: int, part: Part) -> Tensor:
        path = _file(directory, rank)
        try:
            if rank not in files:
                files[rank] = safe_open(path, framework="pt", device="cpu")
            return files[rank].get_tensor(_key(part))
        except (OSError, SafetensorError) as error:
            name = blocks[rank][part.block].name
            raise LinkError(
                f"weight '{name}' of rank {rank} can't be read from {path}: {error}",
                tensor=name,
                rank=rank,
            ) from error

    return numbers


def _file(directory: str, rank: int) -> Path:
    return Path(directory) / f"rank-{rank}.safetensors"


def _key(part: Part) -> str:
    return f"{part.block}.{part.kind}"
