"""An adapter on its way to vLLM's workers: a directory in peft's form, which each of them checks
and vLLM itself loads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from shutil import rmtree

import torch
from torch import Tensor
from xxhash import xxh3_128_hexdigest

from ratchet.errors import ModelError
from ratchet.models.lora.decoder import Adapter
from ratchet.models.lora.files import WEIGHTS, Stored, save_adapter
from ratchet.protocols import Shard

RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # that vLLM can be started for


class AdapterBox:
    """The sender's side. Files of a push stay until the next one has been loaded: vLLM may want
    them again."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.adapter: Adapter | None = None
        self.loaded: Path | None = None
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._tensors: dict[str, Tensor] = {}
        self._missing: dict[str, int] = {}  # numbers of each weight that have not come
        self._saved = 0

    def expect(self, adapter: Adapter | None, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """shapes: of its weights, by peft's names."""
        self.adapter, self._shapes, self._tensors = adapter, dict(shapes), {}
        self._missing = {name: torch.Size(shape).numel() for name, shape in shapes.items()}

    def add(self, shard: Shard) -> None:
        """Raises ModelError for a weight that was not announced, or of another shape."""
        if self._shapes.get(shard.name) != tuple(shard.shape):
            raise ModelError(
                f"weight '{shard.name}' {shard.shape} of an adapter was sent, and not announced as "
                "that"
            )
        whole = self._tensors.setdefault(shard.name, torch.empty(shard.shape, dtype=torch.float32))
        for axis, (offset, size) in enumerate(zip(shard.offsets, shard.tensor.shape, strict=True)):
            whole = whole.narrow(axis, offset, size)
        whole.copy_(shard.tensor)
        self._missing[shard.name] -= shard.tensor.numel()

    def write(self) -> tuple[Path, str] | None:
        """(directory, checksum of the weights' file); None where no adapter was sent. Raises
        ModelError for a part of one."""
        if self.adapter is None:
            return None
        if missing := [name for name, count in self._missing.items() if count]:
            raise ModelError(
                "a push of an adapter has all of it, and this is missing or incomplete: "
                f"{missing[0]}"
            )
        return self._save(
            self.adapter, sorted({name.split(".")[-3] for name in self._tensors}), self._tensors
        )

    def keep(self, stored: Stored) -> tuple[Path, str]:
        """As `write`, of one that was read elsewhere. Its files stay."""
        return self._save(stored.adapter, stored.names, stored.weights)

    def _save(
        self, adapter: Adapter, names: Sequence[str], weights: Mapping[str, Tensor]
    ) -> tuple[Path, str]:
        self._saved += 1
        path = self.directory / f"adapter-{self._saved}"
        save_adapter(path, adapter, names, weights)
        return path, xxh3_128_hexdigest((path / WEIGHTS).read_bytes())

    def took(self, path: Path) -> None:
        """The workers have loaded it."""
        if self.loaded is not None:
            rmtree(self.loaded, ignore_errors=True)
        self.loaded = path


def damage(path: str, checksum: str) -> str:
    """The receiver's side: what is wrong with the file; "" for nothing."""
    try:
        found = xxh3_128_hexdigest((Path(path) / WEIGHTS).read_bytes())
    except OSError as error:
        return f"{path} can't be read: {error}"
    return (
        ""
        if found == checksum
        else f"the adapter in {path} doesn't have the checksum that it was sent with"
    )
