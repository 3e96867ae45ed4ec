"""Rotary position embedding (RoPE): frequencies and their long-context scalings.

The scalings default, linear, llama3 and yarn are named as `rope_type` in a `config.json`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ratchet.config.model_shape.decoder_config import ORIGINAL_CONTEXT, DecoderConfig
from ratchet.utils.transfer import upload


class RotaryTable(nn.Module):
    """The rotary frequencies, in float32. They are not part of the state dict."""

    frequencies: Tensor

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.exact, self.scale = inverse_frequencies(config.rope, config.head_dim)
        # The table is computed on the CPU, also if the model is built on another device.
        frequencies = self.exact.to(torch.get_default_device())
        self.register_buffer("frequencies", frequencies, persistent=False)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> RotaryTable:
        """Move the frequencies with the model, but never cast them.

        In bfloat16 the angles at high positions would be wrong by whole turns.
        """
        super()._apply(fn, recurse)
        self.frequencies = upload(self.exact, self.frequencies.device)
        return self

    def forward(self, positions_T: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return (cos [T, 1, D], sin [T, 1, D / 2]) for `ratchet.models.ops.rotate`."""
        angles = positions_T[:, None, None].to(torch.float32) * self.frequencies
        cos = (angles.cos() * self.scale).to(dtype)
        sin = (angles.sin() * self.scale).to(dtype)
        return torch.cat([cos, cos], dim=-1), sin


def inverse_frequencies(rope: Mapping[str, Any], head_dim: int) -> tuple[Tensor, float]:
    """Return (frequencies [head_dim / 2], factor of cos and sin), in float32 on the CPU.

    Args:
        rope: The rope parameters, as in `DecoderConfig`.
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device="cpu") / head_dim
    unscaled = 1.0 / float(rope["rope_theta"]) ** exponents
    return SCALINGS[rope["rope_type"]](unscaled, rope)


def _default(unscaled: Tensor, rope: Mapping[str, Any]) -> tuple[Tensor, float]:
    return unscaled, 1.0


def _linear(unscaled: Tensor, rope: Mapping[str, Any]) -> tuple[Tensor, float]:
    """Apply position interpolation (arXiv:2306.15595, eq. 4)."""
    return unscaled / float(rope["factor"]), 1.0


def _llama3(unscaled: Tensor, rope: Mapping[str, Any]) -> tuple[Tensor, float]:
    """Scale like Llama 3.1.

    Low frequencies are divided by `factor`, and high ones are kept. Frequencies between them are
    interpolated.
    """
    factor, low, high = (
        float(rope[key]) for key in ("factor", "low_freq_factor", "high_freq_factor")
    )
    original = float(rope[ORIGINAL_CONTEXT])
    wavelength = 2 * math.pi / unscaled
    smooth = (original / wavelength - low) / (high - low)
    blended = (1 - smooth) * unscaled / factor + smooth * unscaled
    scaled = torch.where(wavelength > original / low, unscaled / factor, blended)
    return torch.where(wavelength < original / high, unscaled, scaled), 1.0


def _yarn(unscaled: Tensor, rope: Mapping[str, Any]) -> tuple[Tensor, float]:
    """Scale like YaRN (arXiv:2309.00071).

    YaRN combines "NTK-by-parts" interpolation (section 3.2) and a temperature of attention (section
    3.4).
    """
    original = float(rope[ORIGINAL_CONTEXT])
    factor = float(rope["factor"])
    base = float(rope["rope_theta"])
    head_dim = 2 * len(unscaled)

    def find_dimension(rotations: float) -> float:
        """Return the index of the frequency that makes this many turns in the original context."""
        return head_dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(base))

    def compute_temperature(scale: float, coefficient: float = 1.0) -> float:
        return 1.0 if scale <= 1 else 0.1 * coefficient * math.log(scale) + 1.0

    low = find_dimension(float(rope.get("beta_fast") or 32))
    high = find_dimension(float(rope.get("beta_slow") or 1))
    if rope.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    # The ramp is 0 at high frequencies, which are kept, and 1 at low ones, which are divided.
    ramp = (
        (torch.arange(head_dim // 2, dtype=torch.float32, device="cpu") - low)
        / max(high - low, 0.001)
    ).clamp(0, 1)
    frequencies = unscaled / factor * ramp + unscaled * (1 - ramp)
    if rope.get("attention_factor") is not None:
        return frequencies, float(rope["attention_factor"])
    if rope.get("mscale") and rope.get("mscale_all_dim"):
        numerator = compute_temperature(factor, float(rope["mscale"]))
        return frequencies, numerator / compute_temperature(factor, float(rope["mscale_all_dim"]))
    return frequencies, compute_temperature(factor)


Scaling = Callable[[Tensor, Mapping[str, Any]], tuple[Tensor, float]]
SCALINGS: Mapping[str, Scaling] = {
    "default": _default,
    "linear": _linear,
    "llama3": _llama3,
    "yarn": _yarn,
}
