"""The generator and the weight sync of a replay, which generates nothing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from ratchet.config.sections import GeneratorSection
from ratchet.protocols import Generator, Shard, WeightSync
from ratchet.types import Completion, PlacedMedium, Sampling


class NoGeneratorConfig(GeneratorSection):
    """The section of a generator that generates nothing."""

    builds: ClassVar[str] = "ratchet.commands.replay.no_generator:NoGenerator"


class NoGenerator(Generator):
    """A generator that generates nothing, and ignores pushed weights."""

    def __init__(self, *_: object) -> None:
        self.version = 0

    async def generate(
        self,
        tokens: Sequence[int] | NDArray[np.int64],
        sampling: Sampling,
        media: Sequence[PlacedMedium] = (),
    ) -> Completion:
        raise AssertionError("a replay generates nothing")

    def abort(self) -> None: ...
    async def pause(self) -> None: ...
    async def resume(self) -> None: ...
    async def prepare(self, manifest: Mapping[str, Any]) -> None: ...
    async def receive(self, shards: Iterator[Shard]) -> None: ...
    async def commit(self, version: int) -> None: ...
    async def rollback(self) -> None: ...


class NoWeightSync(WeightSync):
    """A weight sync that sends nothing."""

    async def push(self, version: int) -> None: ...
