"""Rollout workers: each process plays whole groups with its environment, rewards and generator."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ratchet.config.resolve import resolve
from ratchet.data.chat.chat_templates import set_printed_date
from ratchet.data.chat.renderer import Renderer
from ratchet.data.chat.tokenizer import Tokenizer
from ratchet.environments.build import build_environment
from ratchet.experience.rollout.columns import PackedGroups
from ratchet.experience.rollout.manager import RolloutManager
from ratchet.generators.workers.worker import GeneratorRank
from ratchet.protocols import Generator
from ratchet.training.sources import make_manager_with_player, make_player
from ratchet.training.stage import EnvSetup, WorkerRolloutSpec
from ratchet.training.stage_from_config import build_reward
from ratchet.training.workers.generators import WorkerPlacement, make_generator
from ratchet.types import Sampling, Task
from ratchet.weight_sync.endpoints import WeightReceiver


class RolloutWorker(GeneratorRank):
    """A generator worker that also plays groups, one call at a time."""

    def __init__(self, generator: Generator, tokenizer: Tokenizer) -> None:
        super().__init__(generator, WeightReceiver)
        self.tokenizer = tokenizer
        self.manager: RolloutManager | None = None

    async def begin(self, stage: WorkerRolloutSpec, max_context: int, needs_reward: bool) -> None:
        """End the previous stage, and set the stage whose groups are played from now on.

        Args:
            stage: The stage's environment, rewards and rollout limits.
            max_context: See `ratchet.training.sources.make_manager`.
            needs_reward: See `ratchet.training.sources.make_manager`.
        """
        await self.leave()
        set_printed_date(stage.date)
        renderer = Renderer(self.tokenizer, stage.template, tool_format=stage.tool_format)
        rewards = [resolve("rewards", section) for section in stage.rewards]
        environment = build_environment(resolve("environment", stage.environment))
        setup = EnvSetup(environment, reward=build_reward(rewards))
        player = make_player(self.generator, renderer, None, stage.rollouts, max_context)
        self.manager = make_manager_with_player(
            player, renderer, setup, setup.reward, stage.rollouts, needs_reward=needs_reward
        )

    async def play(
        self, jobs: Sequence[tuple[str, Task]], sampling: Sampling, attempts: int, greedy: bool
    ) -> PackedGroups:
        """Play one group of `attempts` attempts for each (group id, task) of `jobs`.

        With `greedy`, each group also gets a greedy attempt.
        """
        assert self.manager is not None, "`begin` was not called"
        return PackedGroups.pack(
            await self.manager.groups(jobs, sampling, attempts=attempts, greedy=greedy)
        )

    async def leave(self) -> None:
        """End the stage and close its manager."""
        manager, self.manager = self.manager, None
        if manager is not None:
            await manager.close()

    async def close(self) -> None:
        await self.leave()
        await super().close()


def make_rank(
    placement: WorkerPlacement, *, tokenizer: Tokenizer, **arguments: Any
) -> RolloutWorker:
    """Return the component of one worker process. Further arguments go to `make_generator`."""
    return RolloutWorker(make_generator(placement, tokenizer=tokenizer, **arguments), tokenizer)
