"""Learning-rate schedules: pure functions of the count of optimizer steps, so that resuming needs
no state."""

from __future__ import annotations

import math
from typing import Literal

Schedule = Literal["constant", "linear", "cosine", "wsd"]


def lr_factor(
    step: int, *, total: int, warmup: int, schedule: Schedule, min_ratio: float, decay: int = 0
) -> float:
    """Factor on the peak rate for optimizer step `step` (from 0) of `total`: a linear warm-up to 1
    over `warmup` steps, then a decay from 1 to `min_ratio` at `total`, straight ("linear") or by a
    half wave ("cosine"), or 1 until the last `decay` steps, in which it is straight (warm-up,
    stable, decay: "wsd", arXiv:2404.06395; straight as in arXiv:2405.18392)."""
    ramp = min(1.0, (step + 1) / warmup) if warmup else 1.0
    if schedule == "constant":
        return ramp
    start = max(warmup, total - decay) if schedule == "wsd" else warmup
    progress = min(1.0, max(0, step - start) / max(1, total - start))
    shape = 0.5 * (1 + math.cos(math.pi * progress)) if schedule == "cosine" else 1 - progress
    return ramp * (min_ratio + (1 - min_ratio) * shape)
