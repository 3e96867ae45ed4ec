"""The shortest link: the weights of something are handed to a generator, as they are, in this
process."""

from __future__ import annotations

from ratchet.protocols import Generator, Learner, WeightSync


class DirectWeightSync(WeightSync):
    def __init__(self, learner: Learner, generator: Generator) -> None:
        self.learner, self.generator = learner, generator

    async def push(self, version: int) -> None:
        """Whatever goes wrong on the way, the generator goes on with the weights that it has; the
        error is raised."""
        await self.generator.prepare({})
        try:
            await self.generator.receive(self.learner.weights())
            await self.generator.commit(version)
        except BaseException:
            await self.generator.rollback()
            raise
