"""The course of a learner's optimizer steps: the rate of each, and what happens to one that is not
finite."""

from __future__ import annotations

import math

from ratchet.config.schema import OptimizerConfig
from ratchet.errors import TrainingError
from ratchet.learners.optim.schedule import lr_factor


class Pace:
    """total: optimizer steps of the schedule. max_bad: non-finite ones in a row after which
    training stops."""

    def __init__(self, config: OptimizerConfig, *, total: int, max_bad: int) -> None:
        self.config, self.total, self.max_bad = config, total, max_bad
        self.taken = 0  # steps, skipped ones included: the schedule is a function of their number
        self.bad = 0  # non-finite ones in a row

    def begin(self) -> dict[str, float]:
        """The metrics of the next step, with its rate."""
        config = self.config
        factor = lr_factor(
            self.taken,
            total=self.total,
            warmup=config.warmup_steps,
            schedule=config.schedule,
            min_ratio=config.min_lr_ratio,
            decay=config.decay_steps,
        )
        self.taken += 1
        return {"lr": config.lr * factor, "skipped_empty": 0.0, "skipped_nonfinite": 0.0}

    def sound(self, norm: float, loss: float) -> bool:
        """Whether a step with this gradient may change the weights. Raises TrainingError for one
        bad step too many."""
        if math.isfinite(norm) and math.isfinite(loss):
            self.bad = 0
            return True
        self.bad += 1
        if self.bad >= self.max_bad:
            raise TrainingError(
                f"{self.bad} optimizer steps in a row were not finite (loss {loss}, gradient norm "
                f"{norm}); weights are "
                "those before them: lower optimizer.lr"
            )
        return False
