"""From a configuration to the parts that `ratchet.build` puts together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from ratchet.build import Arena, Plan, Policy, make_run
from ratchet.config.base import Section
from ratchet.config.kinds import construct
from ratchet.config.schema import RunConfig, StageConfig
from ratchet.data.config import AutoTokenizerConfig
from ratchet.data.tokenizer import Tokenizer, load_tokenizer
from ratchet.errors import ConfigError
from ratchet.executors.cluster import Need
from ratchet.interfaces import Executor, Reward, Workers
from ratchet.learners.config import DTensorConfig
from ratchet.learners.topology import parts, topology_of
from ratchet.models.load import init_policy, load_policy
from ratchet.models.origin import Origin
from ratchet.models.policy import DecoderPolicy, PolicyModel
from ratchet.models.presets import preset
from ratchet.rewards.compose import composed
from ratchet.roles import check_roles, check_routers
from ratchet.run import Run
from ratchet.types import Sampling

LEARNER = "learner"  # the name of the group that trains


def build_executor(config: RunConfig) -> Executor:
    """Where the processes of the run live. Starts nothing: that is for its first group."""
    assert config.threads != "auto", "the configuration is frozen first"
    return construct(config.cluster, threads=config.threads, device=config.device)


def start_ranks(config: RunConfig, executor: Executor, model: PolicyModel) -> Workers | None:
    """The processes in which all stages train, with the model that `model` is, divided among them; None where this one trains.

    Raises ConfigError where the cluster has no room for them, ModelError where the model can't be divided so.
    """
    section = config.stages[0].learner
    if not isinstance(section, DTensorConfig):
        return None
    on_cpu = config.device == "cpu"
    world = topology_of(section).world
    origin = _origin(config, model)
    if isinstance(model, DecoderPolicy):
        parts(section).check(model.decoder.config)
    else:
        _check_whole(section, model)
    executor.plan([Need(LEARNER, world, gpus=0 if on_cpu else 1)])
    ranks = executor.group(LEARNER)
    ranks.build_now("ratchet.learners.rank:LearnerRank", {"learner": section.model_dump(mode="json"), "origin": origin})
    return ranks


def _check_whole(section: DTensorConfig, model: PolicyModel) -> None:
    """A model that transformers runs has no parts: ranks divide rows and weights and, by a plan of its own, its matrices."""
    from ratchet.models.auto import TransformersPolicy  # takes seconds, where no such model has been loaded

    for key in ("context_parallel", "pipeline_parallel", "expert_parallel"):
        if (value := getattr(section, key)) > 1:
            raise ConfigError(
                f"learner.{key}={value} divides what Ratchet's own decoder computes, and transformers runs this model: "
                "set it to 1, and learner.dp_shard to the number of ranks"
            )
    if section.sequence_parallel:
        raise ConfigError("learner.sequence_parallel is of Ratchet's own decoder, and transformers runs this model: remove it")
    assert isinstance(model, TransformersPolicy), "any other model is a decoder"
    if section.tensor_parallel > 1:
        model.plan(section.tensor_parallel)


def _origin(config: RunConfig, model: PolicyModel) -> Origin:
    source = config.model
    if source.path is None:
        assert isinstance(model, DecoderPolicy), "presets are decoders"
        return Origin(shape=model.decoder.config, seed=config.seed)
    return Origin(
        path=source.path, backend=source.backend, trust_remote_code=source.trust_remote_code, revision=source.revision
    )


def check_stages(config: RunConfig, policy: Policy, *, first: int = 0) -> None:
    """Refuses now what a stage, be it the last, would refuse when it starts: teachers that don't fit, no routers."""
    for index in range(first, len(config.stages)):
        stage = config.stages[index]
        longest = stage.sampling.max_new_tokens + 1 if stage.source == "rollouts" else 0  # behind a prompt, however short
        algorithm = construct(stage.algorithm)
        check_roles(policy.model, policy.tokenizer, algorithm, longest=longest)
        check_routers(policy.model, policy.generator, algorithm, stage.learner)


def build_policy(config: RunConfig) -> Policy:
    """The model as the recipe describes it: read from a directory or the hub, or a preset with random weights. In float32:
    bfloat16 weights would swallow small updates."""
    source, device = config.model, torch.device(config.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"device={config.device}, but torch finds no CUDA accelerator here: set device=cpu")
    tokenizer = construct(config.tokenizer, source.path)
    if source.path is not None:
        _check_same_tokens(config, tokenizer)
        model = load_policy(
            source.path,
            backend=source.backend,
            device=device,
            trust_remote_code=source.trust_remote_code,
            revision=source.revision,
        )
    else:
        assert source.preset is not None, "the configuration lets neither path nor preset through without the other"
        shape = preset(source.preset, vocab_size=tokenizer.vocab_size, **source.overrides)
        model = init_policy(shape, seed=config.seed, device=device)
    format_of_tools = getattr(config.tokenizer, "tool_format", "auto")
    generator = config.stages[0].generator
    return Policy.of(model, tokenizer, template=template_of(config), tool_format=format_of_tools, generator=generator)


def _check_same_tokens(config: RunConfig, tokenizer: Tokenizer) -> None:
    """A tokenizer of the recipe's own must be the one that the model was trained with, where its directory holds that."""
    chosen = not isinstance(config.tokenizer, AutoTokenizerConfig) or config.tokenizer.path is not None
    directory = Path(str(config.model.path))
    if not chosen or not (directory / "tokenizer.json").is_file():
        return
    if load_tokenizer(directory).fingerprint != tokenizer.fingerprint:
        raise ConfigError(
            f"tokenizer differs from the one in {directory}, whose tokens the model knows: remove it from the recipe"
        )


def template_of(config: RunConfig) -> str | None:
    """Of the built-in tokenizers; one of somebody else's brings its own."""
    return getattr(config.tokenizer, "template", None)


def build_arena(stage: StageConfig) -> Arena:
    return Arena(
        construct(stage.environment),
        reward=build_reward(stage.rewards),
        yardstick=build_reward(stage.yardstick),
        agent=None if stage.agent is None else construct(stage.agent),
    )


def build_reward(sections: Sequence[Section]) -> Reward | None:
    """The weighted sum of several rewards; None for none: the environment's own steps give it."""
    return composed(sections) if sections else None


def build_run(config: RunConfig, index: int, policy: Policy, *, directory: Path = Path("runs"), **around: Any) -> Run:
    """The run of stage `index`, whose step numbers follow those of the stages before it. directory: of the run."""
    stage = config.stages[index]
    plan = replace(plan_of(config, index), directory=directory)
    return make_run(policy, build_arena(stage), construct(stage.algorithm), plan, save_every=stage.checkpoint.every, **around)


def plan_of(config: RunConfig, index: int) -> Plan:
    stage = config.stages[index]
    return Plan(
        name=stage.name,
        steps=stage.steps,
        batch_size=stage.batch_size,
        sampling=Sampling(**dict(stage.sampling)),
        optimizer=stage.optimizer,
        learner=stage.learner,
        evaluation=stage.evaluation,
        rollouts=stage.rollouts,
        examples=stage.examples,
        seed=config.seed,
        first_step=sum(earlier.steps for earlier in config.stages[:index]),
        parity=stage.parity,
        algorithm=stage.algorithm,
        link=stage.link,
        colocated=getattr(config.cluster, "colocated", False),
    )
