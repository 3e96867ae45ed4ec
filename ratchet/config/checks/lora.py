"""Check that `lora` and `model.freeze` are combined with settings that support them."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from ratchet.config.checks.clash import Conflict, clash
from ratchet.config.model_shape.lora_targets import (
    ALL,
    ATTENTION,
    DECODER_NAMES,
    refuse_target_parameters,
    resolve_decoder_targets,
    resolve_target_modules,
)
from ratchet.config.model_shape.presets import get_preset
from ratchet.config.schema import RunConfig, StageConfig
from ratchet.errors import ConfigError, ModelError


def _check_target_modules(stage: StageConfig, config: RunConfig) -> Iterator[Conflict]:
    """Check the target modules of the built-in decoder.

    The target modules of any other model are checked when it is loaded.
    """
    preset = config.model.preset
    if stage.lora is None or (preset is None and config.model.backend != "ratchet"):
        return
    if stage.lora.target_parameters:
        yield clash(refuse_target_parameters(), "lora.target_parameters")
        return
    try:
        if preset is None:
            resolve_target_modules(stage.lora, DECODER_NAMES)
        else:
            shape = get_preset(preset, vocab_size=1, **config.model.overrides)
            resolve_decoder_targets(shape, stage.lora)
    except (ModelError, TypeError):  # `model_conflicts` reports a wrong shape
        return
    except ConfigError as error:
        yield clash(str(error), "lora.target_modules")


def _check_target_parameters(stage: StageConfig, config: RunConfig) -> Iterator[Conflict]:
    lora = stage.lora
    if lora is not None and lora.target_parameters and lora.dropout:
        yield clash(
            f"lora.target_parameters adapts fused experts, and lora.dropout={lora.dropout} would "
            "drop inputs of linear layers alone. Set 0, or remove lora.target_parameters",
            "lora.dropout",
            "lora.target_parameters",
        )


def _check_encoders(stage: StageConfig, config: RunConfig) -> Iterator[Conflict]:
    if stage.lora is not None and config.model.train_encoders:
        yield clash(
            "model.train_encoders=true clashes with lora, which adapts the language model and "
            "freezes everything else: remove one",
            "model.train_encoders",
            "lora",
        )


def _check_freeze(stage: StageConfig, config: RunConfig) -> Iterator[Conflict]:
    if not config.model.freeze:
        return
    if stage.lora is not None:
        yield clash(
            "model.freeze clashes with lora, which freezes all weights: remove one, or choose the "
            "adapted layers by lora.target_modules",
            "model.freeze",
            "lora",
        )
    kind = stage.learner.kind_name
    if not stage.learner.supports_freeze:
        yield clash(
            f"learner.kind={kind} can't freeze weights of the model: set "
            "learner.kind=dtensor or local, or remove model.freeze",
            "model.freeze",
            "learner.kind",
        )


def _check_dropout(stage: StageConfig, config: RunConfig) -> Iterator[Conflict]:
    """Check that what dropout drops does not depend on the division of experts over ranks."""
    lora, learner = stage.lora, stage.learner
    if lora is None or not lora.dropout:
        return
    adapts_experts = lora.target_modules == ALL or not set(lora.target_modules) <= set(ATTENTION)
    if adapts_experts and learner.expert_ranks > 1:
        yield clash(
            f"lora.dropout={lora.dropout} would drop other inputs of experts with "
            f"learner.expert_parallel={learner.expert_ranks} than in one process. Set "
            "lora.dropout=0, or leave the experts out of lora.target_modules",
            "lora.dropout",
            "learner.expert_parallel",
        )


def _check_following_stage(stage: StageConfig, config: RunConfig) -> Iterator[Conflict]:
    """Check that another stage can follow a stage with LoRA.

    The next stage first merges the adapter into the weights, which must be in one process for this.
    """
    if stage.lora is None or stage == config.stages[-1]:
        return
    is_distributed = stage.learner.kind_name != "local"
    is_remote = stage.generator.kind_name not in ("engine", "hf")
    if is_distributed or is_remote:
        key, section = (
            ("learner", stage.learner) if is_distributed else ("generator", stage.generator)
        )
        yield clash(
            f"stage {stage.name} has lora and is not the last, and "
            f"{key}.kind={section.kind_name} can't merge its adapter into the weights: "
            "train the later stages in another run, from this one's model",
            "lora",
        )


def _check_served_rank(stage: StageConfig, config: RunConfig) -> Iterator[Conflict]:
    max_rank = stage.generator.sampler.max_lora_rank
    if stage.lora is not None and max_rank is not None and max_rank < stage.lora.rank:
        in_workers = stage.generator.kind_name == "workers"
        key = "generator.worker.lora_rank" if in_workers else "generator.lora_rank"
        yield clash(
            f"lora.rank={stage.lora.rank} is more than {key}={max_rank}, the largest rank that "
            f"vLLM is started for: set {key}={stage.lora.rank}",
            key,
            "lora.rank",
        )


LORA_CHECKS: tuple[Callable[[StageConfig, RunConfig], Iterator[Conflict]], ...] = (
    _check_target_modules,
    _check_target_parameters,
    _check_encoders,
    _check_freeze,
    _check_dropout,
    _check_following_stage,
    _check_served_rank,
)
