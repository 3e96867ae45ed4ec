"""Time-share an accelerator between learner and generator (colocation).

While one of the two works, it holds the accelerator, and the tensors of the other are offloaded to
main memory. Callers see no difference.

A weight sync runs in the generator's turn and reads the learner's weights from main memory, so the
accelerator never holds both.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

from torch import Tensor

from ratchet.batch import Batch
from ratchet.errors import ConfigError
from ratchet.generators.wrapper import GeneratorWrapper
from ratchet.learners.wrapper import LearnerWrapper
from ratchet.protocols import Generator, Learner, LossTerm, WeightSync
from ratchet.types import Completion, PlacedMedium, Sampling

LEARNERS, GENERATOR = "learners", "generator"


class AcceleratorLock:
    """A lock on the accelerator. One side, the learners or the generator, holds it at a time.

    Args:
        sides: The members that use the accelerator at the same time, by the name of their side.

    Raises:
        ConfigError: A member can't be offloaded.
    """

    def __init__(self, sides: Mapping[str, Sequence[Learner | Generator]]) -> None:
        for side, members in sides.items():
            alternative = ", or generator.kind=vllm" if side == GENERATOR else ""
            immovable = next((member for member in members if not member.can_offload), None)
            if immovable is not None:
                raise ConfigError(
                    "cluster.colocated=true lets learner and generator share the accelerator in "
                    f"turns, but {type(immovable).__name__} can't be offloaded from it. Set "
                    f"cluster.colocated=false{alternative}"
                )
        self._sides = sides
        self._holder: str | None = None
        self._active = 0
        self._condition = asyncio.Condition()

    @asynccontextmanager
    async def hold(self, side: str) -> AsyncIterator[None]:
        """Wait until the other sides are idle, and hold the accelerator inside the block.

        Members of one side work at the same time.
        """
        async with self._condition:
            await self._condition.wait_for(lambda: not self._active or self._holder == side)
            if self._holder != side:
                await self._switch_to(side)
            self._active += 1
        try:
            yield
        finally:
            async with self._condition:
                self._active -= 1
                self._condition.notify_all()

    async def _switch_to(self, side: str) -> None:
        """Offload all other sides, then load this one."""
        # If a move fails, no side holds the accelerator, and the next change repeats all moves.
        self._holder = None
        for name, members in self._sides.items():
            for member in members if name != side else ():
                await member.offload()
        for member in self._sides[side]:
            await member.onload()
        self._holder = side


class ColocatedLearner(LearnerWrapper):
    """A learner that holds the accelerator during each pass and update.

    Reading, saving and loading weights takes no lock, because it works in main memory too.
    """

    def __init__(self, inner: Learner, lock: AcceleratorLock) -> None:
        super().__init__(inner)
        self.lock = lock

    async def score(
        self, batch: Batch, output_names: Sequence[str], *, top_k: int = 0
    ) -> Mapping[str, Tensor]:
        async with self.lock.hold(LEARNERS):
            return await super().score(batch, output_names, top_k=top_k)

    async def update(self, mini: Batch, terms: Sequence[LossTerm]) -> Mapping[str, float]:
        async with self.lock.hold(LEARNERS):
            return await super().update(mini, terms)


class ColocatedGenerator(GeneratorWrapper):
    """A generator that holds the accelerator during each request.

    `ColocatedWeightSync` holds it during weight syncs.
    """

    def __init__(self, inner: Generator, lock: AcceleratorLock) -> None:
        super().__init__(inner)
        self.lock = lock

    async def generate(
        self, tokens: Any, sampling: Sampling, media: Sequence[PlacedMedium] = ()
    ) -> Completion:
        async with self.lock.hold(GENERATOR):
            return await super().generate(tokens, sampling, media)


class ColocatedWeightSync(WeightSync):
    """A weight sync that runs in the generator's turn."""

    def __init__(self, inner: WeightSync, lock: AcceleratorLock) -> None:
        self.inner = inner
        self.lock = lock

    async def push(self, version: int) -> None:
        async with self.lock.hold(GENERATOR):
            await self.inner.push(version)

    async def audit(self) -> Sequence[str] | None:
        """Return the names of weights that differ, or None if the weight sync can't tell."""
        async with self.lock.hold(GENERATOR):
            return await self.inner.audit()

    async def close(self) -> None:
        """Close the weight sync, then load the learners onto the accelerator.

        So the policy's weights return to the device where they were before the stage.
        """
        await self.inner.close()
        async with self.lock.hold(LEARNERS):
            pass


def colocate(
    learners: Mapping[str, Learner], generator: Generator, weight_sync: WeightSync
) -> tuple[dict[str, Learner], Generator, WeightSync]:
    """Wrap learners, generator and weight sync so that each waits for its turn.

    Raises:
        ConfigError: A learner or the generator can't be offloaded.
    """
    lock = AcceleratorLock({LEARNERS: list(learners.values()), GENERATOR: [generator]})
    return (
        {name: ColocatedLearner(learner, lock) for name, learner in learners.items()},
        ColocatedGenerator(generator, lock),
        ColocatedWeightSync(weight_sync, lock),
    )
