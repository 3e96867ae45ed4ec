"""Weights on their way to vLLM's workers: one file a push, which every worker maps, checks and
loads.

The file is the tensors' bytes, one after the other; what lies where is said in the manifest, which
goes by another way (the call of the worker). So neither side can mistake a file that is cut off,
stale or damaged for the weights that were sent.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from xxhash import xxh3_128_hexdigest

from ratchet.errors import ModelError
from ratchet.protocols import Shard

EMBEDDING, HEAD = "embed_tokens.weight", "lm_head.weight"


@dataclass
class _Assembled:
    """A weight of which pieces have come."""

    tensor: Tensor
    missing: int  # elements


@dataclass
class Outbox:
    """The sender's side. shapes: of every weight, by its canonical name.

    A push has all weights or none: vLLM fuses some of them, and would take memory as it finds it
    for the part that is missing.
    """

    directory: Path
    shapes: Mapping[str, tuple[int, ...]]
    dtype: torch.dtype
    path: Path | None = None
    _entries: dict[str, dict[str, Any]] = field(default_factory=dict)
    _partly: dict[str, _Assembled] = field(default_factory=dict)
    _pushes: int = 0

    def add(self, shards: Iterator[Shard]) -> None:
        """Raises ModelError for a weight that the model doesn't have, of another shape, or sent
        twice."""
        for shard in shards:
            known = self.shapes.get(shard.name)
            if known is None:
                raise ModelError(
                    f"weight '{shard.name}' was sent to a generator whose model has none of that "
                    "name"
                )
            if tuple(known) != tuple(shard.shape):
                raise ModelError(
                    f"weight '{shard.name}' was sent with shape {shard.shape}, the model has "
                    f"{known}"
                )
            if shard.name in self._entries:
                raise ModelError(f"weight '{shard.name}' was sent twice")
            whole = self._whole(shard)
            if whole is not None:
                self._write(shard.name, whole)

    def _whole(self, shard: Shard) -> Tensor | None:
        """The weight, once its last piece is there; the pieces don't overlap."""
        if tuple(shard.tensor.shape) == tuple(shard.shape):
            return shard.tensor
        partly = self._partly.get(shard.name)
        if partly is None:
            empty = torch.empty(shard.shape, dtype=shard.tensor.dtype)
            partly = self._partly[shard.name] = _Assembled(empty, empty.numel())
        place = partly.tensor
        for axis, (offset, size) in enumerate(zip(shard.offsets, shard.tensor.shape, strict=True)):
            place = place.narrow(axis, offset, size)
        place.copy_(shard.tensor)
        partly.missing -= shard.tensor.numel()
        return None if partly.missing > 0 else self._partly.pop(shard.name).tensor

    def _write(self, name: str, tensor: Tensor) -> None:
        if self.path is None:
            self._pushes += 1
            self.path = self.directory / f"push-{self._pushes}"
        dtype = self.dtype if tensor.is_floating_point() else tensor.dtype
        flat = tensor.detach().to("cpu", dtype).contiguous().reshape(-1).view(torch.uint8)
        data = memoryview(flat.numpy())  # pyright: ignore[reportArgumentType] (numpy's stubs hide that it is a buffer)
        with self.path.open("ab") as file:
            offset = file.tell()
            file.write(data)
        self._entries[name] = {
            "dtype": str(dtype).removeprefix("torch."),
            "shape": list(tensor.shape),
            "offset": offset,
            "checksum": xxh3_128_hexdigest(data),
        }

    def manifest(self) -> dict[str, Any] | None:
        """What the workers are told; None where nothing was sent. Raises ModelError where some
        weights are missing."""
        if not self._entries and not self._partly:
            return None
        if missing := sorted(set(self.shapes) - set(self._entries)):
            some = ", ".join(missing[:5]) + (
                f" and {len(missing) - 5} more" if len(missing) > 5 else ""
            )
            raise ModelError(
                f"a push has all weights or none, and these are missing or incomplete: {some}"
            )
        assert self.path is not None, "there are entries, so there is a file"
        entries = dict(self._entries)
        embeddings = [name for name in entries if name.endswith(EMBEDDING)]
        if HEAD not in entries and len(embeddings) == 1:
            entries[HEAD] = entries[embeddings[0]]  # a tied one; vLLM would keep the old head
        return {"path": str(self.path), "entries": entries}

    def clear(self) -> None:
        if self.path is not None:
            self.path.unlink(missing_ok=True)
        self.path = None
        self._entries, self._partly = {}, {}


@dataclass(frozen=True)
class Inbox:
    """The receiver's side of one push."""

    memory: mmap.mmap
    entries: Mapping[str, Mapping[str, Any]]

    @classmethod
    def open(cls, manifest: Mapping[str, Any]) -> Inbox:
        with Path(manifest["path"]).open("rb") as file:
            # A private mapping: torch wants memory that could be written to.
            return cls(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY), manifest["entries"])

    def damaged(self) -> list[str]:
        """Names of the weights whose bytes are not those that were sent."""
        found = []
        with memoryview(self.memory) as view:
            for name, entry in self.entries.items():
                start, size = entry["offset"], self._bytes(entry)
                if xxh3_128_hexdigest(view[start : start + size]) != entry["checksum"]:
                    found.append(name)
        return found

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        for name, entry in self.entries.items():
            dtype = getattr(torch, entry["dtype"])
            count = math.prod(entry["shape"])
            flat = torch.frombuffer(self.memory, dtype=dtype, count=count, offset=entry["offset"])
            yield name, flat.reshape(entry["shape"])

    @staticmethod
    def _bytes(entry: Mapping[str, Any]) -> int:
        return math.prod(entry["shape"]) * getattr(torch, entry["dtype"]).itemsize
