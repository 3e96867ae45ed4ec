"""From a configuration to the parts that `ratchet.training.build` puts together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from ratchet.config.base import Section
from ratchet.config.resolve import construct, imported
from ratchet.config.schema import ModelConfig, RunConfig, StageConfig, own_rewards
from ratchet.data.chat.chat_templates import print_date
from ratchet.data.chat.tokenizer import Tokenizer, load_tokenizer
from ratchet.data.config import AutoTokenizerConfig
from ratchet.data.processor import Processor, load_processor
from ratchet.errors import ConfigError
from ratchet.executors.freeze import use_kernels
from ratchet.executors.placement import Need
from ratchet.generators.workers.config import WorkersConfig
from ratchet.generators.workers.pool import Router
from ratchet.learners.config import DTensorConfig, SpreadConfig
from ratchet.learners.distributed.topology import topology_of
from ratchet.models.load import find_model, init_policy, load_policy
from ratchet.models.lora.decoder import Adapter
from ratchet.models.lora.files import require_peft
from ratchet.models.model_source import Origin
from ratchet.models.policy import DecoderPolicy, PolicyModel
from ratchet.models.presets import preset
from ratchet.protocols import Executor, Reward
from ratchet.rewards.weighted_sum import composed
from ratchet.training.build import make_run
from ratchet.training.generator_workers import generator_needs, start_generators
from ratchet.training.roles import check_readers, check_roles, check_routers
from ratchet.training.run import Run
from ratchet.training.stage import Arena, Plan, Played, Policy
from ratchet.types import Sampling
from ratchet.utils.object_store import is_address

# names of the group that trains, and of this process where it does
LEARNER, DRIVER = "learner", "driver"


def build_executor(config: RunConfig) -> Executor:
    """Where the processes of the run live. Starts nothing: that is for its first group."""
    assert config.threads != "auto", "the configuration is frozen first"
    return construct(config.cluster, threads=config.threads, device=config.device)


def start_processes(config: RunConfig, executor: Executor, policy: Policy) -> Policy:
    """The policy with the processes that all stages share: those that train, the model divided
    among them, and those that generate; where the recipe asks for neither, the policy as it is.

    Raises ConfigError where the cluster has no room for all of them, ModelError where the model
    can't be divided so.
    """
    learner, generator = config.stages[0].learner, config.stages[0].generator
    on_cpu = config.device == "cpu"
    trainers = _trainer_needs(config, policy.model)
    # A driver that trains on an accelerator of this machine has that to itself, but for a generator
    # that takes turns with it.
    drives = not trainers and not on_cpu and _kind(config.cluster) == "local"
    learners = trainers or ([Need(DRIVER, 1, gpus=1)] if drives else [])
    beside = learners[0].role if _colocated(config) and learners and not on_cpu else None
    generators = generator_needs(generator, on_cpu=on_cpu, beside=beside)
    if not trainers and not generators:
        return policy
    if generators:
        _check_torchrun(config)
    executor.plan([*learners, *generators])
    origin = _origin(config, policy.model)
    if trainers:
        ranks = executor.group(LEARNER)
        ranks.build_now(
            "ratchet.learners.distributed.worker:LearnerRank",
            {"learner": learner.model_dump(mode="json"), "origin": origin},
        )
        policy = replace(policy, ranks=ranks)
    if isinstance(generator, WorkersConfig):
        assert isinstance(policy.generator, Router), "the section builds one"
        start_generators(policy.generator, generator, executor, origin, policy.tokenizer)
    return policy


def _colocated(config: RunConfig) -> bool:
    return getattr(config.cluster, "colocated", False)


def _check_torchrun(config: RunConfig) -> None:
    """Its processes are there once, one for each accelerator."""
    stage = config.stages[0]
    if _kind(config.cluster) != "torchrun" or not isinstance(stage.generator, WorkersConfig):
        return
    if not isinstance(stage.learner, SpreadConfig):
        raise ConfigError(
            "generator.kind=workers under torchrun needs learner.kind=dtensor or megatron: who "
            "drives there works too"
        )
    if _kind(stage.generator.of) == "vllm":
        raise ConfigError(
            "vLLM starts processes of its own, which torchrun's are not: set cluster.kind=local or "
            "ray"
        )
    if stage.generator.recovery == "restart":
        raise ConfigError(
            "torchrun starts no process a second time: set generator.recovery=none, or "
            "cluster.kind=local or ray"
        )


def _kind(section: Section) -> str:
    return str(getattr(section, "kind", ""))


def _trainer_needs(config: RunConfig, model: PolicyModel) -> list[Need]:
    """Nothing where this process trains."""
    section = config.stages[0].learner
    if not isinstance(section, SpreadConfig):
        return []
    imported(section.divides)(section, model)
    return [Need(LEARNER, topology_of(section).world, gpus=0 if config.device == "cpu" else 1)]


def _origin(config: RunConfig, model: PolicyModel) -> Origin:
    source = config.model
    if source.path is None:
        assert isinstance(model, DecoderPolicy), "presets are decoders"
        return Origin(shape=model.decoder.config, seed=config.seed)
    return Origin(
        path=source.path,
        backend=source.backend,
        trust_remote_code=source.trust_remote_code,
        revision=source.revision,
        towers=source.towers,
    )


def check_stages(config: RunConfig, policy: Policy, *, first: int = 0) -> None:
    """Refuses now what a stage, be it the last, would refuse when it starts: teachers that don't
    fit, no routers."""
    for index in range(first, len(config.stages)):
        stage = config.stages[index]
        # behind a prompt, however short
        longest = stage.sampling.max_new_tokens + 1 if stage.source == "rollouts" else 0
        algorithm = construct(stage.algorithm)
        check_roles(policy.model, policy.tokenizer, algorithm, longest=longest)
        shown = bool(getattr(stage.environment, "needs_media", False))
        check_readers(policy.renderer.processor, algorithm, shown=shown)
        check_routers(policy.model, policy.generator, algorithm, stage.learner)
        if stage.played_by_workers and policy.renderer.processor is not None:
            raise ConfigError(
                "the model reads media, whose processor workers that play don't have: set "
                "generator.plays=requests"
            )
        if stage.lora is not None:
            require_peft()
            policy.model.check_adapter(stage.lora)
            if isinstance(stage.learner, DTensorConfig) and not isinstance(
                policy.model, DecoderPolicy
            ):
                raise ConfigError(
                    "lora with learner.kind=dtensor is of Ratchet's own decoder, and transformers "
                    "runs this model: set "
                    "learner.kind=local, or remove lora"
                )


def build_policy(config: RunConfig) -> Policy:
    """The model as the recipe describes it: read from a directory or the hub, or a preset with
    random weights. In float32: bfloat16 weights would swallow small updates. From now on this
    process computes models with the kernels of the recipe, and its templates print the day of the
    recipe."""
    print_date(getattr(config.tokenizer, "date", None))
    use_kernels(config.kernels == "compiled")  # auto: never frozen, a run of before there were any
    source, device = config.model, torch.device(config.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            f"device={config.device}, but torch finds no CUDA accelerator here: set device=cpu"
        )
    tokenizer = construct(config.tokenizer, source.path)
    if source.path is not None:
        _check_same_tokens(config, tokenizer)
        model = load_policy(
            source.path,
            backend=source.backend,
            device=device,
            trust_remote_code=source.trust_remote_code,
            revision=source.revision,
            towers=source.towers,
        )
    else:
        assert source.preset is not None, (
            "the configuration lets neither path nor preset through without the other"
        )
        shape = preset(source.preset, vocab_size=tokenizer.vocab_size, **source.overrides)
        model = init_policy(shape, seed=config.seed, device=device)
    format_of_tools = getattr(config.tokenizer, "tool_format", "auto")
    generator = config.stages[0].generator
    return Policy.of(
        model,
        tokenizer,
        template=template_of(config),
        tool_format=format_of_tools,
        processor=processor_of(config) if model.reads_media else None,
        generator=generator,
    )


def processor_of(config: RunConfig) -> Processor | None:
    """Of the model's directory; None where it has none."""
    source = config.model
    directory = find_model(
        str(source.path), revision=source.revision, with_code=source.trust_remote_code
    )
    return load_processor(directory, media=config.media, trust_remote_code=source.trust_remote_code)


def _check_same_tokens(config: RunConfig, tokenizer: Tokenizer) -> None:
    """A tokenizer of the recipe's own must be the one that the model was trained with, where its
    directory holds that."""
    chosen = (
        not isinstance(config.tokenizer, AutoTokenizerConfig) or config.tokenizer.path is not None
    )
    path = str(config.model.path)
    directory = find_model(path) if chosen and is_address(path) else Path(path)
    if not chosen or not (directory / "tokenizer.json").is_file():
        return
    if load_tokenizer(directory).fingerprint != tokenizer.fingerprint:
        raise ConfigError(
            f"tokenizer differs from the one in {directory}, whose tokens the model knows: remove "
            "it from the recipe"
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
        second=build_reward(stage.sentinels.second_opinion),
        canaries=None if stage.sentinels.canaries is None else construct(stage.sentinels.canaries),
        evaluation=None
        if stage.evaluation.environment is None
        else arena_of(stage.evaluation.environment),
    )


def arena_of(environment: Section) -> Arena:
    """Judged by its own reward."""
    return Arena(construct(environment), reward=build_reward(own_rewards(environment)))


def build_reward(sections: Sequence[Section]) -> Reward | None:
    """The weighted sum of several rewards; None for none: the environment's own steps give it."""
    return composed(sections) if sections else None


def build_run(
    config: RunConfig, index: int, policy: Policy, *, directory: Path = Path("runs"), **around: Any
) -> Run:
    """The run of stage `index`, whose step numbers follow those of the stages before it. directory:
    of the run."""
    stage = config.stages[index]
    plan = replace(
        plan_of(config, index), directory=directory, adapter=adapter_of(config, index, directory)
    )
    return make_run(
        policy,
        build_arena(stage),
        construct(stage.algorithm),
        plan,
        save_every=stage.checkpoint.every,
        **around,
    )


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
        curriculum=stage.curriculum,
        seed=config.seed,
        first_step=sum(earlier.steps for earlier in config.stages[:index]),
        parity=stage.parity,
        sentinels=stage.sentinels,
        algorithm=stage.algorithm,
        link=stage.link,
        colocated=_colocated(config),
        played=_played(config, stage),
    )


def _played(config: RunConfig, stage: StageConfig) -> Played | None:
    if not stage.played_by_workers:
        return None
    return Played(
        stage.environment.model_dump(mode="json"),
        [reward.model_dump(mode="json") for reward in stage.rewards],
        stage.rollouts,
        template_of(config),
        getattr(config.tokenizer, "tool_format", "auto"),
        getattr(config.tokenizer, "date", None),
    )


def adapter_of(config: RunConfig, index: int, directory: Path) -> Adapter | None:
    """What a stage trains in place of the model's weights. directory: of the run."""
    stage = config.stages[index]
    if stage.lora is None:
        return None
    base = base_directory(config, index, directory)
    where = str(config.model.path) if base is None else str(base.absolute())
    return Adapter(stage.lora, seed=config.seed, base=where)


def base_directory(config: RunConfig, index: int, directory: Path) -> Path | None:
    """Where the run keeps the model to which a stage's adapter belongs; None where that is the
    recipe's own, as it is."""
    as_it_is = index == 0 and config.model.path is not None
    return None if as_it_is else directory / "base" / config.stages[index].name


def begins_with(config: RunConfig, index: int, directory: Path) -> RunConfig:
    """The recipe for who goes on in the middle of stage `index`, with the model that everything
    begins with: where the stage trains an adapter, whose checkpoints hold that alone, it is the
    base that the stage began with. directory: of the run."""
    if index == len(config.stages) or config.stages[index].lora is None:
        return config
    base = base_directory(config, index, directory)
    if base is None:
        return config
    return config.model_copy(
        update={"model": ModelConfig(path=str(base), backend=config.model.backend)}
    )
