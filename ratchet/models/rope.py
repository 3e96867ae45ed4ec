"""Rotary frequencies and their long-context scalings, as `config.json` names them (default, linear, llama3, yarn)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ratchet.errors import ModelError
from ratchet.models.config import DecoderConfig

SUPPORTED = ("default", "linear", "llama3", "yarn")


class RotaryTable(nn.Module):
    """cos and sin by position, computed in float32 once per forward; not part of the state dict."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        frequencies, self.scale = inverse_frequencies(config.rope, config.head_dim, config.max_positions)
        self.register_buffer("frequencies", frequencies, persistent=False)

    def forward(self, positions_T: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        angles = positions_T[:, None].to(torch.float32) * self.frequencies.to(torch.float32)
        angles = torch.cat([angles, angles], dim=-1)
        return (angles.cos() * self.scale).to(dtype), (angles.sin() * self.scale).to(dtype)


def inverse_frequencies(rope: Mapping[str, Any], head_dim: int, max_positions: int) -> tuple[Tensor, float]:
    """(frequencies [head_dim / 2] float32, factor on cos and sin). Raises ModelError for an unknown `rope_type`."""
    kind = rope.get("rope_type", rope.get("type", "default"))
    base = float(rope.get("rope_theta", 10000.0))
    plain = base ** (-torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    if kind == "default":
        return plain, 1.0
    if kind == "linear":
        return plain / float(rope["factor"]), 1.0
    if kind == "llama3":
        return _llama3(plain, rope), 1.0
    if kind == "yarn":
        return _yarn(plain, rope, base, head_dim, max_positions)
    raise ModelError(f"rope_type '{kind}' is not one of {', '.join(SUPPORTED)}: load this model with `model.backend: transformers`")


def _llama3(plain: Tensor, rope: Mapping[str, Any]) -> Tensor:
    """Llama 3.1: low frequencies are divided by `factor`, high ones kept, the band between interpolated."""
    factor, low, high = (float(rope[k]) for k in ("factor", "low_freq_factor", "high_freq_factor"))
    original = float(rope["original_max_position_embeddings"])
    wavelength = 2 * math.pi / plain
    smooth = (original / wavelength - low) / (high - low)
    blended = (1 - smooth) * plain / factor + smooth * plain
    scaled = torch.where(wavelength > original / low, plain / factor, blended)
    return torch.where(wavelength < original / high, plain, scaled)


def _yarn(plain: Tensor, rope: Mapping[str, Any], base: float, head_dim: int, max_positions: int) -> tuple[Tensor, float]:
    """YaRN (arXiv:2309.00071): "NTK-by-parts" interpolation, section 3.2, and the attention temperature, section 3.4."""
    original = float(rope.get("original_max_position_embeddings") or max_positions)
    factor = float(rope.get("factor") or max_positions / original)

    def dimension(rotations: float) -> float:
        return head_dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(base))

    def temperature(scale: float, coefficient: float = 1.0) -> float:
        return 1.0 if scale <= 1 else 0.1 * coefficient * math.log(scale) + 1.0

    low = dimension(float(rope.get("beta_fast") or 32))
    high = dimension(float(rope.get("beta_slow") or 1))
    if rope.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    ramp = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / max(high - low, 0.001)).clamp(0, 1)
    frequencies = plain / factor * ramp + plain * (1 - ramp)
    attention = rope.get("attention_factor")
    if attention is None:
        mscale, all_dims = rope.get("mscale"), rope.get("mscale_all_dim")
        attention = (
            temperature(factor, float(mscale)) / temperature(factor, float(all_dims)) if mscale and all_dims else temperature(factor)
        )
    return frequencies, float(attention)
