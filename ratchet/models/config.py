"""Shape of the built-in decoder, read from and written to a Hugging Face `config.json`. Free of torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ratchet.errors import ModelError


@dataclass(frozen=True)
class DecoderConfig:
    """Llama, Mistral, Qwen2 and Qwen3 dense decoders: they differ in these fields only."""

    vocab_size: int
    hidden_size: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    intermediate_size: int
    max_positions: int = 4096
    family: str = "qwen3"  # Hugging Face `model_type`
    qk_norm: bool = True
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    tied: bool = True
    norm_eps: float = 1e-6
    init_std: float = 0.02
    rope: Mapping[str, Any] = field(default_factory=lambda: {"rope_type": "default", "rope_theta": 10000.0})
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.n_heads % self.n_kv_heads:
            raise ModelError(f"{self.n_heads} attention heads can't share {self.n_kv_heads} KV heads evenly")
        if self.head_dim % 2:
            raise ModelError(f"head_dim={self.head_dim} must be even: rotary embedding turns pairs")
