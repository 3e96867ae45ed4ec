"""The limits of the embedded engine."""

from __future__ import annotations

from dataclasses import dataclass

GIB = 2**30  # bytes


@dataclass(frozen=True)
class SchedulerLimits:
    """The limits of a scheduler: running requests, KV cache, and tokens of a forward."""

    max_running: int  # requests with a slot
    kv_bytes: int  # size of the KV cache
    prefill_tokens: int  # tokens of one forward, unless a single prompt is longer
    row_multiple: int  # see `engine.batch_invariance`
