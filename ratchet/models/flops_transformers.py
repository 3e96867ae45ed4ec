"""Estimate a `transformers` model's FLOPs per token from its parameters and configuration."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn

from ratchet.models.flops import TokenCost
from ratchet.models.transformers_settings import read_setting

# Values of `layer_types` in a config.json that are standard attention.
STANDARD_ATTENTION = {"full_attention", "sliding_attention", "chunked_attention"}
# Keys of the number of experts, by model family.
EXPERT_COUNTS = ("num_local_experts", "num_experts", "n_routed_experts")


def estimate_token_cost(
    weights: Iterable[nn.Parameter], head: nn.Parameter, config: Any
) -> TokenCost | None:
    """Return the cost of one token's forward pass; None if it can't be determined.

    The cost can't be determined if the number of experts per token is unknown, or if a layer is not
    standard attention (for example a state space model, a convolution, or attention with compressed
    keys).

    Args:
        weights: Parameters of the backbone, without embeddings, which are only looked up.
        head: The output embedding.
        config: Configuration of the text model.
    """
    layer_types = set(read_setting(config, "layer_types") or STANDARD_ATTENTION)
    if (
        layer_types - STANDARD_ATTENTION
        or read_setting(config, "kv_lora_rank")
        or not read_setting(config, "num_attention_heads", 0)
    ):
        return None
    n_experts = next((count for name in EXPERT_COUNTS if (count := read_setting(config, name))), 0)
    experts_per_token = read_setting(config, "num_experts_per_tok", 0)
    matrix_entries = head.numel()
    for weight in weights:
        if weight.dim() == 2:
            matrix_entries += weight.numel()
        elif weight.dim() > 2:
            if not (n_experts and experts_per_token and len(weight) == n_experts):
                return None
            matrix_entries += weight.numel() // n_experts * experts_per_token
    head_dim = read_setting(config, "head_dim") or config.hidden_size // config.num_attention_heads
    return TokenCost(
        matrix_entries, config.num_hidden_layers * config.num_attention_heads * head_dim
    )
