"""Workers that generate and play: each has an environment, rewards and a generator in one process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ratchet.assemble import build_reward
from ratchet.build import make_manager
from ratchet.config.kinds import construct, resolve
from ratchet.data.renderer import Renderer
from ratchet.data.tokenizer import Tokenizer
from ratchet.experience.manager import RolloutManager
from ratchet.experience.shipping import Shipped
from ratchet.generation import Seat, make_generator
from ratchet.generators.rank import GeneratorRank
from ratchet.interfaces import Generator
from ratchet.links.ends import Intake
from ratchet.models.policy import PolicyModel
from ratchet.stage import Arena, Played, Policy
from ratchet.types import Sampling, Task


class GroupRank(GeneratorRank):
    """Plays groups too, one call at a time. model: that the generator reads, or was made of."""

    def __init__(self, generator: Generator, model: PolicyModel, tokenizer: Tokenizer) -> None:
        super().__init__(generator, Intake)
        self.model, self.tokenizer = model, tokenizer
        self.manager: RolloutManager | None = None

    async def begin(self, stage: Played, max_context: int, needs_reward: bool) -> None:
        """What is played from now on. max_context, needs_reward: see `make_manager`."""
        await self._leave()
        renderer = Renderer(self.tokenizer, stage.template, tool_format=stage.tool_format)
        rewards = [resolve("rewards", section) for section in stage.rewards]
        arena = Arena(construct(resolve("environment", stage.environment)), reward=build_reward(rewards))
        policy = Policy(self.model, self.tokenizer, renderer, self.generator)
        options: dict[str, Any] = {"max_context": max_context, "needs_reward": needs_reward}
        self.manager = make_manager(policy, arena, arena.reward, stage.rollouts, **options)

    async def play(self, jobs: Sequence[tuple[str, Task]], sampling: Sampling, attempts: int, greedy: bool) -> Shipped:
        assert self.manager is not None, "a stage begins first"
        return Shipped.of(await self.manager.groups(jobs, sampling, attempts=attempts, greedy=greedy))

    async def close(self) -> None:
        await self._leave()
        await super().close()

    async def _leave(self) -> None:
        manager, self.manager = self.manager, None
        if manager is not None:
            await manager.close()


def make_rank(seat: Seat, *, tokenizer: Tokenizer, **given: Any) -> GroupRank:
    """What a worker's process holds, as `ratchet.generation.make_rank`."""
    generator, model = make_generator(seat, tokenizer=tokenizer, **given)
    return GroupRank(generator, model, tokenizer)
