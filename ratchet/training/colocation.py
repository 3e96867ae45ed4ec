"""Learner and generator on the same accelerator, by turns: whoever is asked to work has it, and
what the other holds there goes to main memory meanwhile. Nobody who asks them need know.

A push is the generator's turn: the learner's weights are read from main memory, where they are by
then. So the accelerator never holds both.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

from torch import Tensor

from ratchet.batch import Batch
from ratchet.errors import ConfigError
from ratchet.learners.wrapper import Around
from ratchet.protocols import (
    Audits,
    Generator,
    Learner,
    Link,
    LossTerm,
    Placeable,
    Shard,
    ShowsWeights,
)
from ratchet.types import Completion, Placed, Sampling

LEARNERS, GENERATOR = "learners", "generator"


class Turns:
    """sides: who has the accelerator at the same time, by name. Raises ConfigError for one that
    can't leave it."""

    def __init__(self, sides: Mapping[str, Sequence[object]]) -> None:
        self._sides: dict[str, list[Placeable]] = {}
        for side, members in sides.items():
            self._sides[side] = [member for member in members if isinstance(member, Placeable)]
            if len(self._sides[side]) < len(members):
                stays = next(
                    type(member).__name__ for member in members if not isinstance(member, Placeable)
                )
                raise ConfigError(
                    "cluster.colocated=true lets learner and generator use the accelerator by "
                    f"turns, and {stays} can't leave "
                    "it: set it to false, or generator.kind=vllm"
                )
        self._has: str | None = None
        self._working = 0
        self._free = asyncio.Condition()

    @asynccontextmanager
    async def of(self, side: str) -> AsyncIterator[None]:
        """Waits until nobody else works. Members of one side work at the same time."""
        async with self._free:
            await self._free.wait_for(lambda: not self._working or self._has == side)
            if self._has != side:
                await self._change(side)
            self._working += 1
        try:
            yield
        finally:
            async with self._free:
                self._working -= 1
                self._free.notify_all()

    async def _change(self, side: str) -> None:
        self._has = None  # where this fails, the next change does all of it again
        for other, members in self._sides.items():
            for member in members if other != side else ():
                await member.offload()
        for member in self._sides[side]:
            await member.onload()
        self._has = side


class TurnLearner(Around):
    """Implements `Learner`. Weights are read, saved and loaded wherever they are: for that nobody
    waits."""

    def __init__(self, inner: Learner, turns: Turns) -> None:
        super().__init__(inner)
        self.turns = turns

    async def score(
        self, batch: Batch, wanted: Sequence[str], *, top_k: int = 0
    ) -> Mapping[str, Tensor]:
        async with self.turns.of(LEARNERS):
            return await super().score(batch, wanted, top_k=top_k)

    async def update(self, mini: Batch, terms: Sequence[LossTerm]) -> Mapping[str, float]:
        async with self.turns.of(LEARNERS):
            return await super().update(mini, terms)


class TurnGenerator:
    """Implements `Generator`. Pushes take their turn by the link."""

    def __init__(self, inner: Generator, turns: Turns) -> None:
        self.inner, self.turns = inner, turns

    @property
    def version(self) -> int:
        return self.inner.version

    @property
    def tokenizer(self) -> Any:
        return getattr(self.inner, "tokenizer", None)

    async def generate(
        self, tokens: Any, sampling: Sampling, media: Sequence[Placed] = ()
    ) -> Completion:
        async with self.turns.of(GENERATOR):
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

    def weights(self) -> Iterator[Shard]:
        return self.inner.weights() if isinstance(self.inner, ShowsWeights) else iter(())


class TurnLink:
    """Implements `Link` and `Audits`."""

    def __init__(self, inner: Link, turns: Turns) -> None:
        self.inner, self.turns = inner, turns

    async def push(self, version: int) -> None:
        async with self.turns.of(GENERATOR):
            await self.inner.push(version)

    async def audit(self) -> Sequence[str] | None:
        """None where the link can't."""
        async with self.turns.of(GENERATOR):
            return await self.inner.audit() if isinstance(self.inner, Audits) else None

    async def close(self) -> None:
        """The learners have the last turn: whoever uses the model next finds it where it was."""
        await self.inner.close()
        async with self.turns.of(LEARNERS):
            pass


def take_turns(
    learners: Mapping[str, Learner], generator: Generator, link: Link
) -> tuple[dict[str, Learner], Generator, Link]:
    """The same, each waiting for its turn. Raises ConfigError where one can't leave the
    accelerator."""
    turns = Turns({LEARNERS: list(learners.values()), GENERATOR: [generator]})
    return (
        {name: TurnLearner(learner, turns) for name, learner in learners.items()},
        TurnGenerator(generator, turns),
        TurnLink(link, turns),
    )
