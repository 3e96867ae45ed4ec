"""Add LoRA adapters to a rank's stages, with the built-in decoder's initial values and names."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ratchet.models.lora.decoder import Adapter, begin
from ratchet.models.lora.targets import targets_of
from ratchet.models.megatron.blocks import adapter_layout, layout_of
from ratchet.models.megatron.build import Stage
from ratchet.models.megatron.low_rank import Adapted, ParallelLowRank
from ratchet.models.parallel.megatron_sizes import Sizes
from ratchet.models.weights.weight_layout import Piece


def attach(stages: Sequence[Stage], sizes: Sizes, adapter: Adapter) -> None:
    """Add adapters to the stages and freeze all other weights.

    Raises ConfigError as `targets_of` does.
    """
    for stage in stages:
        target_names = targets_of(stage.shape, adapter.lora)
        layout = layout_of(stage, sizes)
        stage.requires_grad_(False)
        maps = [
            (path, module) for path, module in stage.named_modules() if isinstance(module, Adapted)
        ]
        for number, (path, linear) in enumerate(maps):
            targets = {} if linear.is_expert else _targets(layout[f"{path}.weight"], target_names)
            if targets:
                place = stage.share.index + stage.share.count * number
                linear.adapter = ParallelLowRank(linear, targets, adapter.lora, place)
        begin(stage, adapter, adapter_layout(stage))


def _targets(adapted: Iterable[Piece], target_names: Sequence[str]) -> dict[str, list[Piece]]:
    """Return the pieces of a matrix that an adapter covers, by the name of the canonical map."""
    targets: dict[str, list[Piece]] = {}
    for piece in adapted:
        name = piece.name.split(".")[-2]
        if name in target_names:
            targets.setdefault(name, []).append(piece)
    return targets
