"""The sections of a run's logs and of the records of its steps."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, SerializeAsAny

from ratchet.config.base import Section
from ratchet.config.resolve import Slot


class RecordConfig(Section):
    """The records of each step, in steps/ (docs/records.md)."""

    every: int = Field(default=1, ge=0, description="Steps between recorded steps; 0: no records.")
    groups: int | None = Field(
        default=None,
        ge=1,
        description="Number of groups recorded in a step, drawn at random; null: all groups, which "
        "`ratchet replay` needs.",
    )
    max_gib: float = Field(
        default=8.0,
        gt=0,
        description="Maximum size of the records; above it the oldest files are deleted.",
    )


class LoggingConfig(Section):
    """What a run logs, and where it sends its metrics."""

    tensorboard: bool | Literal["auto"] = Field(
        default="auto",
        description="Write tensorboard/ beside metrics.jsonl; auto: if TensorBoard is installed "
        "(extra `tensorboard`).",
    )
    sinks: Annotated[tuple[SerializeAsAny[Section], ...], Slot("sink", is_list=True)] = Field(
        default=(), description="Experiment trackers that receive the metrics too."
    )
    progress: Literal["auto", "live", "plain", "off"] = Field(
        default="auto",
        description="Progress output; auto: live on a terminal, else plain lines.",
    )
    system: bool = Field(
        default=True, description="Measure CPU, memory, disk and accelerator use in each step."
    )
    trace: bool = Field(
        default=True,
        description="Write trace.json, a timeline of each step for the Perfetto viewer.",
    )
    stall_s: float | None = Field(
        default=600.0,
        gt=0,
        description="Seconds after which a stalled phase is reported in the log; null: never.",
    )
