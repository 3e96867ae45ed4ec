"""What `ratchet eval` and `ratchet chat` are pointed at: a run directory, or a Hugging Face model directory (or hub id)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from ratchet.assemble import build_policy, template_of
from ratchet.config.base import Section
from ratchet.config.loader import load_config
from ratchet.config.schema import ModelConfig, RunConfig, StageConfig
from ratchet.config.section import section_from_words
from ratchet.data.processor import load_processor
from ratchet.data.tokenizer import load_tokenizer
from ratchet.errors import ConfigError, RunDirectoryError
from ratchet.executors.machine import freeze
from ratchet.generators.workers_config import WorkersConfig
from ratchet.models.load import load_policy
from ratchet.stage import Policy

MODEL = "model"  # where a run leaves its trained model, as a Hugging Face directory
ADAPTER = "adapter"  # and what a stage with `lora` trained, as peft reads it
AVERAGE = "model-ema"  # and the running average of its weights, where there is one


@dataclass(frozen=True)
class Target:
    """model: directory of the weights. config: of the run, or of the recipe given beside a bare model; None without either."""

    model: Path
    policy: Policy
    config: RunConfig | None


def open_target(path: Path, recipe: Path | None = None, generator: str | None = None) -> Target:
    """generator: its kind; None: what the run trained with (the engine for a bare model), in this process. Raises
    RunDirectoryError for a run that has no finished model yet."""
    own = path / "config.yaml"
    if not own.is_file():
        config = None if recipe is None else freeze(load_config(recipe))
        template = None if config is None else template_of(config)
        device = "cuda" if torch.cuda.is_available() else "cpu"
        model, tokenizer = load_policy(str(path), device=device), load_tokenizer(str(path))
        section = None if generator is None else section_from_words("generator", generator)
        processor = load_processor(path) if model.reads_media and path.is_dir() else None
        return Target(path, Policy.of(model, tokenizer, template=template, processor=processor, generator=section), config)
    if not (path / MODEL).is_dir():
        raise RunDirectoryError(f"{path} has no finished model yet: go on with `ratchet train --resume {path}`")
    config = load_config(own)
    # Where a run was trained says nothing about where it is looked at.
    stages = tuple(stage.model_copy(update={"generator": _generator(stage, generator)}) for stage in config.stages)
    model = ModelConfig(path=str(path / MODEL))
    trained = config.model_copy(update={"device": "auto", "model": model, "stages": stages})
    policy = build_policy(freeze(trained))
    return Target(path / MODEL, policy, config if recipe is None else freeze(load_config(recipe)))


def _generator(stage: StageConfig, kind: str | None) -> Section:
    """What several processes held is held by this one."""
    trained_with = stage.generator
    if kind is None:
        return trained_with.of if isinstance(trained_with, WorkersConfig) else trained_with
    return trained_with if getattr(trained_with, "kind", None) == kind else section_from_words("generator", kind)


def require_config(target: Target) -> RunConfig:
    if target.config is None:
        raise ConfigError("a model directory says nothing about tasks: add --recipe RECIPE, whose environment to evaluate on")
    return target.config
