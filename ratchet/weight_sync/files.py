"""Sync weights through files in a directory that learner ranks and receivers share.

Each rank writes its blocks as a safetensors file, in one directory per version, all in a temporary
folder of this process. A directory gets its final name once it is complete. The previous version's
directory is removed after the commit. The files of a failed push are removed before the next push.

Peak extra memory:
- learner rank: the bytes of its own blocks, while they are converted and written;
- receiver: the mapped pages of the files, at most model bytes, which the system may reclaim;
- disk (memory, if the directory is in /dev/shm): model bytes, briefly twice that.
"""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from ratchet.errors import WeightSyncError
from ratchet.models.weights.checksums import as_bytes, copy_with_checksum
from ratchet.utils.safe_read import require_file
from ratchet.utils.temp_dirs import TemporaryFolder
from ratchet.weight_sync.transaction import PushWeightSync
from ratchet.weight_sync.transport import WeightTransport
from ratchet.weight_sync.weight_blocks import (
    OutgoingPart,
    PartReader,
    SentPart,
    WeightBlock,
    align_bytes,
)
from ratchet.worker_protocols import Ranks


@dataclass(frozen=True)
class FilesTransport(WeightTransport):
    """A transport through the files of one directory."""

    directory: str = ""

    def write(self, outgoing: Iterator[OutgoingPart], rank: int) -> list[SentPart]:
        """Write a rank's blocks to its file, and return the descriptions of the sent parts."""
        tensors: dict[str, Tensor] = {}
        parts = []
        offset = 0
        for part in outgoing:
            converted = torch.empty(part.tensor.numel(), dtype=part.dtype)
            parts.append(
                part.as_sent(
                    offset, copy_with_checksum(as_bytes(converted), part.tensor, part.dtype)
                )
            )
            tensors[_make_key(parts[-1])] = converted
            offset += align_bytes(part.n_bytes)
        path = self._get_path(rank)
        try:
            save_file(tensors, path.with_suffix(".tmp"))
            os.replace(path.with_suffix(".tmp"), path)
        except (OSError, SafetensorError) as error:
            raise WeightSyncError(
                f"rank {rank} can't write {path}: {error}. Check that there is room, and that all "
                "ranks share the directory.",
                rank=rank,
            ) from error
        return parts

    def receive(self, blocks: Sequence[Sequence[WeightBlock]], receiver: int) -> PartReader:
        """Return a function that reads a rank's part from its file."""
        files: dict[int, Any] = {}

        def read_part(rank: int, part: SentPart) -> Tensor:
            path = self._get_path(rank)
            try:
                if rank not in files:
                    require_file(path)  # its errors are exact; safetensors' say that it is absent
                    files[rank] = safe_open(path, framework="pt", device="cpu")
                return files[rank].get_tensor(_make_key(part))
            except (OSError, SafetensorError) as error:
                name = blocks[rank][part.block].name
                raise WeightSyncError(
                    f"weight '{name}' of rank {rank} can't be read from {path}: {error}",
                    tensor=name,
                    rank=rank,
                ) from error

        return read_part

    def _get_path(self, rank: int) -> Path:
        return Path(self.directory) / f"rank-{rank}.safetensors"


def _make_key(part: SentPart) -> str:
    return f"{part.block}.{part.kind}"


class FilesWeightSync(PushWeightSync[FilesTransport]):
    """A weight sync that pushes weights through files.

    directory: created if it is absent. The files are in a temporary folder in it, so that nothing
    else in the directory is changed, and several runs may use it.
    """

    transport_class = FilesTransport

    def __init__(
        self, senders: Ranks, receivers: Ranks, *, directory: Path, **options: Any
    ) -> None:
        super().__init__(senders, receivers, **options)
        self.directory = directory.absolute()
        self._folder: TemporaryFolder | None = None
        # The directories of the committed push and of the latest complete one. They are not found
        # by modification times, which are wrong if the clock was set back.
        self._committed: Path | None = None
        self._latest: Path | None = None

    async def _transfer(
        self, blocks: Sequence[Sequence[WeightBlock]], base: int | None, version: int
    ) -> tuple[list[list[SentPart]], FilesTransport]:
        if self._folder is None:
            self.directory.mkdir(parents=True, exist_ok=True)
            self._folder = TemporaryFolder("weights", parent=self.directory)
        draft = self._folder.path / f".draft-{uuid.uuid4().hex[:8]}"
        complete = self._folder.path / f"push-{version}-{draft.name[-8:]}"
        self._remove_others(self._committed)
        draft.mkdir()
        parts = await self._send(replace(self.transport, directory=str(draft)), base, version)
        draft.rename(complete)
        self._latest = complete
        return parts, replace(self.transport, directory=str(complete))

    async def _push(self, version: int) -> None:
        await super()._push(version)
        self._committed = self._latest
        self._remove_others(self._committed)

    async def close(self) -> None:
        await super().close()
        if self._folder is not None:
            self._folder.close()

    def _remove_others(self, keep: Path | None) -> None:
        """Remove all pushes, complete or not, except `keep`."""
        if self._folder is not None:
            for name in ("push-*", ".draft-*"):
                for path in self._folder.path.glob(name):
                    if path != keep:
                        shutil.rmtree(path, ignore_errors=True)
