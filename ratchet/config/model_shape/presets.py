"""Decoder shapes by name, for models with random initial weights. Imports no torch."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from ratchet.config.model_shape.decoder_config import DecoderConfig
from ratchet.errors import ModelError


def _make_shape(
    hidden: int, layers: int, heads: int, kv_heads: int, head_dim: int, intermediate: int
) -> dict[str, Any]:
    return {
        "hidden_size": hidden,
        "n_layers": layers,
        "n_heads": heads,
        "n_kv_heads": kv_heads,
        "head_dim": head_dim,
        "intermediate_size": intermediate,
    }


def _make_experts(count: int, per_token: int, intermediate: int) -> dict[str, Any]:
    return {
        "family": "qwen3_moe",
        "n_experts": count,
        "experts_per_token": per_token,
        "expert_intermediate_size": intermediate,
    }


QWEN3 = {"max_positions": 40960, "rope": {"rope_type": "default", "rope_theta": 1e6}}

# All presets are Qwen3 or Qwen3-MoE shapes (QK norm, no biases) with tied embeddings. The comments
# give the number of parameters without the embedding.
PRESETS: Mapping[str, Mapping[str, Any]] = {
    "tiny": _make_shape(64, 2, 2, 2, 32, 192),  # 0.1 M
    # 0.2 M, 0.1 M active per token
    "tiny-moe": _make_shape(64, 2, 2, 2, 32, 192) | _make_experts(4, 2, 96),
    "small": _make_shape(128, 4, 4, 2, 32, 384),  # 0.8 M
    "medium": _make_shape(384, 6, 6, 3, 64, 1024),  # 10 M
    "large": _make_shape(768, 8, 12, 6, 64, 2048),  # 52 M
    "qwen3-0.6b": _make_shape(1024, 28, 16, 8, 128, 3072) | QWEN3,
    "qwen3-1.7b": _make_shape(2048, 28, 16, 8, 128, 6144) | QWEN3,
}


def get_preset(name: str, vocab_size: int, **overrides: Any) -> DecoderConfig:
    """Return the decoder shape of a preset.

    Args:
        name: a key of `PRESETS`.
        vocab_size: size of the tokenizer's vocabulary.
        overrides: values for any other field of `DecoderConfig`.

    Raises ModelError, which suggests the nearest name, for an unknown name or field.
    """
    if name not in PRESETS:
        raise ModelError(
            f"no preset is called '{name}'{_suggest_nearest(name, PRESETS)}; there are "
            f"{', '.join(PRESETS)}"
        )
    field_names = {field.name for field in fields(DecoderConfig)}
    for key in overrides:
        if key not in field_names:
            raise ModelError(
                f"preset '{name}' has no field '{key}'{_suggest_nearest(key, field_names)}"
            )
    return DecoderConfig(**{"vocab_size": vocab_size, **PRESETS[name], **overrides})


def _suggest_nearest(word: str, candidates: Mapping[str, Any] | set[str]) -> str:
    match = difflib.get_close_matches(word, candidates, n=1)
    return f" (did you mean '{match[0]}'?)" if match else ""
