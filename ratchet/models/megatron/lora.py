"""Add LoRA adapters to the Megatron stages of a rank.

The adapters have the names and initial values of the built-in decoder's adapters.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ratchet.config.model_shape.lora_targets import resolve_decoder_targets
from ratchet.config.model_shape.megatron_decoder import MegatronDecoderConfig
from ratchet.models.lora.decoder import Adapter, init_adapters
from ratchet.models.megatron.blocks import make_adapter_layout, make_stage_layout
from ratchet.models.megatron.build import MegatronStage
from ratchet.models.megatron.low_rank import AdaptableLinear, ParallelLoRA
from ratchet.models.parallel.megatron_sizes import MegatronSizes
from ratchet.models.weights.weight_layout import WeightPiece


def attach(stages: Sequence[MegatronStage], sizes: MegatronSizes, adapter: Adapter) -> None:
    """Add adapters to the stages and freeze all other weights.

    Raises ConfigError as `resolve_decoder_targets` does.
    """
    for stage in stages:
        target_names = resolve_decoder_targets(stage.shape, adapter.lora)
        layout = make_stage_layout(stage, sizes)
        # transformers, which runs the other copies of such a model, fuses its routed experts.
        is_fused = isinstance(stage.shape, MegatronDecoderConfig)
        stage.requires_grad_(False)
        linears = [
            (path, module)
            for path, module in stage.named_modules()
            if isinstance(module, AdaptableLinear) and not (is_fused and module.is_expert)
        ]
        for number, (path, linear) in enumerate(linears):
            targets = _group_by_target(layout[f"{path}.weight"], target_names)
            if targets:
                # Seeds the dropout: unique over all stages, and the same on all ranks of a stage.
                dropout_index = stage.stage_index.index + stage.stage_index.count * number
                linear.adapter = ParallelLoRA(linear, targets, adapter.lora, dropout_index)
        init_adapters(stage, adapter, make_adapter_layout(stage))


def _group_by_target(
    pieces: Iterable[WeightPiece], target_names: Sequence[str]
) -> dict[str, list[WeightPiece]]:
    """Return the pieces of a matrix that the adapter adapts, by target (such as q_proj)."""
    targets: dict[str, list[WeightPiece]] = {}
    for piece in pieces:
        name = piece.name.split(".")[-2]
        if name in target_names:
            targets.setdefault(name, []).append(piece)
    return targets
