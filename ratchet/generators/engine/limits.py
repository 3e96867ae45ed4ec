"""The limits of the embedded engine."""

from __future__ import annotations

from dataclasses import dataclass

import torch

GIB = 2**30  # bytes


@dataclass(frozen=True)
class SchedulerLimits:
    """The limits of a scheduler: running requests, KV cache, and tokens of a forward."""

    max_running: int  # maximum number of running requests, each of which has a slot
    kv_bytes: int  # maximum size of the KV cache, in bytes
    # Maximum number of prompt tokens of one forward. A longer prompt has a forward of its own.
    prefill_tokens: int
    row_multiple: int  # see `engine.batch_invariance`
    # Dtype of the layers' matrices and of the KV cache; None: that of the weights.
    dtype: torch.dtype | None = None
