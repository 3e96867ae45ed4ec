"""Add LoRA adapters to a rank's stages.

Their names and initial values are those of the built-in decoder's adapters.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ratchet.config.model_shape.lora_targets import resolve_decoder_targets
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
        stage.requires_grad_(False)
        maps = [
            (path, module)
            for path, module in stage.named_modules()
            if isinstance(module, AdaptableLinear)
        ]
        for number, (path, linear) in enumerate(maps):
            targets = {} if linear.is_expert else _targets(layout[f"{path}.weight"], target_names)
            if targets:
                place = stage.share.index + stage.share.count * number
                linear.adapter = ParallelLoRA(linear, targets, adapter.lora, place)
        init_adapters(stage, adapter, make_adapter_layout(stage))


def _targets(
    adapted: Iterable[WeightPiece], target_names: Sequence[str]
) -> dict[str, list[WeightPiece]]:
    """Return the pieces of a matrix that an adapter covers, by Hugging Face module name."""
    targets: dict[str, list[WeightPiece]] = {}
    for piece in adapted:
        name = piece.name.split(".")[-2]
        if name in target_names:
            targets.setdefault(name, []).append(piece)
    return targets
