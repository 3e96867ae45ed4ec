"""Estimate a `transformers` model's FLOPs per token from its parameters and configuration."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn

from ratchet.models.flops import TokenCost

ATTENDING = {"full_attention", "sliding_attention", "chunked_attention"}
EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")


def estimate_token_cost(
    weights: Iterable[nn.Parameter], head: nn.Parameter, config: Any
) -> TokenCost | None:
    """Return the cost of one token's forward pass; None if it can't be determined.

    It can't if a layer is not standard attention (but a state space, a convolution, or attention
    with compressed keys), or if the number of experts per token is unknown.

    Args:
        weights: parameters of the backbone, without embeddings, whose lookup multiplies nothing.
        head: the output embedding.
        config: configuration of the text model.
    """
    kinds = set(getattr(config, "layer_types", None) or ATTENDING)
    if (
        kinds - ATTENDING
        or getattr(config, "kv_lora_rank", None)
        or not getattr(config, "num_attention_heads", 0)
    ):
        return None
    experts = next((count for name in EXPERTS if (count := getattr(config, name, None))), 0)
    experts_per_token = getattr(config, "num_experts_per_tok", 0)
    multiplied = head.numel()
    for weight in weights:
        if weight.dim() == 2:
            multiplied += weight.numel()
        elif weight.dim() > 2:
            if not (experts and experts_per_token and len(weight) == experts):
                return None
            multiplied += weight.numel() // experts * experts_per_token
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return TokenCost(multiplied, config.num_hidden_layers * config.num_attention_heads * head_dim)
