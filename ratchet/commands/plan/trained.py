"""Count the parameters that a stage trains, and those that `model.freeze` excludes."""

from __future__ import annotations

import torch

from ratchet.config.lora import LoRAConfig
from ratchet.models.decoder import Decoder
from ratchet.models.flops import DecoderCost, StageParameters
from ratchet.models.parallel.sharding import WHOLE, ModelShard
from ratchet.models.weights.weight_layout import is_selected, list_pieces


def count_trained_weights(cost: DecoderCost, lora: LoRAConfig | None) -> int:
    """Return the number of parameters that one role trains: those of its adapter, if it has one."""
    if lora is None:
        return cost.parameters - count_frozen_weights(cost).total
    return cost.count_adapter_parameters(lora)


def count_frozen_weights(cost: DecoderCost, shard: ModelShard = WHOLE) -> StageParameters:
    """Return the parameters of a shard that `cost.freeze` selects, before FSDP divides them.

    cost: the cost of the whole model.
    """
    frozen = StageParameters()
    if not cost.freeze:
        return frozen
    # The patterns select names, so the layers are laid out, without memory.
    with torch.device("meta"):
        decoder = Decoder(cost.shape, shard)
    for name, pieces in list_pieces(decoder).items():
        shape = decoder.get_parameter(name).shape
        rows = sum(len(piece.rows) for piece in pieces if is_selected(piece.name, cost.freeze))
        if len(shape) == 1:
            frozen += StageParameters(vectors=rows)
        elif len(shape) == 3:
            frozen += StageParameters(experts=rows * shape[-1])
        else:
            if name.startswith("embed_tokens") and cost.has_whole_embedding:
                rows = min(rows, 1) * cost.shape.vocab_size
            frozen += StageParameters(matrices=rows * shape[-1])
    return frozen
