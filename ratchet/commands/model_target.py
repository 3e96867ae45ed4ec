"""Open the target of `ratchet eval`, `chat` and `serve`.

A target is a run directory, a checkpoint in it, or a Hugging Face model directory (or hub id).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ratchet.config.from_words import section_from_words
from ratchet.config.loader import load_config
from ratchet.config.schema import ModelConfig, RunConfig, StageConfig
from ratchet.config.sections import GeneratorSection
from ratchet.data.chat.builtin_tokenizers import apply_chat_template_kwargs
from ratchet.data.chat.tokenizer_loading import load_tokenizer
from ratchet.data.processor import load_processor
from ratchet.data.tokenizer_config import TokenizerConfig
from ratchet.errors import ConfigError, RunDirectoryError, RunNotFound
from ratchet.executors.freeze import (
    freeze,
    has_compiled_kernels,
    resolve_device,
    use_kernels,
)
from ratchet.models.load import load_policy
from ratchet.runs.checkpoints import CheckpointStore
from ratchet.runs.run_dir import MODEL, RunDirectory
from ratchet.training.from_config import build_policy, get_chat_template
from ratchet.training.saved_weights import SavedWeights, export_checkpoint, split_step
from ratchet.training.stage import Policy
from ratchet.utils.temp_dirs import TemporaryFolder


@dataclass(frozen=True)
class Target:
    """A loaded policy, and where it comes from."""

    model_dir: Path
    """Directory of the weights."""
    policy: Policy
    config: RunConfig | None
    """The recipe that was passed, else the run's (for a checkpoint, without the stages after the
    checkpoint's stage); None for a model directory without a recipe."""
    export_dir: TemporaryFolder | None = None
    """The temporary directory of a checkpoint's weights, which is removed with this object; None if
    the target is not a checkpoint."""


def open_target(
    path: Path,
    recipe: str | Path | None = None,
    generator: str | None = None,
    *,
    step: int | None = None,
) -> Target:
    """Open a target.

    Args:
        path: The run, checkpoint or model directory, or hub id.
        recipe: Recipe to use instead of the run's.
        generator: Kind of the generator, which runs in this process. None: the kind that the run
            had, or `engine` for a model directory.
        step: Step of the run's checkpoint to open. None: the finished model, unless `path` is a
            checkpoint.

    Raises:
        RunDirectoryError: The run has no finished model yet, or `step` is set and `path` is not a
            run.
        CheckpointError: The checkpoint is missing or damaged.
    """
    if step is None:
        run, step = split_step(str(path))
        path = Path(run)
    run_recipe = path / "config.yaml"
    if step is not None:
        return _open_checkpoint(path, step, recipe, generator)
    if not run_recipe.is_file():
        config = None if recipe is None else freeze(load_config(recipe))
        template = None if config is None else get_chat_template(config)
        device = resolve_device("auto")
        compiled = device == "cpu" and has_compiled_kernels()
        use_kernels(compiled, rounds_products=device != "cpu", device=device)
        model = load_policy(str(path), device=device)
        tokenizer = load_tokenizer(str(path))
        if config is not None and isinstance(config.tokenizer, TokenizerConfig):
            tokenizer = apply_chat_template_kwargs(tokenizer, config.tokenizer)
        section = None if generator is None else section_from_words("generator", generator)
        processor = load_processor(path) if model.reads_media and path.is_dir() else None
        return Target(
            path,
            Policy.create(
                model, tokenizer, template=template, processor=processor, generator=section
            ),
            config,
        )
    if not (path / MODEL).is_dir():
        steps = CheckpointStore(RunDirectory(path).checkpoints).steps()
        hint = f", or name a step of a checkpoint (--step {steps[-1]})" if steps else ""
        raise RunDirectoryError(
            f"{path} has no finished model yet: continue it with `ratchet train --resume {path}`"
            f"{hint}"
        )
    config = load_config(run_recipe)
    policy = _load_run_policy(config, path / MODEL, generator)
    return Target(path / MODEL, policy, config if recipe is None else freeze(load_config(recipe)))


def _load_run_policy(config: RunConfig, model_dir: Path, generator: str | None) -> Policy:
    """Load a run's policy into this process, even if the run trained in several processes.

    Args:
        model_dir: Directory of the weights.
        generator: Kind of the generator; None: the run's.
    """
    stages = tuple(
        stage.model_copy(update={"generator": _select_generator(stage, generator)})
        for stage in config.stages
    )
    settings = {
        "device": "auto",
        "kernels": "auto",
        "precision": "auto",
        "model": ModelConfig(path=str(model_dir)),
        "stages": stages,
    }
    return build_policy(freeze(config.model_copy(update=settings)))


def _open_checkpoint(
    path: Path, step: int, recipe: str | Path | None, generator: str | None
) -> Target:
    """Open the checkpoint of a run's step, exported to a temporary model directory."""
    if not RunDirectory(path).is_used:
        raise RunNotFound(
            f"{path} holds no run (no config.yaml), and --step {step} is only for runs: remove "
            "--step"
        )
    export_dir = TemporaryFolder("step")
    config = export_checkpoint(SavedWeights(path, step), export_dir.path)
    policy = _load_run_policy(config, export_dir.path, generator)
    return Target(
        export_dir.path,
        policy,
        config if recipe is None else freeze(load_config(recipe)),
        export_dir,
    )


def _select_generator(stage: StageConfig, kind: str | None) -> GeneratorSection:
    """Return the section of a generator in this process.

    kind: the generator's kind; None: that of the stage's generator, or of its workers.
    """
    if kind is None:
        return stage.generator.sampler
    if stage.generator.kind_name == kind:
        return stage.generator
    return section_from_words("generator", kind)


def require_config(target: Target) -> RunConfig:
    """Return the target's recipe. Raises ConfigError if it has none."""
    if target.config is None:
        raise ConfigError(
            "a model directory has no recipe that names tasks: add --recipe RECIPE, or --on KIND"
        )
    return target.config
