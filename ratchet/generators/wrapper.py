"""Forward the calls of a generator to a wrapped generator."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ratchet.protocols import Generator, Shard
from ratchet.types import Completion, PlacedMedium, Sampling


class GeneratorWrapper(Generator):
    """Base class of generators that wrap another one: it forwards every call to `inner`."""

    def __init__(self, inner: Generator) -> None:
        self.inner = inner
        self.tokenizer = inner.tokenizer
        self.precision = inner.precision
        self.shares_weights = inner.shares_weights
        self.records_routes = inner.records_routes
        self.records_masks = inner.records_masks
        self.can_offload = inner.can_offload

    @property
    def version(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.inner.version

    @property
    def adopted(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.inner.adopted

    @property
    def computed_tokens(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.inner.computed_tokens

    async def generate(
        self,
        tokens: Sequence[int] | NDArray[np.int64],
        sampling: Sampling,
        media: Sequence[PlacedMedium] = (),
    ) -> Completion:
        return await self.inner.generate(tokens, sampling, media)

    def abort(self) -> None:
        self.inner.abort()

    async def pause(self) -> None:
        await self.inner.pause()

    async def resume(self) -> None:
        await self.inner.resume()

    async def prepare(self, manifest: Mapping[str, Any]) -> None:
        await self.inner.prepare(manifest)

    async def receive(self, shards: Iterator[Shard]) -> None:
        await self.inner.receive(shards)

    async def commit(self, version: int) -> None:
        await self.inner.commit(version)

    async def rollback(self) -> None:
        await self.inner.rollback()

    def reserve_memory(self, n_bytes: int) -> None:
        self.inner.reserve_memory(n_bytes)

    def weights(self) -> Iterator[Shard]:
        return self.inner.weights()

    async def onload(self) -> None:
        await self.inner.onload()

    async def offload(self) -> None:
        await self.inner.offload()

    async def close(self) -> None:
        await self.inner.close()
