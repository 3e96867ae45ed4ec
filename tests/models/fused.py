"""transformers holds the experts of a layer in two tensors, and saves them as one matrix each."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

PIECES = {
    "qwen3_moe": ("mlp", ("gate_proj", "up_proj"), ("down_proj",)),
    "mixtral": ("block_sparse_moe", ("w1", "w3"), ("w2",)),
}


def file_names(model_type: str, named: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    """Tensors of a transformers model by the names that its files have."""
    if model_type not in PIECES:
        return dict(named)
    block, gate_up, down = PIECES[model_type]
    found = {}
    for name, tensor in named:
        path, _, kind = name.replace(".mlp.", f".{block}.").rpartition(".")
        if tensor.dim() < 3:
            found[f"{path}.{kind}"] = tensor
            continue
        pieces = gate_up if kind == "gate_up_proj" else down
        for expert, matrix in enumerate(tensor):
            found |= {
                f"{path}.{expert}.{p}.weight": part
                for p, part in zip(pieces, matrix.chunk(len(pieces)), strict=True)
            }
    return found
