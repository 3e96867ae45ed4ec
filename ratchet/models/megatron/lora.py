"""Gives the stages of a rank adapters, which begin as those of our own decoder do and have the same
names."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ratchet.models.lora.decoder import Adapter, begin
from ratchet.models.lora.targets import targets_of
from ratchet.models.megatron.blocks import adapter_layout, layout_of
from ratchet.models.megatron.build import Stage
from ratchet.models.megatron.low_rank import Adapted, ParallelLowRank
from ratchet.models.megatron.sizes import Sizes
from ratchet.models.weights.weight_layout import Piece


def attach(stages: Sequence[Stage], sizes: Sizes, adapter: Adapter) -> None:
    """Nothing else of them trains from now on. Raises ConfigError as `targets_of` does."""
    for stage in stages:
        wanted, layout = targets_of(stage.shape, adapter.lora), layout_of(stage, sizes)
        stage.requires_grad_(False)
        maps = [
            (path, module) for path, module in stage.named_modules() if isinstance(module, Adapted)
        ]
        for number, (path, linear) in enumerate(maps):
            targets = {} if linear.is_expert else _targets(layout[f"{path}.weight"], wanted)
            if targets:
                place = stage.share.index + stage.share.count * number
                linear.adapter = ParallelLowRank(linear, targets, adapter.lora, place)
        begin(stage, adapter, adapter_layout(stage))


def _targets(adapted: Iterable[Piece], wanted: Sequence[str]) -> dict[str, list[Piece]]:
    found: dict[str, list[Piece]] = {}
    for piece in adapted:
        name = piece.name.split(".")[-2]
        if name in wanted:
            found.setdefault(name, []).append(piece)
    return found
