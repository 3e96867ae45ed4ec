"""Checks that a distributed learner can shard a model, before its processes start."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ratchet.config.lora import LoRAConfig
from ratchet.config.model_shape.decoder_config import (
    FAMILIES,
    DecoderConfig,
    unsupported_reason,
)
from ratchet.config.model_shape.lora_targets import (
    list_fused_parameters,
    resolve_decoder_targets,
    resolve_target_parameters,
)
from ratchet.config.model_shape.megatron_decoder import (
    FAMILY_FACTS,
    MegatronDecoderConfig,
    explain_missing_layers,
    read_megatron_decoder,
)
from ratchet.errors import ConfigError, ModelError
from ratchet.learners.config import DTensorConfig, MegatronConfig
from ratchet.learners.distributed.topology import build_first_shard, build_megatron_sizes
from ratchet.models.convert.dimensions import count_mtp_layers
from ratchet.models.parallel.megatron_sizes import Fp8Format, MegatronSizes, require_megatron
from ratchet.models.policy import DecoderPolicy, PolicyModel


def check_dtensor(
    section: DTensorConfig, model: PolicyModel, lora: LoRAConfig | None = None
) -> None:
    """Raise ModelError if FSDP2 can't divide the model as `section` says.

    lora: The adapter that the model gets, which can be any.
    """
    if isinstance(model, DecoderPolicy):
        # If the sizes divide for the first rank, they do for all ranks.
        build_first_shard(section).check(model.shape)
    else:
        _check_transformers(section, model)


def check_megatron(
    section: MegatronConfig, model: PolicyModel, lora: LoRAConfig | None = None
) -> None:
    """Raise ModelError or ConfigError if Megatron can't divide the model as `section` says.

    lora: The adapter that the model gets.

    Raises MissingDependency if Megatron is not installed.
    """
    require_megatron()
    _check_megatron_shape(section, _find_megatron_shape(model), lora)


def check_megatron_config(
    section: MegatronConfig, hf: Mapping[str, Any], lora: LoRAConfig | None, backend: str
) -> None:
    """Raise ModelError or ConfigError if Megatron can't train the model of a `config.json`.

    backend: The key `model.backend`.
    """
    is_decoder = backend != "transformers" and unsupported_reason(hf) is None
    shape = DecoderConfig.from_hf(hf) if is_decoder else _read_megatron_shape(hf)
    _check_megatron_shape(section, shape, lora)


def _check_megatron_shape(
    section: MegatronConfig, shape: DecoderConfig, lora: LoRAConfig | None
) -> None:
    if section.mtp_loss_scaling_factor:
        shape = _add_mtp_layers(section, shape, lora)
    sizes = build_megatron_sizes(section)
    sizes.check(shape)
    if lora is not None:
        resolve_decoder_targets(shape, lora)
        _check_adapted_stages(sizes, shape, lora)
    if section.fp8 is not None:
        Fp8Format(section.fp8, section.fp8_recipe).check_shape(shape, section.tensor_parallel)


def _check_adapted_stages(sizes: MegatronSizes, shape: DecoderConfig, lora: LoRAConfig) -> None:
    """Raise ConfigError if an adapter of experts alone leaves a pipeline rank nothing to train."""
    if lora.target_modules:
        return
    parameters = list_fused_parameters(shape)
    adapted = {parameters[name][0] for name in resolve_target_parameters(lora, parameters)}
    for rank in range(sizes.pipeline):
        stages = [sizes.stage(rank, chunk) for chunk in range(sizes.chunks)]
        layers = [layer for stage in stages for layer in stage.range(shape.n_layers)]
        if adapted.isdisjoint(layers):
            raise ConfigError(
                f"lora.target_modules=[] leaves pipeline rank {rank} nothing to train: its layers "
                "have none of the adapted experts. Set lora.target_modules=[o_proj]."
            )


def _add_mtp_layers(
    section: MegatronConfig, shape: DecoderConfig, lora: LoRAConfig | None
) -> DecoderConfig:
    """Return the shape with its layers for multi-token prediction (MTP), which are to be trained.

    Raises ModelError or ConfigError if they can't be.
    """
    key = "learner.mtp_loss_scaling_factor"
    setting = f"{key}={section.mtp_loss_scaling_factor} trains layers for multi-token prediction"
    layers = count_mtp_layers(shape.hf) if isinstance(shape, MegatronDecoderConfig) else 0
    if not layers:
        raise ModelError(f"{setting}, which this {shape.family} model lacks. Set {key}=0.")
    for other, is_set in (("lora", lora is not None), ("learner.fp8", section.fp8 is not None)):
        if is_set:
            raise ConfigError(
                f"{setting}, which {other} leaves out. Set {key}=0, or remove {other}."
            )
    return replace(shape, mtp_layers=layers)


def _find_megatron_shape(model: PolicyModel) -> DecoderConfig:
    """Return the shape of a model. Raises ModelError if Megatron Core has no layers for it."""
    if isinstance(model, DecoderPolicy):
        return model.shape
    # This import takes seconds unless such a model is loaded already.
    from ratchet.models.transformers.policy import TransformersPolicy

    hf = model.saved_config.to_dict() if isinstance(model, TransformersPolicy) else {}
    return _read_megatron_shape(hf, reads_media=model.reads_media)


def _read_megatron_shape(hf: Mapping[str, Any], *, reads_media: bool = False) -> DecoderConfig:
    """Return the shape of a `config.json`. Raises ModelError if Megatron has no layers for it."""
    remedy = "learner.kind=dtensor"
    if reads_media:
        reason = "it reads media"
    elif hf.get("model_type") not in FAMILIES:
        reason = explain_missing_layers(hf)
    elif (reason := unsupported_reason(hf)) is None:
        reason, remedy = "model.backend is transformers", "model.backend=auto"
    shape = None if reason else read_megatron_decoder(hf)
    if shape is None:
        raise ModelError(
            "learner.kind=megatron supports the families of Ratchet's own decoder and "
            f"{', '.join(FAMILY_FACTS)}, but transformers runs this model: {reason}. Set {remedy}."
        )
    return shape


def _check_transformers(section: DTensorConfig, model: PolicyModel) -> None:
    """Raise ModelError for keys that a transformers model does not support.

    Ranks can divide the rows of a batch (data parallel), the model's weights (FSDP), by the model's
    own plan its matrices (tensor parallel), the tokens of each sequence (context parallel), the
    experts of each layer (expert parallel), and the layers (pipeline parallel).
    """
    # These imports take seconds unless such a model is loaded already.
    from ratchet.models.transformers.division import (
        check_layer_division,
        check_sequence_division,
        check_token_division,
        make_plan,
    )
    from ratchet.models.transformers.expert_parallel import check_experts
    from ratchet.models.transformers.policy import TransformersPolicy

    assert isinstance(model, TransformersPolicy), "any other model is a decoder"
    if section.tensor_parallel > 1:
        # Raises ModelError if the model can't be divided.
        make_plan(model, section.tensor_parallel)
        if section.sequence_parallel:
            # Raises ModelError for a model that can't pack sequences.
            first_layers = build_first_shard(section).pipeline.range(len(model.layers()))
            check_sequence_division(model, len(first_layers))
    if section.context_parallel > 1:
        # Raises ModelError for an architecture whose tokens can't be divided.
        check_token_division(model)
    if section.expert_parallel > 1:
        # Raises ModelError for a model without stacked experts, or with another number of them.
        check_experts(model.model, section.expert_parallel)
    if section.pipeline_parallel > 1:
        # Raises ModelError for an architecture that can't be cut between its layers.
        check_layer_division(model, build_first_shard(section).pipeline)
