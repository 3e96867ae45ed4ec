"""Compute learning rates as pure functions of the optimizer step, so resuming needs no state."""

from __future__ import annotations

import math
from typing import Literal

Schedule = Literal["constant", "linear", "cosine", "wsd"]


def compute_lr_factor(
    step: int, *, total: int, warmup: int, schedule: Schedule, min_ratio: float, decay: int = 0
) -> float:
    """Return the factor on the peak learning rate for optimizer step `step` (from 0) of `total`.

    The factor rises linearly to 1 over `warmup` steps. After that it depends on the schedule:

    constant: it stays at 1.
    linear: it falls linearly to `min_ratio` at `total`.
    cosine: it falls along half a cosine wave to `min_ratio` at `total`.
    wsd: warm-up, stable, decay (arXiv:2404.06395). It stays at 1 until the last `decay` steps, and
      falls linearly to `min_ratio` over these (linearly as in arXiv:2405.18392).
    """
    warmup_factor = min(1.0, (step + 1) / warmup) if warmup else 1.0
    if schedule == "constant":
        return warmup_factor
    start = max(warmup, total - decay) if schedule == "wsd" else warmup
    progress = min(1.0, max(0, step - start) / max(1, total - start))
    shape = 0.5 * (1 + math.cos(math.pi * progress)) if schedule == "cosine" else 1 - progress
    return warmup_factor * (min_ratio + (1 - min_ratio) * shape)
