"""The learning rate and the non-finite-step policy of a learner."""

from __future__ import annotations

import math

from ratchet.config.length import count_warmup_steps
from ratchet.config.schema import OptimizerConfig
from ratchet.errors import TrainingError, link_symptom
from ratchet.learners.optim.schedule import compute_lr_factor


class OptimizerStepRules:
    """The learning rate of each optimizer step, and the decision to skip non-finite steps.

    Args:
        total_steps: Optimizer steps of the learning-rate schedule.
        max_bad_steps: Consecutive non-finite steps after which training stops.
    """

    def __init__(self, config: OptimizerConfig, *, total_steps: int, max_bad_steps: int) -> None:
        self.config = config
        self.total_steps = total_steps
        self.max_bad_steps = max_bad_steps
        # Number of steps, including skipped ones. The learning-rate schedule depends on it.
        self.steps_taken = 0
        # Consecutive non-finite steps.
        self.bad_steps = 0

    def begin(self) -> dict[str, float]:
        """Count the next step. Return its metrics: the learning rate, and zero skip metrics."""
        config = self.config
        factor = compute_lr_factor(
            self.steps_taken,
            total=self.total_steps,
            warmup=count_warmup_steps(config.warmup_steps, config.warmup_share, self.total_steps),
            schedule=config.schedule,
            min_ratio=config.min_lr_ratio,
            decay=config.decay_steps,
        )
        self.steps_taken += 1
        return {"lr": config.lr * factor, "skipped_empty": 0.0, "skipped_nonfinite": 0.0}

    def accept_step(self, norm: float, loss: float) -> bool:
        """Return True if the step with this gradient norm and loss may change the weights.

        A step with a non-finite norm or loss may not, and is counted. Raises TrainingError after
        `max_bad_steps` consecutive such steps.
        """
        if math.isfinite(norm) and math.isfinite(loss):
            self.bad_steps = 0
            return True
        self.bad_steps += 1
        if self.bad_steps >= self.max_bad_steps:
            # Weights that were never changed were not finite by the learning rate.
            fix = (
                "Lower optimizer.lr."
                if self.steps_taken > self.bad_steps
                else "No step was finite before: look for weights that are not, in the model or a "
                "teacher, or for rewards that are too large."
            )
            raise TrainingError(
                f"{self.bad_steps} optimizer steps in a row were not finite (loss {loss}, gradient "
                f"norm {norm}); none of them changed the weights. {fix} "
                f"{link_symptom('the-loss-or-the-gradient-is-not-finite')}"
            )
        return False
