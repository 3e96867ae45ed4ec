"""What a token takes of a model of transformers, by its parameters and its configuration."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn

from ratchet.models.flops import Work

ATTENDING = {"full_attention", "sliding_attention", "chunked_attention"}
EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")


def work_of(weights: Iterable[nn.Parameter], head: nn.Parameter, config: Any) -> Work | None:
    """None where a layer does something else than attend to keys of its own heads (a state space, a
    convolution, keys that are compressed), or where it can't be told how many of its experts a
    token is sent to. weights: of the layers and what lies around them, but for embeddings, which
    are looked up. config: of the text."""
    kinds = set(getattr(config, "layer_types", None) or ATTENDING)
    if (
        kinds - ATTENDING
        or getattr(config, "kv_lora_rank", None)
        or not getattr(config, "num_attention_heads", 0)
    ):
        return None
    experts = next((count for name in EXPERTS if (count := getattr(config, name, None))), 0)
    chosen = getattr(config, "num_experts_per_tok", 0)
    multiplied = head.numel()
    for weight in weights:
        if weight.dim() == 2:
            multiplied += weight.numel()
        elif weight.dim() > 2:
            if not (experts and chosen and len(weight) == experts):
                return None
            multiplied += weight.numel() // experts * chosen
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return Work(multiplied, config.num_hidden_layers * config.num_attention_heads * size)
