"""Hold images, frames and samples to the limits of media. This module does not import torch."""

from __future__ import annotations

import numpy as np

from ratchet.config.media_limits import MediaLimits
from ratchet.errors import DataError


def check_size(width: int, height: int, where: str, limits: MediaLimits) -> None:
    """Raise DataError if an image or a frame has more pixels than the limits allow."""
    if max(width, height) > limits.max_side:
        raise DataError(
            f"{where}: is {width} x {height} pixels, at most {limits.max_side} on a side are "
            "allowed: make it smaller, or raise max_side under media"
        )
    if width * height > limits.max_pixels:
        raise DataError(
            f"{where}: declares {width} x {height} = {width * height} pixels, at most "
            f"{limits.max_pixels} are allowed: make it smaller, or raise max_pixels under media"
        )


def check_duration(samples: int, rate: int, where: str, limits: MediaLimits) -> None:
    """Raise DataError if so many samples at a rate in Hz last longer than the limit."""
    if rate <= 0 or samples > limits.max_audio_s * rate:
        raise DataError(
            f"{where}: declares {samples} samples at {rate} Hz, at most {limits.max_audio_s:g} s "
            "are allowed: cut it, or raise max_audio_s under media"
        )


def choose_evenly_spaced(count: int, max_count: int) -> list[int]:
    """Return at most `max_count` evenly spaced indices below `count`, with the first and last."""
    return (
        list(range(count))
        if count <= max_count
        else np.linspace(0, count - 1, max_count).round().astype(int).tolist()
    )
