"""Build the policy of a run from a configuration, and start the processes that all stages share."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from ratchet.algorithms.base import Algorithm
from ratchet.config.model_shape.presets import get_preset
from ratchet.config.resolve import build, import_object
from ratchet.config.schema import ModelConfig, RunConfig, StageConfig
from ratchet.data.chat.chat_templates import set_printed_date
from ratchet.data.chat.renderer import Renderer
from ratchet.data.chat.template_defaults import remove_defaults
from ratchet.data.chat.tokenizer import Tokenizer
from ratchet.data.chat.tokenizer_loading import load_tokenizer
from ratchet.data.processor import Processor, load_processor
from ratchet.data.tokenizer_config import AutoTokenizerConfig, TokenizerConfig
from ratchet.errors import ConfigError
from ratchet.executors.config import LocalClusterConfig
from ratchet.executors.freeze import use_kernels
from ratchet.executors.placement import ResourceRequest
from ratchet.generators.workers.config import GeneratorWorkersConfig
from ratchet.generators.workers.pool import GeneratorPool
from ratchet.learners.config import DistributedConfig
from ratchet.learners.distributed.topology import build_topology
from ratchet.models.accelerator import require_accelerator, use_accelerator
from ratchet.models.load import find_model, init_policy, load_policy
from ratchet.models.lora.files import require_peft
from ratchet.models.model_source import ModelSource
from ratchet.models.policy import DecoderPolicy, PolicyModel, check_freeze
from ratchet.training.roles import check_media_readers, check_roles, check_routers
from ratchet.training.stage import Policy
from ratchet.training.workers.generators import get_generator_resources, start_generators
from ratchet.training.workers.judges import get_judge_resources
from ratchet.utils.object_store import is_address
from ratchet.worker_protocols import Executor

# Roles of resource requests: the worker group that trains, or this process if it trains itself.
LEARNER, DRIVER = "learner", "driver"


def build_executor(config: RunConfig) -> Executor:
    """Return the executor that will start the run's processes. It starts none yet."""
    assert config.threads != "auto", "the configuration must be frozen first"
    return build(config.cluster, threads=config.threads, device=config.device)


def start_processes(config: RunConfig, executor: Executor, policy: Policy) -> Policy:
    """Start the processes that all stages share, and return the policy with them.

    The learner's ranks divide the model among them; generator workers generate. If the recipe has
    neither, the policy is returned unchanged. The resources of judges are planned too, and
    `ratchet.training.workers.judges.start_judges` starts these.

    Raises:
        ConfigError: The cluster has no room for all processes.
        ModelError: The learner's ranks can't divide the model.
    """
    learner, generator = config.stages[0].learner, config.stages[0].generator
    # Only CUDA devices are given to processes.
    on_cpu = not config.device.startswith("cuda")
    trainer_resources = _get_trainer_resources(config, policy.model)
    # A driver that trains on an accelerator of this machine shares it only with a colocated
    # generator.
    driver_trains = not trainer_resources and not on_cpu and config.cluster.kind_name == "local"
    learner_resources = trainer_resources or (
        [_get_driver_resources(config)] if driver_trains else []
    )
    is_shared = config.cluster.shares_accelerators and bool(learner_resources) and not on_cpu
    colocated_role = learner_resources[0].role if is_shared else None
    generator_resources = get_generator_resources(
        generator, on_cpu=on_cpu, colocated_role=colocated_role
    )
    judge_resources = get_judge_resources(config)
    if not trainer_resources and not generator_resources and not judge_resources:
        return policy
    if generator_resources or judge_resources:
        _check_torchrun(config)
    executor.plan([*learner_resources, *generator_resources, *judge_resources])
    model_source = _get_model_source(config, policy.model)
    if trainer_resources:
        ranks = executor.group(LEARNER)
        ranks.build_now(
            "ratchet.learners.distributed.worker:LearnerRank",
            {"learner": learner.model_dump(mode="json"), "origin": model_source},
        )
        policy = replace(policy, ranks=ranks)
    if isinstance(generator, GeneratorWorkersConfig):
        assert isinstance(policy.generator, GeneratorPool), "this section builds a GeneratorPool"
        start_generators(policy.generator, generator, executor, model_source, policy.tokenizer)
    return policy


def _check_torchrun(config: RunConfig) -> None:
    """Raise ConfigError for generator workers and judges that torchrun can't provide.

    Under torchrun all processes exist from the start, one for each accelerator.
    """
    stage = config.stages[0]
    for judge in config.judges:
        if config.cluster.kind_name == "torchrun" and judge.n_processes:
            raise ConfigError(
                f"judges: {judge.name} needs processes of its own, and torchrun starts none for "
                "it. Set cluster.kind=local or ray, or a generator in the run's process"
            )
    if config.cluster.kind_name != "torchrun" or not isinstance(
        stage.generator, GeneratorWorkersConfig
    ):
        return
    if not isinstance(stage.learner, DistributedConfig):
        raise ConfigError(
            "generator.kind=workers under torchrun needs a distributed learner, because rank 0 "
            "also trains. Set learner.kind=dtensor or megatron"
        )
    if stage.generator.worker.kind_name == "vllm":
        raise ConfigError(
            "vLLM starts its own processes and can't use those of torchrun. Set cluster.kind=local "
            "or ray"
        )
    if stage.generator.recovery == "restart":
        raise ConfigError(
            "generator.recovery=restart can't restart processes under torchrun. Set "
            "generator.recovery=none, or cluster.kind=local or ray"
        )
    if stage.generator.interpreter is not None:
        raise ConfigError(
            "generator.interpreter names the Python of processes that torchrun has started with "
            "another. Remove it, or set cluster.kind=local or ray"
        )


def _get_trainer_resources(config: RunConfig, model: PolicyModel) -> list[ResourceRequest]:
    """Return the resources of the processes that train; [] if this process trains.

    Raises:
        ModelError: The processes can't divide the model.
    """
    section = config.stages[0].learner
    if not isinstance(section, DistributedConfig):
        return []
    check_division = import_object(section.division_check)
    for stage in config.stages:
        check_division(section, model, stage.lora)
    return [
        ResourceRequest(
            LEARNER, build_topology(section).world_size, gpus=0 if config.device == "cpu" else 1
        )
    ]


def _get_driver_resources(config: RunConfig) -> ResourceRequest:
    """Return the resources of this process, which trains on the accelerator of `device`.

    Raises:
        ConfigError: `cluster.devices` leaves that accelerator out.
    """
    index = torch.device(config.device).index or 0
    devices = config.cluster.devices if isinstance(config.cluster, LocalClusterConfig) else None
    if devices is not None and index not in devices:
        raise ConfigError(
            f"device={config.device} is accelerator {index}, and cluster.devices={list(devices)} "
            f"leaves it out. Set device=cuda:{devices[0]}"
        )
    return ResourceRequest(DRIVER, 1, gpus=1, accelerator=index)


def _get_model_source(config: RunConfig, model: PolicyModel) -> ModelSource:
    """Return the source from which worker processes load the model."""
    source = config.model
    if source.path is None:
        assert isinstance(model, DecoderPolicy), "presets are decoders"
        return ModelSource(shape=model.decoder.config, seed=config.seed, freeze=config.model.freeze)
    return ModelSource(
        path=source.path,
        backend=source.backend,
        trust_remote_code=source.trust_remote_code,
        revision=source.revision,
        train_encoders=source.train_encoders,
        overrides=source.overrides,
        freeze=source.freeze,
    )


def check_stages(config: RunConfig, policy: Policy, *, first_stage: int = 0) -> None:
    """Check all stages from `first_stage` on, so that none of them fails only once it starts.

    Raises:
        ConfigError: A teacher does not fit the policy, the model lacks the routers that a stage
            needs, or a stage can't run for another reason.
    """
    for index in range(first_stage, len(config.stages)):
        stage = config.stages[index]
        algorithm = build(stage.algorithm)
        check_stage_roles(stage, algorithm, policy.model.vocab_size, policy.tokenizer)
        needs_media = stage.environment.needs_media
        check_media_readers(policy.renderer.processor, algorithm, needs_media=needs_media)
        check_routers(policy.model, policy.generator, algorithm, stage.learner)
        if stage.is_played_by_workers and policy.renderer.processor is not None:
            raise ConfigError(
                "generator.worker_runs=groups needs the model's media processor, which workers "
                "don't have. Set generator.worker_runs=completions"
            )
        if stage.lora is not None:
            require_peft()
            policy.model.resolve_adapter_layers(stage.lora)


def check_stage_roles(
    stage: StageConfig, algorithm: Algorithm, vocab_size: int, tokenizer: Tokenizer
) -> None:
    """Check the models of a stage's roles; see `check_roles`."""
    # A prompt has at least one token.
    longest = stage.sampling.max_new_tokens + 1 if stage.source == "rollouts" else 0
    check_roles(vocab_size, tokenizer, algorithm, longest=longest)


def build_policy(config: RunConfig) -> Policy:
    """Return the model that the recipe describes, from a directory, the Hub or a preset.

    A preset has random weights. Weights are float32, because bfloat16 would round small updates
    away. The call also sets three things for this process: the recipe's kernels, the precision of
    products, and the date that chat templates print.
    """
    tokenizer_config = get_tokenizer_config(config)
    set_printed_date(tokenizer_config.date)
    # Only frozen recipes from before the kernels existed still say "auto".
    use_kernels(
        config.kernels == "compiled", rounds_products=config.rounds_products, device=config.device
    )
    source, device = config.model, torch.device(config.device)
    model_device = "cpu" if _computes_elsewhere(config) else device
    require_accelerator(device)
    if device.type == "cuda":
        use_accelerator(device)
    tokenizer = build(config.tokenizer, source.path)
    if source.path is not None:
        _check_tokenizer(config, tokenizer)
        model = load_policy(
            source.path,
            backend=source.backend,
            device=model_device,
            trust_remote_code=source.trust_remote_code,
            revision=source.revision,
            train_encoders=source.train_encoders,
            overrides=source.overrides,
        )
        rounds_on_cpu = config.rounds_products and device.type == "cpu"
        if rounds_on_cpu and not isinstance(model, DecoderPolicy):
            raise ConfigError(
                "precision=bfloat16 on a CPU is for the built-in decoder only, and transformers "
                "runs this model. Set precision=auto"
            )
    else:
        assert source.preset is not None, (
            "the configuration refuses a model without path and preset"
        )
        shape = get_preset(source.preset, vocab_size=tokenizer.vocab_size, **source.overrides)
        model = init_policy(shape, seed=config.seed, device=model_device)
    model.freeze(source.freeze)
    check_freeze(model, source.freeze)
    return Policy.create(
        model,
        tokenizer,
        template=get_chat_template(config),
        tool_format=tokenizer_config.tool_format,
        processor=load_policy_processor(config) if model.reads_media else None,
        generator=config.stages[0].generator,
    )


def _computes_elsewhere(config: RunConfig) -> bool:
    """True if only other processes compute with the policy's model.

    This process then keeps the model in main memory: rank 0 needs the accelerator.
    """
    learner, generator = config.stages[0].learner, config.stages[0].generator
    is_remote = isinstance(generator, GeneratorWorkersConfig) or generator.copies_weights
    return learner.is_distributed and is_remote


def load_policy_processor(config: RunConfig) -> Processor | None:
    """Return the media processor in the model's directory, or None if it has none."""
    source = config.model
    directory = find_model(
        str(source.path), revision=source.revision, with_code=source.trust_remote_code
    )
    return load_processor(directory, media=config.media, trust_remote_code=source.trust_remote_code)


def _check_tokenizer(config: RunConfig, tokenizer: Tokenizer) -> None:
    """Raise ConfigError if the recipe's tokenizer is not the one that the model was trained with.

    Only a model directory with a tokenizer is checked.
    """
    is_set_by_recipe = (
        not isinstance(config.tokenizer, AutoTokenizerConfig) or config.tokenizer.path is not None
    )
    path = str(config.model.path)
    directory = find_model(path) if is_set_by_recipe and is_address(path) else Path(path)
    if not is_set_by_recipe or not (directory / "tokenizer.json").is_file():
        return
    if _identify(load_tokenizer(directory)) != _identify(tokenizer):
        raise ConfigError(
            f"tokenizer differs from the one in {directory}, with which the model was trained. "
            "Remove it from the recipe"
        )


def _identify(tokenizer: Tokenizer) -> str:
    """Return the fingerprint of a tokenizer without the defaults of its template's variables."""
    template = tokenizer.chat_template
    plain = None if template is None else remove_defaults(template)
    return tokenizer.with_chat_template(plain).fingerprint


def build_renderer(
    config: RunConfig, tokenizer: Tokenizer, processor: Processor | None
) -> Renderer:
    """Return the renderer of the recipe's chat template, as `build_policy` uses it."""
    tokenizer_config = get_tokenizer_config(config)
    return Renderer(
        tokenizer,
        get_chat_template(config),
        processor=processor,
        tool_format=tokenizer_config.tool_format,
    )


def get_chat_template(config: RunConfig) -> str | None:
    """Return the chat template that the recipe chooses; None for the tokenizer's own.

    With `chat_template_kwargs` it is None too, because the tokenizer was then built with the chosen
    template and those values.
    """
    tokenizer_config = get_tokenizer_config(config)
    return None if tokenizer_config.chat_template_kwargs else tokenizer_config.template


def get_tokenizer_config(config: RunConfig) -> TokenizerConfig:
    """Return the recipe's tokenizer section, or the defaults if it is not a built-in one.

    A user's own tokenizer class brings its own template.
    """
    section = config.tokenizer
    return section if isinstance(section, TokenizerConfig) else TokenizerConfig()


def get_adapter_base_dir(config: RunConfig, index: int, directory: Path) -> Path | None:
    """Return the directory in which the run keeps the base model of a stage's adapter.

    Return None if the base is the recipe's model, which neither training nor `model.overrides` has
    changed.
    """
    source = config.model
    is_unchanged = index == 0 and source.path is not None and not source.overrides
    return None if is_unchanged else directory / "base" / config.stages[index].name


def resolve_resume_config(config: RunConfig, index: int, directory: Path) -> RunConfig:
    """Return the recipe for resuming in the middle of stage `index`, with the model to load.

    Checkpoints of a stage with an adapter hold the adapter alone, so the model is the base that the
    stage began with.

    Args:
        config: The recipe.
        index: The stage.
        directory: The run directory.
    """
    if index == len(config.stages) or config.stages[index].lora is None:
        return config
    base = get_adapter_base_dir(config, index, directory)
    if base is None:
        return config
    return config.model_copy(
        update={"model": ModelConfig(path=str(base), backend=config.model.backend)}
    )
