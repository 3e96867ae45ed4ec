"""Learning-rate schedules: pure functions of the count of optimizer steps, so that resuming needs no state."""

from __future__ import annotations

import math
from typing import Literal

Schedule = Literal["constant", "linear", "cosine"]


def lr_factor(step: int, *, total: int, warmup: int, schedule: Schedule, min_ratio: float) -> float:
    """Factor on the peak rate for optimizer step `step` (from 0) of `total`: a linear warm-up to 1 over `warmup` steps,
    then a decay from 1 to `min_ratio` at `total`, straight ("linear") or by a half wave ("cosine")."""
    ramp = min(1.0, (step + 1) / warmup) if warmup else 1.0
    if schedule == "constant":
        return ramp
    progress = min(1.0, max(0, step - warmup) / max(1, total - warmup))
    shape = 1 - progress if schedule == "linear" else 0.5 * (1 + math.cos(math.pi * progress))
    return ramp * (min_ratio + (1 - min_ratio) * shape)
