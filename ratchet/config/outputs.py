"""The sections of what a run writes: checkpoints, records of its steps, and logs."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, SerializeAsAny

from ratchet.config.base import Section
from ratchet.config.resolve import Slot


class CheckpointConfig(Section):
    """Sets when checkpoints are written, and which are kept."""

    every: int = Field(default=50, ge=0)
    """Steps between checkpoints; 0: only at the end of the stage."""
    keep: int = Field(default=2, ge=1)
    """Number of newest checkpoints to keep."""
    keep_best: int = Field(default=0, ge=0)
    """Number of best checkpoints to keep, among those that have the metric."""
    metric: str | None = None
    """Metric of the best checkpoints. Lower is better for eval/loss, for eval/perplexity and for a
    metric with a minus before it. null: eval/accuracy, or eval/loss if no accuracy is measured."""
    end_with: Literal["last", "best"] = "last"
    """Weights with which the stage ends: those of its last step, or of its best checkpoint."""
    keep_every: int = Field(default=0, ge=0)
    """Checkpoints whose step is a multiple of this are never deleted; 0: any may be deleted."""
    on_error: Literal["stop", "warn"] = "stop"
    """Reaction to a checkpoint that can't be written, for example on a full disk: stop the run, or
    warn and continue."""
    background: bool = False
    """Write checkpoints in the background, from a copy in host memory. One is complete before the
    next begins."""
    limit_s: float | None = Field(default=None, gt=0)
    """Time limit of the process, in seconds. Before it is reached, the run saves a checkpoint and
    ends with exit status 75. null: no limit."""

    def check_keys(self) -> None:
        for key in ("metric", "end_with"):
            if not self.keep_best and key in self.changed:
                raise ValueError(
                    f"{key} is not read with keep_best=0: set keep_best, or remove {key}"
                )


class RecordConfig(Section):
    """The records of each step, in steps/ (docs/records.md)."""

    every: int = Field(default=1, ge=0)
    """Steps between recorded steps; 0: no records."""
    groups: int | None = Field(default=None, ge=1)
    """Number of groups recorded in a step, drawn at random; null: all groups, which `ratchet
    replay` needs."""
    max_gib: float = Field(default=8.0, gt=0)
    """Maximum size of the records; above it the oldest files are deleted."""


class LoggingConfig(Section):
    """Sets what a run logs, and where it sends its metrics."""

    tensorboard: bool | Literal["auto"] = "auto"
    """Write tensorboard/ beside metrics.jsonl; auto: if TensorBoard is installed (extra
    `tensorboard`)."""
    sinks: Annotated[tuple[SerializeAsAny[Section], ...], Slot("sink", is_list=True)] = ()
    """Experiment trackers that receive the metrics too."""
    progress: Literal["auto", "live", "plain", "off"] = "auto"
    """Progress output; auto: live on a terminal, else plain lines."""
    system: bool = True
    """Measure CPU, memory, disk and accelerator use in each step."""
    trace: bool = True
    """Write trace.json, a timeline of each step for the Perfetto viewer."""
    stall_s: float | None = Field(default=600.0, gt=0)
    """Seconds after which a stalled phase is reported in the log; null: never."""
