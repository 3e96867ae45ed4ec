"""Run the head of a transformers model alone: a stand-in takes the place of the backbone.

n = tokens, d = hidden size, V = vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from ratchet.errors import ModelError
from ratchet.models.transformers.modules import replace_submodule


def find_head_name(model: Any) -> str:
    """Return the dotted name of the output embedding [V, d]."""
    head = model.get_output_embeddings()
    for path, module in model.named_modules():
        if module is head and path:
            return f"{path}.weight"
    raise ModelError(f"{type(model).__name__} has no output embedding: it is not a language model")


def run_head(model: nn.Module, backbone_path: str, hidden_nd: Tensor) -> Tensor:
    """Return the logits [n, V] of hidden states, in their dtype.

    Args:
        model: The causal language model.
        backbone_path: Dotted path of the backbone, whose output the head reads.
    """
    head = replace_submodule(model, backbone_path, _FixedBackbone(hidden_nd[None]))
    weights = {name: weight.to(hidden_nd.dtype) for name, weight in head.named_parameters()}
    tokens = torch.zeros(1, hidden_nd.shape[0], dtype=torch.int64, device=hidden_nd.device)
    inputs = {"input_ids": tokens, "use_cache": False}
    return functional_call(head, weights, (), inputs).logits[0]


class _FixedBackbone(nn.Module):
    """A stand-in for a backbone, which returns given hidden states for any input."""

    def __init__(self, hidden_1nd: Tensor) -> None:
        super().__init__()
        self.hidden_1nd = hidden_1nd

    def forward(self, *args: Any, **kwargs: Any) -> _BackboneOutput:
        return _BackboneOutput(self.hidden_1nd)


class _BackboneOutput:
    """The output of a backbone. Caches, router logits and all other fields are None."""

    def __init__(self, hidden_1nd: Tensor) -> None:
        self.last_hidden_state = hidden_1nd

    def __getitem__(self, index: int) -> Tensor:
        return (self.last_hidden_state,)[index]

    def __getattr__(self, name: str) -> None:
        return None
