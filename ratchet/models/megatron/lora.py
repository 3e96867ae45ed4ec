"""Add LoRA adapters to the Megatron stages of a rank.

The adapters have the names and initial values of the built-in decoder's adapters.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ratchet.config.model_shape.lora_targets import resolve_decoder_targets
from ratchet.config.model_shape.megatron_decoder import MegatronDecoderConfig
from ratchet.models.lora.decoder import Adapter, init_adapters
from ratchet.models.lora.experts import resolve_decoder_factors
from ratchet.models.megatron.blocks import make_adapter_layout, make_stage_layout
from ratchet.models.megatron.build import MegatronStage
from ratchet.models.megatron.fused_experts import make_fused_factors
from ratchet.models.megatron.low_rank import AdaptableLinear, LoRAFactors, ParallelLoRA
from ratchet.models.parallel.megatron_sizes import MegatronSizes
from ratchet.models.weights.weight_layout import WeightPiece


def attach(stages: Sequence[MegatronStage], sizes: MegatronSizes, adapter: Adapter) -> None:
    """Add adapters to the stages and freeze all other weights.

    Raises ConfigError as `resolve_decoder_targets` does.
    """
    for stage in stages:
        lora, shape = adapter.lora, stage.shape
        target_names = resolve_decoder_targets(shape, lora)
        # transformers, which runs the other copies of such a model, fuses its routed experts.
        fused = (
            resolve_decoder_factors(shape, lora)
            if isinstance(shape, MegatronDecoderConfig)
            else None
        )
        layout = make_stage_layout(stage, sizes)
        stage.requires_grad_(False)
        linears = [
            (path, module)
            for path, module in stage.named_modules()
            if isinstance(module, AdaptableLinear)
        ]
        for path, linear in linears:
            pieces = layout[f"{path}.weight"]
            if fused is not None and linear.is_expert:
                targets = make_fused_factors(fused, linear.weight, pieces, lora.rank)
            else:
                targets = {
                    name: LoRAFactors(linear.weight, target_pieces, lora.rank)
                    for name, target_pieces in _group_by_target(pieces, target_names).items()
                }
            if targets:
                # The numbers of layers and experts in `path` count those of this rank only.
                module, _, _ = pieces[0].name.rsplit(".", 2)
                name = f"{module}.{path.rpartition('.')[2]}"
                linear.adapter = ParallelLoRA(linear, targets, lora, name)
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
