"""Pass weights to vLLM's workers: the memory of a push, which every worker maps, checks and loads.

The memory, a file or a buffer on the learner's accelerator, holds the tensors' bytes one after the
other. The manifest with their offsets and checksums is sent separately, as the argument of a
worker's method. So truncated, stale or damaged memory is detected.
"""

from __future__ import annotations

import math
import mmap
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ratchet.errors import ModelError
from ratchet.models.weights.checksums import as_bytes, checksum, has_checksum
from ratchet.protocols import Shard
from ratchet.utils.summarize import summarize_names

EMBEDDING, HEAD = "embed_tokens.weight", "lm_head.weight"
# Alignment of a tensor in bytes, which is enough for every dtype.
ALIGNMENT = 64


def align_offset(offset: int) -> int:
    """Return the offset of the next tensor, if bytes up to `offset` are taken."""
    return -(-offset // ALIGNMENT) * ALIGNMENT


class WeightCarrier(ABC):
    """The sender's side of the memory through which pushes reach vLLM's workers."""

    @abstractmethod
    def store(self, tensor: Tensor) -> dict[str, Any]:
        """Store a whole weight after the others. Return its entry in the manifest."""

    @abstractmethod
    def locate(self) -> str | None:
        """Make all stored bytes visible to the workers.

        Return the path of the push's file; None if it is in memory that the workers have mapped.
        """

    @abstractmethod
    def clear(self) -> None:
        """Drop the push."""


def make_entry(shape: torch.Size, dtype: torch.dtype, offset: int, digest: str) -> dict[str, Any]:
    """Return the manifest's entry of a weight that begins at byte `offset`."""
    name = str(dtype).removeprefix("torch.")
    return {"dtype": name, "shape": list(shape), "offset": offset, "checksum": digest}


@dataclass
class FileCarrier(WeightCarrier):
    """A carrier that writes each push to a file."""

    directory: Path
    """where the files are written."""
    dtype: torch.dtype
    """dtype to which floating-point weights are converted."""
    path: Path | None = None
    """the file of the current push; None before its first weight."""
    _n_pushes: int = 0

    def store(self, tensor: Tensor) -> dict[str, Any]:
        if self.path is None:
            self._n_pushes += 1
            self.path = self.directory / f"push-{self._n_pushes}"
        dtype = self.dtype if tensor.is_floating_point() else tensor.dtype
        whole = tensor.detach().to("cpu", dtype).contiguous()
        with self.path.open("ab") as file:
            offset = align_offset(file.tell())
            file.write(bytes(offset - file.tell()))
            # NumPy's type stubs hide that an array is a buffer.
            file.write(as_bytes(whole).numpy())  # pyright: ignore[reportArgumentType]
        return make_entry(whole.shape, dtype, offset, checksum(whole))

    def locate(self) -> str | None:
        assert self.path is not None, "nothing is stored"
        return str(self.path)

    def clear(self) -> None:
        """Drop the push and its file."""
        if self.path is not None:
            self.path.unlink(missing_ok=True)
        self.path = None


@dataclass
class _PartialWeight:
    """A weight that has arrived in part."""

    tensor: Tensor
    n_missing: int  # number of elements that have not arrived


@dataclass
class PushWriter:
    """The sender's side of pushes: it collects weights and stores them with a carrier.

    A push has all weights or none, because vLLM fuses some weights, and would use uninitialised
    memory for a missing part.
    """

    carrier: WeightCarrier
    """stores the weights. It may be replaced while the push is empty."""
    shapes: Mapping[str, tuple[int, ...]]
    """shape of every weight, by its canonical name."""
    rename: Callable[[str], str] = str
    """returns a weight's name in vLLM."""
    _entries: dict[str, dict[str, Any]] = field(default_factory=dict)
    _partial_weights: dict[str, _PartialWeight] = field(default_factory=dict)

    @property
    def is_empty(self) -> bool:
        """True if the push has no weight yet."""
        return not self._entries and not self._partial_weights

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
                self._entries[shard.name] = self.carrier.store(weight)

    def _assemble(self, shard: Shard) -> Tensor | None:
        """Return the whole weight if this is its last piece, else None.

        The pieces must not overlap.
        """
        if tuple(shard.tensor.shape) == tuple(shard.shape):
            return shard.tensor
        partial_weight = self._partial_weights.get(shard.name)
        if partial_weight is None:
            empty = torch.empty(shard.shape, dtype=shard.tensor.dtype, device=shard.tensor.device)
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

    def build_manifest(self) -> dict[str, Any] | None:
        """Return the manifest for the workers; None if nothing was sent.

        Raises ModelError if weights are missing.
        """
        if self.is_empty:
            return None
        if missing_names := sorted(set(self.shapes) - set(self._entries)):
            raise ModelError(
                "a push must have all weights, and these are missing or incomplete: "
                f"{summarize_names(missing_names)}"
            )
        entries = dict(self._entries)
        embeddings = [name for name in entries if name.endswith(EMBEDDING)]
        # A tied head gets the embedding's entry; without one vLLM would keep the old head.
        if HEAD not in entries and len(embeddings) == 1:
            entries[HEAD] = entries[embeddings[0]]
        renamed = {self.rename(name): entry for name, entry in entries.items()}
        return {"path": self.carrier.locate(), "entries": renamed}

    def clear(self) -> None:
        """Drop the push."""
        self.carrier.clear()
        self._entries = {}
        self._partial_weights = {}


@dataclass(frozen=True)
class PushReader:
    """The receiver's side of one push: its memory, and where each weight lies in it."""

    bytes_n: Tensor  # uint8
    entries: Mapping[str, Mapping[str, Any]]

    @classmethod
    def open(cls, manifest: Mapping[str, Any], mapped_n: Tensor | None = None) -> PushReader:
        """Map the file that a manifest names.

        Raises OSError or ValueError if it can't be mapped.

        mapped_n: the memory of pushes without a file, uint8.
        """
        if manifest["path"] is None:
            if mapped_n is None:
                raise ValueError("this worker has mapped no memory of the learner's accelerator")
            return cls(mapped_n, manifest["entries"])
        with Path(manifest["path"]).open("rb") as file:
            # The mapping is private and writable, because torch requires writable memory.
            memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        return cls(torch.frombuffer(memory, dtype=torch.uint8), manifest["entries"])

    @classmethod
    def open_checked(
        cls, manifest: Mapping[str, Any], mapped_n: Tensor | None = None
    ) -> PushReader:
        """Map a push as `open`, and raise ModelError unless every weight has its checksum."""
        try:
            reader = cls.open(manifest, mapped_n)
        except (OSError, ValueError) as error:
            raise ModelError(f"{manifest['path']} can't be read: {error}") from error
        if damaged_names := reader.list_damaged():
            raise ModelError(
                f"{len(damaged_names)} weights don't have the checksum that they were sent with: "
                f"{summarize_names(damaged_names)}"
            )
        return reader

    def list_damaged(self) -> list[str]:
        """Return the names of weights whose bytes do not have the checksum of the manifest."""
        return [
            name
            for name, entry in self.entries.items()
            if not has_checksum(self._select_bytes(entry), entry["checksum"])
        ]

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, tensor) of every weight, without copying."""
        for name, entry in self.entries.items():
            dtype = getattr(torch, entry["dtype"])
            yield name, self._select_bytes(entry).view(dtype).reshape(entry["shape"])

    def _select_bytes(self, entry: Mapping[str, Any]) -> Tensor:
        """Return the bytes of a weight, uint8 [n]; fewer if the memory ends before."""
        count = math.prod(entry["shape"]) * getattr(torch, entry["dtype"]).itemsize
        return self.bytes_n[entry["offset"] : entry["offset"] + count]
