"""Pass weights to vLLM's workers: one file per push, which every worker maps, checks and loads.

The file holds the tensors' bytes, one after the other. The manifest with their offsets and
checksums is sent separately, as the argument of a worker's method. So a truncated, stale or damaged
file is detected.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from xxhash import xxh3_128_hexdigest

from ratchet.errors import ModelError
from ratchet.protocols import Shard
from ratchet.utils.summarize import summarize_names

EMBEDDING, HEAD = "embed_tokens.weight", "lm_head.weight"


@dataclass
class _PartialWeight:
    """A weight that has arrived in part."""

    tensor: Tensor
    n_missing: int  # number of elements that have not arrived


@dataclass
class WeightFileWriter:
    """The sender's side of pushes: it collects weights and writes them to a file.

    A push has all weights or none, because vLLM fuses some weights, and would use uninitialised
    memory for a missing part.

    Args:
        directory: where the files are written.
        shapes: shape of every weight, by its canonical name.
        dtype: dtype to which floating-point weights are converted.
        rename: returns a weight's name in vLLM.
        path: the file of the current push; None before its first weight.
    """

    directory: Path
    shapes: Mapping[str, tuple[int, ...]]
    dtype: torch.dtype
    rename: Callable[[str], str] = str
    path: Path | None = None
    _entries: dict[str, dict[str, Any]] = field(default_factory=dict)
    _partial_weights: dict[str, _PartialWeight] = field(default_factory=dict)
    _n_pushes: int = 0

    def add(self, shards: Iterator[Shard]) -> None:
        """Add shards to the push.

        Raises ModelError for a weight that is unknown, has another shape, or was sent twice.
        """
        for shard in shards:
            shape = self.shapes.get(shard.name)
            if shape is None:
                raise ModelError(
                    f"weight '{shard.name}' was sent to a generator whose model has none of that "
                    "name"
                )
            if tuple(shape) != tuple(shard.shape):
                raise ModelError(
                    f"weight '{shard.name}' was sent with shape {shard.shape}, but the model's has "
                    f"the shape {shape}"
                )
            if shard.name in self._entries:
                raise ModelError(f"weight '{shard.name}' was sent twice")
            weight = self._assemble(shard)
            if weight is not None:
                self._write(shard.name, weight)

    def _assemble(self, shard: Shard) -> Tensor | None:
        """Return the whole weight if this is its last piece, else None.

        The pieces must not overlap.
        """
        if tuple(shard.tensor.shape) == tuple(shard.shape):
            return shard.tensor
        partial_weight = self._partial_weights.get(shard.name)
        if partial_weight is None:
            empty = torch.empty(shard.shape, dtype=shard.tensor.dtype)
            partial_weight = self._partial_weights[shard.name] = _PartialWeight(
                empty, empty.numel()
            )
        target = partial_weight.tensor
        for axis, (offset, size) in enumerate(zip(shard.offsets, shard.tensor.shape, strict=True)):
            target = target.narrow(axis, offset, size)
        target.copy_(shard.tensor)
        partial_weight.n_missing -= shard.tensor.numel()
        return (
            None if partial_weight.n_missing > 0 else self._partial_weights.pop(shard.name).tensor
        )

    def _write(self, name: str, tensor: Tensor) -> None:
        if self.path is None:
            self._n_pushes += 1
            self.path = self.directory / f"push-{self._n_pushes}"
        dtype = self.dtype if tensor.is_floating_point() else tensor.dtype
        flat = tensor.detach().to("cpu", dtype).contiguous().reshape(-1).view(torch.uint8)
        # NumPy's type stubs hide that an array is a buffer.
        data = memoryview(flat.numpy())  # pyright: ignore[reportArgumentType]
        with self.path.open("ab") as file:
            offset = file.tell()
            file.write(data)
        self._entries[name] = {
            "dtype": str(dtype).removeprefix("torch."),
            "shape": list(tensor.shape),
            "offset": offset,
            "checksum": xxh3_128_hexdigest(data),
        }

    def build_manifest(self) -> dict[str, Any] | None:
        """Return the manifest for the workers; None if nothing was sent.

        Raises ModelError if weights are missing.
        """
        if not self._entries and not self._partial_weights:
            return None
        if missing_names := sorted(set(self.shapes) - set(self._entries)):
            raise ModelError(
                "a push must have all weights, and these are missing or incomplete: "
                f"{summarize_names(missing_names)}"
            )
        assert self.path is not None, "there are entries, so there is a file"
        entries = dict(self._entries)
        embeddings = [name for name in entries if name.endswith(EMBEDDING)]
        # A tied head gets the embedding's entry; without one vLLM would keep the old head.
        if HEAD not in entries and len(embeddings) == 1:
            entries[HEAD] = entries[embeddings[0]]
        renamed = {self.rename(name): entry for name, entry in entries.items()}
        return {"path": str(self.path), "entries": renamed}

    def clear(self) -> None:
        """Drop the push and its file."""
        if self.path is not None:
            self.path.unlink(missing_ok=True)
        self.path = None
        self._entries = {}
        self._partial_weights = {}


@dataclass(frozen=True)
class WeightFileReader:
    """The receiver's side of one push: its file mapped into memory."""

    memory: mmap.mmap
    entries: Mapping[str, Mapping[str, Any]]

    @classmethod
    def open(cls, manifest: Mapping[str, Any]) -> WeightFileReader:
        """Map the file that a manifest names."""
        with Path(manifest["path"]).open("rb") as file:
            # The mapping is private and writable, because torch requires writable memory.
            return cls(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY), manifest["entries"])

    def list_damaged(self) -> list[str]:
        """Return the names of weights whose bytes do not have the checksum of the manifest."""
        names = []
        with memoryview(self.memory) as view:
            for name, entry in self.entries.items():
                start = entry["offset"]
                size = self._count_bytes(entry)
                if xxh3_128_hexdigest(view[start : start + size]) != entry["checksum"]:
                    names.append(name)
        return names

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, tensor) of every weight, without copying."""
        for name, entry in self.entries.items():
            dtype = getattr(torch, entry["dtype"])
            count = math.prod(entry["shape"])
            flat = torch.frombuffer(self.memory, dtype=dtype, count=count, offset=entry["offset"])
            yield name, flat.reshape(entry["shape"])

    @staticmethod
    def _count_bytes(entry: Mapping[str, Any]) -> int:
        return math.prod(entry["shape"]) * getattr(torch, entry["dtype"]).itemsize
