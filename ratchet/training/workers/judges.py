"""Start the judges of a recipe: the models that judge attempts, each with a place of its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from ratchet.config.resolve import build
from ratchet.config.schema import RunConfig
from ratchet.config.sections import JudgeSection
from ratchet.data.chat.renderer import Renderer
from ratchet.data.chat.tokenizer_loading import load_tokenizer
from ratchet.executors import env_vars
from ratchet.executors.freeze import prepare_process, resolve_device
from ratchet.executors.placement import ResourceRequest
from ratchet.generators.workers.config import GeneratorWorkersConfig
from ratchet.generators.workers.pool import GeneratorPool
from ratchet.models.model_source import ModelSource
from ratchet.models.policy import UNLIMITED
from ratchet.models.scalar_head import require_head
from ratchet.models.weights.hf_weights import read_text_config
from ratchet.protocols import Generator
from ratchet.rewards.judge_models.base import Judges
from ratchet.rewards.judge_models.config import LanguageModelJudgeConfig, RewardModelJudgeConfig
from ratchet.rewards.judge_models.language_model import LanguageModelJudge
from ratchet.rewards.judge_models.scorer import ScalarModel, Scorer, WorkerScorer
from ratchet.training.workers.generators import WorkerPlacement, start_generators
from ratchet.utils.user_parts import add_missing_members
from ratchet.worker_protocols import Executor


@dataclass(frozen=True)
class JudgePlace:
    """The place of a judge."""

    seed: int
    """The run's seed."""
    device: str
    """The run's device."""
    executor: Executor | None = None
    """Starts the judge's processes, whose resources it has planned; None starts every judge in this
    process."""


def get_judge_resources(config: RunConfig) -> list[ResourceRequest]:
    """Return the resources of all judges that have processes of their own."""
    return [
        ResourceRequest(
            get_role(judge.name),
            judge.n_processes,
            gpus=0 if config.device == "cpu" else judge.accelerators,
        )
        for judge in config.judges
        if judge.n_processes
    ]


def get_role(name: str) -> str:
    """Return the name of a judge's processes in the cluster."""
    return f"judge-{name}"


def start_judges(config: RunConfig, executor: Executor | None = None) -> Judges:
    """Start the recipe's judges, and return them by name.

    Args:
        config: The recipe.
        executor: See `JudgePlace`. An evaluation passes None.

    Raises:
        ModelError: A judge has no usable model.
    """
    place = JudgePlace(config.seed, resolve_device(config.device), executor)
    return {section.name: build(section, place) for section in config.judges}


def make_judge_check(judges: Judges) -> Callable[[int, Mapping[str, float | None]], None]:
    """Return an observer of steps that raises the error of a judge that was lost.

    So the run ends before it saves the step, instead of failing attempt after attempt.
    """

    def check(step: int, metrics: Mapping[str, float | None]) -> None:
        for judge in judges.values():
            if judge.final_error is not None:
                raise judge.final_error

    return check


async def close_judges(judges: Judges) -> None:
    """End the processes of all judges."""
    for judge in judges.values():
        await judge.close()


def start_language_model(
    section: LanguageModelJudgeConfig, place: JudgePlace
) -> LanguageModelJudge:
    """Return the judge that a language model is, with its generator started."""
    source = ModelSource(
        path=section.path,
        backend=section.backend,
        trust_remote_code=section.trust_remote_code,
        revision=section.revision,
    )
    directory = source.directory()
    tokenizer = load_tokenizer(directory)
    renderer = Renderer(tokenizer, section.template, variables=section.chat_template_kwargs)
    generator_section = section.generator
    if place.executor is None:
        generator_section = generator_section.sampler
    generator: Generator
    if isinstance(generator_section, GeneratorWorkersConfig):
        assert place.executor is not None, "without an executor the sampler runs here"
        pool: GeneratorPool = build(generator_section, None, tokenizer)
        role = get_role(section.name)
        start_generators(pool, generator_section, place.executor, source, tokenizer, role=role)
        generator = pool
    else:
        device = "cpu" if generator_section.copies_weights else section.device or place.device
        model = source.policy(device=device).requires_grad_(False)
        with env_vars.set_env_defaults(generator_section.environment):
            built_generator = build(generator_section, model, tokenizer)
        generator = add_missing_members(built_generator, Generator)
    return LanguageModelJudge(
        section.name,
        generator,
        renderer,
        max_context=read_context(directory),
        seed=place.seed,
    )


def start_reward_model(section: RewardModelJudgeConfig, place: JudgePlace) -> Scorer | WorkerScorer:
    """Return the judge that a reward model is, with its processes started."""
    source = ModelSource(
        path=section.path,
        trust_remote_code=section.trust_remote_code,
        revision=section.revision,
    )
    directory = source.directory()
    renderer = Renderer(load_tokenizer(directory), section.template)
    trust = section.trust_remote_code
    if place.executor is None:
        model = ScalarModel(directory, device=place.device, trust_remote_code=trust)
        return Scorer(model, renderer)
    role = get_role(section.name)
    workers = [place.executor.group(role, rank) for rank in range(section.workers)]
    keys = {"directory": str(directory), "trust_remote_code": trust}
    for worker in workers:
        worker.build_now("ratchet.training.workers.judges:make_scalar_model", keys)
    return WorkerScorer(workers, renderer, read_context(directory))


def make_scalar_model(
    placement: WorkerPlacement, *, directory: str, trust_remote_code: bool
) -> ScalarModel:
    """Return the component of a reward model's worker process."""
    prepare_process(placement.threads)
    return ScalarModel(
        Path(directory), device=placement.device, trust_remote_code=trust_remote_code
    )


def check_judge_files(section: JudgeSection, directory: Path) -> None:
    """Check what can be checked of a judge before its weights are loaded.

    Raises:
        ConfigError: The generator refuses its arguments.
        ModelError: A reward model has no scalar head.
    """
    if isinstance(section, LanguageModelJudgeConfig):
        sampler = section.generator.sampler
        with env_vars.set_env_defaults(sampler.environment):
            sampler.check_arguments()
    if isinstance(section, RewardModelJudgeConfig):
        require_head(directory)


def read_context(directory: Path) -> int:
    """Return the maximum number of tokens that a model reads, from its files alone."""
    return int(read_text_config(directory).get("max_position_embeddings") or UNLIMITED)
