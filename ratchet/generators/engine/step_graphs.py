"""Decoding steps that a CUDA device replays without Python: CUDA graphs.

A step of a model of 28 layers launches more than 600 kernels, which takes the host longer than the
device needs to run them. A graph launches them in one call. It has fixed shapes and addresses, so
there is one for each number of rows, attended length and kind of sampling; rows and lengths are
rounded up, which pads a step by at most an eighth.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ratchet.generators.engine.layout import round_up_to
from ratchet.generators.engine.running_requests import ActiveSlots

LEAST_ROWS = 8
LEAST_LENGTH = 64  # tokens
MAX_GRAPHS = 256  # a graph of 600 kernels holds some MiB

# Computes one token of each active slot for an attended length, and returns the tokens, int64.
# It writes only tensors on the device.
ComputeStep = Callable[[ActiveSlots, int], Tensor]


def round_up_to_bucket(n: int, least: int) -> int:
    """Return n rounded up to a multiple of `least` and of an eighth of the next power of two."""
    return round_up_to(n, max(least, (1 << (n - 1).bit_length()) // 8))


@dataclass(frozen=True)
class StepGraph:
    """A captured step and the memory to which each replay writes its tokens."""

    graph: torch.cuda.CUDAGraph
    tokens_N: Tensor


class StepGraphs:
    """The captured decoding steps of an engine.

    The first step of its shape runs uncaptured, which also loads its kernels; the second is
    captured, and further ones replay it.

    Attributes:
        replays: Number of steps that were replayed.
    """

    def __init__(self, compute: ComputeStep, device: torch.device) -> None:
        self.compute = compute
        self.device = device
        self.replays = 0
        self._memory: Hashable = None
        self._stream: torch.cuda.Stream | None = None
        self._pool: Any = None
        self._clear()

    def _clear(self) -> None:
        # Slots by kind of step, in the memory that graphs read.
        self._slots: dict[Hashable, ActiveSlots] = {}
        self._graphs: dict[Hashable, StepGraph | None] = {}

    def load(self, active: ActiveSlots, memory: Hashable) -> ActiveSlots:
        """Return the slots in the memory that graphs read.

        memory: Differs from the last one if weights, KV cache or histories have new addresses.
        """
        if memory != self._memory or len(self._graphs) > MAX_GRAPHS:
            self._memory = memory
            self._clear()
        fixed = self._slots.setdefault(active.kind, active)
        if fixed.input_tokens is active.input_tokens:
            return active
        for target, source in zip(fixed.tensors, active.tensors, strict=True):
            target.copy_(source)
        return replace(
            active,
            input_tokens=fixed.input_tokens,
            positions=fixed.positions,
            prompt_lengths_N=fixed.prompt_lengths_N,
            offset_N=fixed.offset_N,
            chunks=fixed.chunks,
        )

    def __call__(self, active: ActiveSlots, length: int) -> Tensor:
        """Compute one token of each slot, and return the tokens. The next call overwrites them.

        Args:
            active: The result of `load`.
            length: Attended length.
        """
        key = active.kind, length
        if key not in self._graphs:
            self._graphs[key] = None
            return self.compute(active, length)
        step = self._graphs[key]
        if step is None:
            step = self._graphs[key] = self._capture(active, length)
        step.graph.replay()
        self.replays += 1
        return step.tokens_N

    def _capture(self, active: ActiveSlots, length: int) -> StepGraph:
        """Capture a step, which does not run it.

        Not by `torch.cuda.graph`: that empties the allocator's cache and collects garbage.
        """
        if self._stream is None:
            self._stream = torch.cuda.Stream(self.device)
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        current = torch.cuda.current_stream(self.device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            # Other threads may go on to use the device.
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                tokens_N = self.compute(active, length)
            finally:
                graph.capture_end()
        current.wait_stream(self._stream)
        return StepGraph(graph, tokens_N)
