"""The section of a stage's checkpoints."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from ratchet.config.base import Section


class CheckpointConfig(Section):
    """When checkpoints are written, and which are kept."""

    every: int = Field(
        default=50, ge=0, description="Steps between checkpoints; 0: only at the end of the stage."
    )
    keep: int = Field(default=2, ge=1, description="Number of newest checkpoints to keep.")
    keep_best: int = Field(
        default=0,
        ge=0,
        description="Number of best checkpoints to keep, among those that have the metric.",
    )
    metric: str | None = Field(
        default=None,
        description="Metric of the best checkpoints. Lower is better for eval/loss, for "
        "eval/perplexity and for a metric with a minus before it. null: eval/accuracy, or "
        "eval/loss if no accuracy is measured.",
    )
    end_with: Literal["last", "best"] = Field(
        default="last",
        description="Weights with which the stage ends: those of its last step, or of its best "
        "checkpoint.",
    )
    keep_every: int = Field(
        default=0,
        ge=0,
        description="Checkpoints whose step is a multiple of this are never deleted; 0: any may "
        "be deleted.",
    )
    on_error: Literal["stop", "warn"] = Field(
        default="stop",
        description="Reaction to a checkpoint that can't be written, for example on a full disk: "
        "stop the run, or warn and go on.",
    )
    background: bool = Field(
        default=False,
        description="Write checkpoints in the background, from a copy in host memory. One is "
        "complete before the next begins.",
    )
    limit_s: float | None = Field(
        default=None,
        gt=0,
        description="Time limit of the process, in seconds. Before it is reached, the run saves a "
        "checkpoint and ends with exit status 75. null: no limit.",
    )

    @model_validator(mode="after")
    def _check_unread_keys(self) -> CheckpointConfig:
        for key in ("metric", "end_with"):
            if not self.keep_best and key in self.changed:
                raise ValueError(
                    f"{key} is not read with keep_best=0: set keep_best, or remove {key}"
                )
        return self
