"""The parts of a stage: the policy, the environment with its rewards, and the stage's settings."""

from __future__ import annotations

import copy
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from ratchet.config.base import Section
from ratchet.config.experience import CurriculumConfig, ParityConfig, RolloutsConfig
from ratchet.config.resolve import build, resolve
from ratchet.config.schema import EvaluationConfig, OptimizerConfig
from ratchet.config.sections import AlgorithmSection, GeneratorSection, LearnerSection
from ratchet.config.sentinels import SentinelsConfig
from ratchet.data.chat.renderer import Renderer
from ratchet.data.chat.tokenizer import Tokenizer
from ratchet.data.processor import Processor
from ratchet.errors import ConfigError, ModelError
from ratchet.executors import env_vars
from ratchet.experience.openai_proxy.agents import Agent
from ratchet.experience.openai_proxy.config import LOCAL_SERVER, AgentServerSettings
from ratchet.generators.workers.pool import GeneratorPool
from ratchet.learners.config import LocalConfig
from ratchet.models.lora.decoder import Adapter
from ratchet.models.policy import PolicyModel
from ratchet.protocols import Environment, Generator, Reward
from ratchet.rewards.base import as_reward
from ratchet.rewards.judge_models.base import Judges
from ratchet.types import Sampling
from ratchet.utils.user_parts import add_missing_members
from ratchet.worker_protocols import Workers


@dataclass(frozen=True)
class Policy:
    """A model with its tokenizer, renderer and generator.

    A run trains the model; evaluations and chats only generate with it.
    """

    model: PolicyModel
    tokenizer: Tokenizer
    renderer: Renderer
    generator: Generator
    ranks: Workers | None = None
    """The processes that train the model; None if this process trains it."""

    def __post_init__(self) -> None:
        # A user may pass a plain class: add the members of the base class that it lacks.
        add_missing_members(self.generator, Generator)

    @classmethod
    def create(
        cls,
        model: PolicyModel,
        tokenizer: Tokenizer,
        *,
        template: str | None = None,
        tool_format: str = "auto",
        processor: Processor | None = None,
        generator: GeneratorSection | None = None,
        ranks: Workers | None = None,
    ) -> Policy:
        """Return a policy for a model.

        Args:
            model: The model. With `ranks` it receives the weights that the ranks train.
            tokenizer: The model's tokenizer.
            template: The chat template; None takes the tokenizer's.
            tool_format: The format of tool calls.
            processor: The processor of a model that reads media.
            generator: The generator's section; None builds the built-in engine, which reads the
                model's tensors.
            ranks: The processes that train; None trains `model` here.

        Raises:
            ModelError: The tokenizer does not fit the model.
        """
        if tokenizer.vocab_size > model.vocab_size:
            raise ModelError(
                f"the tokenizer has {tokenizer.vocab_size} tokens, but the model's embedding has "
                f"{model.vocab_size}. Pass the model's own tokenizer"
            )
        renderer = Renderer(tokenizer, template, processor=processor, tool_format=tool_format)
        generator_section = generator or resolve("generator", {})
        with env_vars.set_env_defaults(generator_section.environment):
            built_generator = build(generator_section, model, tokenizer)
        return cls(model, tokenizer, renderer, built_generator, ranks)

    @property
    def is_on_accelerator(self) -> bool:
        """True if a learner in this process trains the model on a CUDA device."""
        return self.ranks is None and next(self.model.parameters()).is_cuda

    @property
    def one_host(self) -> bool:
        """True if this process, all ranks and all generators run on one host."""
        hosts = set() if self.ranks is None else set(self.ranks.call_now("host"))
        if isinstance(self.generator, GeneratorPool):
            hosts |= self.generator.hosts
        return hosts <= {socket.gethostname()}

    def with_stop_ids(self, sampling: Sampling) -> Sampling:
        """Return the sampling parameters with the ids that end a policy turn added to stop_ids."""
        return replace(
            sampling, stop_ids=tuple(dict.fromkeys((*sampling.stop_ids, *self.renderer.stop_ids)))
        )

    async def close(self) -> None:
        """Close the generator if it has processes or other resources."""
        await self.generator.close()


def _complete_environment(environment: Any) -> None:
    """Add the members that an environment lacks. Raises ConfigError for anything else."""
    if isinstance(environment, type) or not all(
        callable(getattr(environment, name, None)) for name in ("tasks", "reset", "step")
    ):
        raise ConfigError(
            f"{environment!r:.80} is not an environment. Give an object with the methods tasks, "
            "reset and step"
        )
    add_missing_members(environment, Environment)


@dataclass(frozen=True)
class EnvSetup:
    """An environment with its rewards."""

    environment: Environment
    reward: Reward | None = None
    """The training reward; None takes the rewards of the environment's steps."""
    eval_reward: Reward | None = None
    """The evaluation rewards; None takes `reward`."""
    agent: Agent | None = None
    """A program that plays the environment with the policy; None lets the policy itself play."""
    agent_server: AgentServerSettings = LOCAL_SERVER
    """Settings of the server that the agent calls."""
    second_opinion: Reward | None = None
    """A reward for `ratchet.experience.checks.reward_hacking`. It judges attempts again, and
    nothing trains on it."""
    canaries: Environment | None = None
    """An environment for the same check, whose tasks must not earn a reward."""
    evaluation: EnvSetup | None = None
    """The setup for evaluation; None evaluates on this environment's held-out tasks."""
    judges: Judges = field(default_factory=dict)
    """The running models of the recipe's `judges`, which the rewards use."""

    def __post_init__(self) -> None:
        # Users may pass objects of plain classes and functions: complete them.
        _complete_environment(self.environment)
        if self.canaries is not None:
            _complete_environment(self.canaries)
        for name in ("reward", "eval_reward", "second_opinion"):
            reward = vars(self)[name]
            if reward is not None:
                object.__setattr__(self, name, as_reward(reward))

    @property
    def has_rewards(self) -> bool:
        """True if answers can get rewards, from a reward function or from the environment."""
        return (
            self.reward is not None
            or self.eval_reward is not None
            or self.environment.returns_rewards
        )

    def get_environment_factory(self) -> Callable[[], Environment]:
        """Return a function that makes a copy of the environment for each attempt.

        The copies share their data (see `Environment.tasks`).
        """
        return partial(copy.copy, self.environment)


@dataclass(frozen=True)
class WorkerRolloutSpec:
    """The part of a stage's recipe that rollout workers need to play its groups."""

    environment: Mapping[str, Any]
    """The values of the environment's section."""
    rewards: Sequence[Mapping[str, Any]]
    """The values of the rewards' sections."""
    rollouts: RolloutsConfig
    """The settings of rollouts, such as limits and retries."""
    template: str | None = None
    """See `Policy.create`."""
    tool_format: str = "auto"
    """See `Policy.create`."""
    date: str | None = None
    """The date that chat templates print (the recipe's `tokenizer.date`)."""


@dataclass(frozen=True)
class StageSpec:
    """The settings of a stage."""

    name: str
    steps: int
    batch_size: int
    """Groups (prompts or rows) per step."""
    sampling: Sampling = Sampling()
    optimizer: OptimizerConfig = OptimizerConfig()
    learner: LearnerSection = LocalConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    rollouts: RolloutsConfig = RolloutsConfig()
    parity: ParityConfig = ParityConfig()
    sentinels: SentinelsConfig = SentinelsConfig()
    examples: int | None = None
    """Number of distinct training tasks; None for no limit."""
    curriculum: CurriculumConfig | None = None
    """The order of tasks; None draws them in random order."""
    seed: int = 0
    start_step: int | None = None
    """The number of the stage's first step; None starts at the version of the generator's weights,
    which is the number of steps trained so far."""
    algorithm: AlgorithmSection | None = None
    """The section of the algorithm, for learners in other processes."""
    weight_sync: Section | None = None
    """The section of the weight sync; None chooses one that fits learner and generator."""
    directory: Path = Path("runs")
    """The directory in which weight syncs may leave files."""
    takes_turns: bool = False
    """True if learner and generator use the same accelerator in turns."""
    adapter: Adapter | None = None
    """The adapter that is trained in place of the weights; None trains the weights."""
    worker_rollouts: WorkerRolloutSpec | None = None
    """The spec with which rollout workers play the groups; None plays them in this process."""

    def __post_init__(self) -> None:
        for name, least in (("steps", 0), ("batch_size", 1)):
            value = vars(self)[name]
            if not isinstance(value, int) or value < least:
                raise ConfigError(f"{name}={value!r} is not a whole number from {least} on")
