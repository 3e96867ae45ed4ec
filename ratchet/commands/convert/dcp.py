"""Read and write directories of torch.distributed.checkpoint.

Megatron's dist_checkpointing writes this format too. The tensors are in `*.distcp`, and the index
`.metadata` says where each chunk of a tensor is.

Reading a directory can't execute code from it. The index is a pickle: it is unpickled with a list
of allowed names, none of which can run code from the file. Tensors are read with torch's
`weights_only=True`.
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

INDEX, EMPTY_FILE = ".metadata", "nothing.distcp"
# The names that an index may use, by module: data classes, and the function that returns a tensor
# layout by its name (`_get_layout`).
ALLOWED_NAMES: Mapping[str, frozenset[str]] = {
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
    # The same classes under the module name that Python 3.13 pickles.
    "pathlib._local": frozenset(
        {"Path", "PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath"}
    ),
    "collections": frozenset({"OrderedDict"}),
}


# The exceptions for a damaged index: from unpickling if the bytes are corrupt, and from
# `_read_chunk_index` if the unpickled object is not an index of tensors.
DAMAGE_ERRORS = (
    pickle.UnpicklingError,
    EOFError,
    AttributeError,
    TypeError,
    ValueError,
    LookupError,
)


class _IndexUnpickler(pickle.Unpickler):
    """An unpickler that accepts only the names in `ALLOWED_NAMES`."""

    def find_class(self, module: str, name: str) -> Any:
        if name not in ALLOWED_NAMES.get(module, ()):
            raise pickle.UnpicklingError(
                f"it names {module}.{name}, which no index of tensors needs"
            )
        return super().find_class(module, name)


@dataclass(frozen=True)
class Chunk:
    """A chunk of a tensor, and its location in a file."""

    key: str  # name of the whole tensor
    shape: tuple[int, ...]  # of the whole tensor
    dtype: torch.dtype
    offsets: tuple[int, ...]  # start of the chunk in the whole tensor, per dimension
    sizes: tuple[int, ...]  # shape of the chunk
    file: str  # name of the file in the directory
    start: int  # where the chunk begins in the file, in bytes
    length: int  # how long the chunk is in the file, in bytes


class DcpFiles:
    """The tensors of a directory, read on demand.

    `tensors` lists the chunks of each tensor, by the tensor's key. Other values in the directory,
    such as a step number, are not read.
    """

    def __init__(self, directory: Path) -> None:
        """Read the index. Raises CheckpointError if it is missing or can't be read."""
        self.directory = directory
        try:
            with (directory / INDEX).open("rb") as file:
                self.tensors = _read_chunk_index(_IndexUnpickler(file).load())
        except (OSError, *DAMAGE_ERRORS) as error:
            raise CheckpointError(
                f"the index {directory / INDEX} can't be read: {error}"
            ) from error
        self._cached_chunk: tuple[Chunk, Tensor] | None = None

    def shape(self, key: str) -> tuple[int, ...]:
        return self.tensors[key][0].shape

    def dtype(self, key: str) -> torch.dtype:
        return self.tensors[key][0].dtype

    def block(self, key: str, offsets: Sequence[int], sizes: Sequence[int]) -> Tensor:
        """Return a block of one tensor, on the CPU.

        A chunk is read as a whole, and stays in memory until another chunk is read.

        Raises CheckpointError if a part of the block is missing, or a file is damaged.
        """
        block, missing = assemble_block(
            self.tensors.get(key, ()), offsets, sizes, self._slice_chunk
        )
        if missing or block is None:
            raise CheckpointError(f"{self.directory} lacks {missing} elements of '{key}'")
        return block

    def _slice_chunk(self, chunk: Chunk, starts: Sequence[int], ends: Sequence[int]) -> Tensor:
        """Return the values of a chunk between two positions in the whole tensor."""
        if self._cached_chunk is None or self._cached_chunk[0] != chunk:
            self._cached_chunk = (chunk, self._read(chunk))
        return self._cached_chunk[1][
            tuple(
                slice(start - offset, end - offset)
                for start, end, offset in zip(starts, ends, chunk.offsets, strict=True)
            )
        ]

    def _read(self, chunk: Chunk) -> Tensor:
        """Return a whole chunk. Raises CheckpointError if it is missing or damaged."""
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
            raise CheckpointError(f"'{chunk.key}' in {path} does not match the index")
        # The index may list dimensions of size 1 that the stored tensor does not have.
        return tensor.reshape(chunk.sizes)


def _read_chunk_index(index: dcp.Metadata) -> dict[str, tuple[Chunk, ...]]:
    """Return the chunks of each tensor in the index, by its key.

    Files are opened only when a chunk is read, because files of unused keys may have been removed.
    """
    locations = {
        (position.fqn, position.offset): info for position, info in index.storage_data.items()
    }
    tensors = {
        key: metadata
        for key, metadata in index.state_dict_metadata.items()
        if isinstance(metadata, dcp.TensorStorageMetadata)
    }
    return {
        key: tuple(_locate_chunks(key, metadata, locations)) for key, metadata in tensors.items()
    }


def _locate_chunks(
    key: str, metadata: dcp.TensorStorageMetadata, locations: Mapping[Any, Any]
) -> Iterator[Chunk]:
    """Yield the chunks of one tensor with their locations in files."""
    for chunk in metadata.chunks:
        info = locations[key, chunk.offsets]
        shapes_and_dtype = (
            tuple(metadata.size),
            metadata.properties.dtype,
            tuple(chunk.offsets),
            tuple(chunk.sizes),
        )
        yield Chunk(key, *shapes_and_dtype, info.relative_path, info.offset, info.length)


# --- writing


def write_chunks(path: Path, chunks: Iterable[Shard]) -> list[Chunk]:
    """Write chunks to one file and return their index entries for `write_index`.

    The file is written completely or not at all. One chunk at a time is copied to main memory.
    """
    chunks_written: list[Chunk] = []
    with atomic_path(path) as draft, draft.open("wb") as file:
        for chunk in chunks:
            # Saving a view would save the whole storage behind it, so the chunk is cloned.
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


def write_index(directory: Path, chunks: Iterable[Chunk], empty_keys: Sequence[str] = ()) -> None:
    """Write the index, which completes the directory.

    Args:
        directory: The directory of the files that hold the chunks.
        chunks: The chunks of all files.
        empty_keys: Further keys that readers expect to exist. They get no value.
    """
    tensors: dict[str, Any] = {}
    locations: dict[dcp.MetadataIndex, Any] = {}
    for chunk in chunks:
        if chunk.key not in tensors:
            properties = dcp.TensorProperties(dtype=chunk.dtype)
            tensors[chunk.key] = dcp.TensorStorageMetadata(properties, torch.Size(chunk.shape), [])
        chunks_of_key = tensors[chunk.key].chunks
        index = dcp.MetadataIndex(chunk.key, torch.Size(chunk.offsets), len(chunks_of_key))
        chunks_of_key.append(
            dcp.ChunkStorageMetadata(torch.Size(chunk.offsets), torch.Size(chunk.sizes))
        )
        locations[index] = _StorageInfo(chunk.file, chunk.start, chunk.length)
    if empty_keys:
        # All empty keys share one file.
        torch.save([None], directory / EMPTY_FILE)
        tensors |= dict.fromkeys(empty_keys, dcp.BytesStorageMetadata())
        empty_value = _StorageInfo(EMPTY_FILE, 0, (directory / EMPTY_FILE).stat().st_size)
        locations |= {dcp.MetadataIndex(key): empty_value for key in empty_keys}
    keys = {key: (key,) for key in tensors}
    with atomic_path(directory / INDEX) as draft:
        draft.write_bytes(pickle.dumps(dcp.Metadata(tensors, keys, locations, dcp.StorageMeta())))
