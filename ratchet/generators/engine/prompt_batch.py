"""The prompts of requests that enter together, laid end to end, each distinct one once.

T = tokens of the distinct prompts, P = distinct prompts, N = requests, n = prompt tokens of all
requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ratchet.generators.engine.layout import concatenate_ranges
from ratchet.generators.request import GenerationRequest, PromptKey


@dataclass(frozen=True)
class PromptBatch:
    """The distinct prompts of requests, and the slots that the requests get.

    All arrays are int64. A prompt is computed in the slot of the first request that has it, and
    copied to the slots of the others.
    """

    tokens_T: NDArray[np.int64]
    lengths_P: NDArray[np.int64]
    adapters: list[str | None]
    """The adapter of each distinct prompt. Requests with different adapters share no prompt."""
    prompt_N: NDArray[np.int64]
    """The index of each request's prompt among the distinct ones."""
    slots_N: NDArray[np.int64]

    @classmethod
    def of(cls, requests: Sequence[GenerationRequest], first_slot: int) -> PromptBatch:
        """Return the prompts of requests that get the slots from `first_slot` on."""
        numbers: dict[tuple[str | None, PromptKey], int] = {}
        prompt_N = np.array([numbers.setdefault(r.key, len(numbers)) for r in requests])
        prompts = [np.frombuffer(tokens, dtype=np.int64) for _, (tokens, _) in numbers]
        return cls(
            np.concatenate(prompts),
            np.array([len(prompt) for prompt in prompts]),
            [adapter for adapter, _ in numbers],
            prompt_N,
            np.arange(first_slot, first_slot + len(requests)),
        )

    @property
    def slots_P(self) -> NDArray[np.int64]:
        """Return the slot in which each distinct prompt is computed."""
        return self.slots_N[np.unique(self.prompt_N, return_index=True)[1]]

    @property
    def last_N(self) -> NDArray[np.int64]:
        """Return the index of each request's last prompt token among the T tokens."""
        return (np.cumsum(self.lengths_P) - 1)[self.prompt_N]

    def locate_tokens(self) -> tuple[NDArray[np.int64], ...]:
        """Return (index among the T tokens, slot, position) of all requests' prompt tokens, [n]."""
        lengths_N = self.lengths_P[self.prompt_N]
        positions = concatenate_ranges(lengths_N)
        sources = np.repeat(self.last_N + 1 - lengths_N, lengths_N) + positions
        return sources, np.repeat(self.slots_N, lengths_N), positions

    def list_copies(self) -> tuple[NDArray[np.int64], NDArray[np.int64], int]:
        """Return the slots to copy from, those to copy to, and how many tokens at most."""
        computed_N = self.slots_P[self.prompt_N]
        is_copy = computed_N != self.slots_N
        longest = int(self.lengths_P[self.prompt_N][is_copy].max(initial=0))
        return computed_N[is_copy], self.slots_N[is_copy], longest
