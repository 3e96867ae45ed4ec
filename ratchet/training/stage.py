"""What a stage is made of: who plays, where, and for how long."""

from __future__ import annotations

import copy
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from ratchet.config.base import Section
from ratchet.config.experience import CurriculumConfig, ParityConfig, RolloutsConfig
from ratchet.config.resolve import construct, resolve
from ratchet.config.schema import EvaluationConfig, OptimizerConfig
from ratchet.config.sentinels import SentinelsConfig
from ratchet.data.chat.renderer import Renderer
from ratchet.data.chat.tokenizer import Tokenizer
from ratchet.data.processor import Processor
from ratchet.errors import ModelError
from ratchet.executors import env_vars as environment
from ratchet.experience.openai_proxy.agents import Agent
from ratchet.generators.workers.pool import Router
from ratchet.learners.config import LocalConfig
from ratchet.models.lora.decoder import Adapter
from ratchet.models.policy import PolicyModel
from ratchet.protocols import Closeable, Environment, Generator, Reward, Workers
from ratchet.types import Sampling


@dataclass(frozen=True)
class Policy:
    """A model and everything that speaks its tokens: what a run trains, and what an evaluation or a
    chat asks."""

    model: PolicyModel
    tokenizer: Tokenizer
    renderer: Renderer
    generator: Generator
    ranks: Workers | None = None

    @classmethod
    def of(
        cls,
        model: PolicyModel,
        tokenizer: Tokenizer,
        *,
        template: str | None = None,
        tool_format: str = "auto",
        processor: Processor | None = None,
        generator: Section | None = None,
        ranks: Workers | None = None,
    ) -> Policy:
        """processor: of a model that reads media. generator: its section; None: the engine, which
        reads the model's own tensors. ranks: processes that train, whose weights the model here is
        sent; None: the model here is trained. Raises ModelError for a misfit."""
        if tokenizer.vocab_size > model.vocab_size:
            raise ModelError(
                f"the tokenizer has {tokenizer.vocab_size} tokens, the model's embedding "
                f"{model.vocab_size}: "
                "they don't belong together; give the model's own tokenizer"
            )
        renderer = Renderer(tokenizer, template, processor=processor, tool_format=tool_format)
        section = generator or resolve("generator", {})
        with environment.settings(getattr(section, "environment", {})):
            made = construct(section, model, tokenizer)
        return cls(model, tokenizer, renderer, made, ranks)

    @property
    def one_host(self) -> bool:
        """Whether this process, all ranks and all generators are on the same."""
        hosts = set() if self.ranks is None else set(self.ranks.call_now("host"))
        if isinstance(self.generator, Router):
            hosts |= self.generator.hosts
        return hosts <= {socket.gethostname()}

    def ends(self, sampling: Sampling) -> Sampling:
        """With the ids that end this policy's turn among the stop ids."""
        return replace(
            sampling, stop_ids=tuple(dict.fromkeys((*sampling.stop_ids, *self.renderer.stop_ids)))
        )

    async def close(self) -> None:
        """Ends what the generator may have started."""
        if isinstance(self.generator, Closeable):
            await self.generator.close()


@dataclass(frozen=True)
class Arena:
    """An environment with what judges it: `reward` for training (None: its own steps give it),
    `yardstick` for evaluation (None: the same). `agent` plays it; None: the policy itself, in the
    turns that the environment makes. `second`: a judge that trains nothing; `canaries`: tasks that
    are not to be rewarded (`ratchet.experience.checks.reward_hacking`). `evaluation`: where it is
    evaluated; None: here, on the tasks that are held out."""

    environment: Environment
    reward: Reward | None = None
    yardstick: Reward | None = None
    agent: Agent | None = None
    second: Reward | None = None
    canaries: Environment | None = None
    evaluation: Arena | None = None

    @property
    def judges(self) -> bool:
        """Whether anything here can say what an answer is worth."""
        return (
            self.reward is not None
            or self.yardstick is not None
            or getattr(self.environment, "judges", True)
        )

    def copies(self) -> Callable[[], Environment]:
        """Makes instances for single attempts; they share their data (see `Environment.tasks`)."""
        return partial(copy.copy, self.environment)


@dataclass(frozen=True)
class Played:
    """What workers need to play a stage's groups themselves: the values of its environment's
    section and of its rewards', its rollouts, and how messages become tokens (see `Policy.of`)."""

    environment: Mapping[str, Any]
    rewards: Sequence[Mapping[str, Any]]
    rollouts: RolloutsConfig
    template: str | None = None
    tool_format: str = "auto"
    date: str | None = None


@dataclass(frozen=True)
class Plan:
    """What a stage does, in numbers.

    batch_size: groups (prompts or rows) a step. examples: distinct training tasks, None for no
    limit. curriculum: which of them come when. first_step: where its step numbers begin; None goes
    on from the version that the generator has. algorithm: the section of the stage's algorithm, for
    learners in other processes. link: its section; None: what fits. directory: where links may
    leave files. colocated: learner and generator use the accelerator by turns. adapter: what the
    policy trains in place of its weights. played: given to the generator's workers, which play its
    groups; None: this process plays them.
    """

    name: str
    steps: int
    batch_size: int
    sampling: Sampling = Sampling()
    optimizer: OptimizerConfig = OptimizerConfig()
    learner: Section = LocalConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    rollouts: RolloutsConfig = RolloutsConfig()
    parity: ParityConfig = ParityConfig()
    sentinels: SentinelsConfig = SentinelsConfig()
    examples: int | None = None
    curriculum: CurriculumConfig | None = None
    seed: int = 0
    first_step: int | None = None
    algorithm: Section | None = None
    link: Section | None = None
    directory: Path = Path("runs")
    colocated: bool = False
    adapter: Adapter | None = None
    played: Played | None = None
