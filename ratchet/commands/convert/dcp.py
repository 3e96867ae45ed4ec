"""Directories of torch.distributed.checkpoint, which Megatron's dist_checkpointing writes too:
tensors in `*.distcp`, and the place of each chunk in `.metadata`.

That index is a pickle. It is read with a list of allowed names, all of which only hold data;
tensors are read as torch does with `weights_only=True`. So nothing in such a directory can be
executed.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo

from ratchet.checkpoint.sharded import assemble_block
from ratchet.errors import CheckpointError
from ratchet.protocols import Shard
from ratchet.utils.atomic_files import atomic_path

INDEX, NOTHING = ".metadata", "nothing.distcp"
# what an index may name: holders of data, and what makes a layout of its name
INERT: Mapping[str, frozenset[str]] = {
    "torch": frozenset(
        {"Size"} | {name for name, value in vars(torch).items() if isinstance(value, torch.dtype)}
    ),
    "torch.serialization": frozenset({"_get_layout"}),
    "torch.distributed.checkpoint.metadata": frozenset({*dcp.__all__, "_MEM_FORMAT_ENCODING"}),
    "torch.distributed.checkpoint.planner": frozenset(
        {"SavePlan", "WriteItem", "WriteItemType", "TensorWriteData"}
    ),
    "torch.distributed.checkpoint.filesystem": frozenset({"_StorageInfo", "_StoragePrefix"}),
    "pathlib": frozenset({"Path", "PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath"}),
    # Python 3.13
    "pathlib._local": frozenset(
        {"Path", "PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath"}
    ),
    "collections": frozenset({"OrderedDict"}),
}


# What unpickling raises where the bytes are not what was written, and `_chunks` where they are
# another index than ours.
DAMAGED = (pickle.UnpicklingError, EOFError, AttributeError, TypeError, ValueError, LookupError)


class _Index(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if name not in INERT.get(module, ()):
            raise pickle.UnpicklingError(
                f"it names {module}.{name}, which no index of tensors needs"
            )
        return super().find_class(module, name)


@dataclass(frozen=True)
class Chunk:
    """A chunk of a tensor. start, length: bytes in the file. key, shape: of the whole tensor."""

    key: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    start: int
    length: int


class DcpFiles:
    """The tensors of a directory. tensors: the chunks of each, by its key. Other values that a
    directory may hold, such as a step's number, are not read."""

    def __init__(self, directory: Path) -> None:
        """Read the index. Raises CheckpointError if there is none, or it can't be read."""
        self.directory = directory
        try:
            with (directory / INDEX).open("rb") as file:
                self.tensors = _chunks(_Index(file).load())
        except (OSError, *DAMAGED) as error:
            raise CheckpointError(
                f"the index {directory / INDEX} can't be read: {error}"
            ) from error
        self._last: tuple[Chunk, Tensor] | None = None

    def shape(self, key: str) -> tuple[int, ...]:
        return self.tensors[key][0].shape

    def dtype(self, key: str) -> torch.dtype:
        return self.tensors[key][0].dtype

    def block(self, key: str, offsets: Sequence[int], sizes: Sequence[int]) -> Tensor:
        """Return a block of one tensor, on the CPU. A chunk is read as a whole and kept until the
        next.

        Raises CheckpointError if a part of the block is missing, or a file is damaged.
        """
        block, missing = assemble_block(self.tensors.get(key, ()), offsets, sizes, self._cut)
        if missing or block is None:
            raise CheckpointError(f"{self.directory} lacks {missing} numbers of '{key}'")
        return block

    def _cut(self, chunk: Chunk, low: Sequence[int], high: Sequence[int]) -> Tensor:
        if self._last is None or self._last[0] != chunk:
            self._last = (chunk, self._read(chunk))
        return self._last[1][
            tuple(slice(a - o, b - o) for a, b, o in zip(low, high, chunk.offsets, strict=True))
        ]

    def _read(self, chunk: Chunk) -> Tensor:
        path = self.directory / chunk.file
        try:
            with path.open("rb") as file:
                file.seek(chunk.start)
                tensor = torch.load(
                    io.BytesIO(file.read(chunk.length)), map_location="cpu", weights_only=True
                )
        except (OSError, RuntimeError, pickle.UnpicklingError, EOFError, ValueError) as error:
            raise CheckpointError(
                f"'{chunk.key}' in {path} is missing or damaged: {error}"
            ) from error
        if not isinstance(tensor, Tensor) or tensor.numel() != torch.Size(chunk.sizes).numel():
            raise CheckpointError(f"'{chunk.key}' in {path} is not what the index says")
        return tensor.reshape(chunk.sizes)  # dimensions of 1 may be in the index alone


def _chunks(index: dcp.Metadata) -> dict[str, tuple[Chunk, ...]]:
    """Return the chunks that the index places: files of other keys may have been removed."""
    lies = {(at.fqn, at.offset): info for at, info in index.storage_data.items()}
    tensors = {
        key: found
        for key, found in index.state_dict_metadata.items()
        if isinstance(found, dcp.TensorStorageMetadata)
    }
    return {key: tuple(_tensor_chunks(key, found, lies)) for key, found in tensors.items()}


def _tensor_chunks(
    key: str, found: dcp.TensorStorageMetadata, lies: Mapping[Any, Any]
) -> Iterator[Chunk]:
    for chunk in found.chunks:
        info = lies[key, chunk.offsets]
        at = (tuple(found.size), found.properties.dtype, tuple(chunk.offsets), tuple(chunk.sizes))
        yield Chunk(key, *at, info.relative_path, info.offset, info.length)


# --- writing


def write_chunks(path: Path, chunks: Iterable[Shard]) -> list[Chunk]:
    """Write one file, whole or not at all, with one chunk in memory at a time. Return what
    `write_index` needs."""
    chunks_written: list[Chunk] = []
    with atomic_path(path) as temporary, temporary.open("wb") as file:
        for chunk in chunks:
            # A clone: of a view the whole storage behind it would be saved.
            tensor = chunk.tensor.detach().to("cpu").clone(memory_format=torch.contiguous_format)
            start = file.tell()
            torch.save(tensor, file)
            sizes, length = tuple(tensor.shape), file.tell() - start
            chunks_written.append(
                Chunk(
                    chunk.name,
                    chunk.shape,
                    tensor.dtype,
                    chunk.offsets,
                    sizes,
                    path.name,
                    start,
                    length,
                )
            )
    return chunks_written


def write_index(directory: Path, chunks: Iterable[Chunk], empty: Sequence[str] = ()) -> None:
    """Write the index, which completes the directory. empty: keys that readers expect and that hold
    nothing."""
    tensors: dict[str, Any] = {}
    places: dict[dcp.MetadataIndex, Any] = {}
    for chunk in chunks:
        if chunk.key not in tensors:
            properties = dcp.TensorProperties(dtype=chunk.dtype)
            tensors[chunk.key] = dcp.TensorStorageMetadata(properties, torch.Size(chunk.shape), [])
        chunks_of_key = tensors[chunk.key].chunks
        index = dcp.MetadataIndex(chunk.key, torch.Size(chunk.offsets), len(chunks_of_key))
        chunks_of_key.append(
            dcp.ChunkStorageMetadata(torch.Size(chunk.offsets), torch.Size(chunk.sizes))
        )
        places[index] = _StorageInfo(chunk.file, chunk.start, chunk.length)
    if empty:
        torch.save([None], directory / NOTHING)  # once for all
        tensors |= dict.fromkeys(empty, dcp.BytesStorageMetadata())
        nothing = _StorageInfo(NOTHING, 0, (directory / NOTHING).stat().st_size)
        places |= {dcp.MetadataIndex(key): nothing for key in empty}
    keys = {key: (key,) for key in tensors}
    with atomic_path(directory / INDEX) as temporary:
        temporary.write_bytes(pickle.dumps(dcp.Metadata(tensors, keys, places, dcp.StorageMeta())))
