"""Token sequences of one prefill, laid end to end, and the prompts of requests that enter together.

T = tokens of the sequences, P = sequences, N = requests, n = prompt tokens of all requests. Arrays
of NumPy are int64.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import compress

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ratchet.generators.engine.layout import concatenate_ranges
from ratchet.generators.request import GenerationRequest, PromptKey
from ratchet.utils.transfer import upload


@dataclass(frozen=True)
class TokenSequences:
    """Sequences whose keys and values are computed from their first token on."""

    tokens_T: Tensor  # int64, on the device
    lengths_P: NDArray[np.int64]
    adapters: Sequence[str | None]  # the adapter of each sequence
    slots_P: NDArray[np.int64]  # the slot of the KV cache that gets each sequence

    @property
    def positions_T(self) -> NDArray[np.int64]:
        return concatenate_ranges(self.lengths_P)

    @property
    def slots_T(self) -> NDArray[np.int64]:
        return np.repeat(self.slots_P, self.lengths_P)

    def select(self, mask_P: NDArray[np.bool_]) -> tuple[TokenSequences, Tensor]:
        """Return some of the sequences, and the mask [T] of their tokens."""
        mask_T = torch.from_numpy(np.repeat(mask_P, self.lengths_P))
        selected = TokenSequences(
            self.tokens_T[mask_T],
            self.lengths_P[mask_P],
            list(compress(self.adapters, mask_P)),
            self.slots_P[mask_P],
        )
        return selected, mask_T


@dataclass(frozen=True)
class PromptBatch:
    """The distinct prompts of requests, and the slots that the requests get.

    A prompt is computed in the slot of the first request that has it, and copied to the slots of
    the others.
    """

    prompts: TokenSequences  # requests with different adapters share no prompt
    prompt_N: NDArray[np.int64]  # the index of each request's prompt among the distinct ones
    slots_N: NDArray[np.int64]

    @classmethod
    def of(
        cls, requests: Sequence[GenerationRequest], first_slot: int, device: torch.device
    ) -> PromptBatch:
        """Return the prompts of requests that get the slots from `first_slot` on."""
        numbers: dict[tuple[str | None, PromptKey], int] = {}
        prompt_N = np.array([numbers.setdefault(r.key, len(numbers)) for r in requests])
        slots_N = np.arange(first_slot, first_slot + len(requests))
        prompts = [np.frombuffer(tokens, dtype=np.int64) for _, (tokens, _) in numbers]
        sequences = TokenSequences(
            upload(torch.from_numpy(np.concatenate(prompts)), device),
            np.array([len(prompt) for prompt in prompts]),
            [adapter for adapter, _ in numbers],
            slots_N[np.unique(prompt_N, return_index=True)[1]],
        )
        return cls(sequences, prompt_N, slots_N)

    @cached_property
    def lengths_N(self) -> NDArray[np.int64]:
        """The length of each request's prompt."""
        return self.prompts.lengths_P[self.prompt_N]

    @cached_property
    def last_N(self) -> NDArray[np.int64]:
        """The index of each request's last prompt token among the T tokens."""
        return (np.cumsum(self.prompts.lengths_P) - 1)[self.prompt_N]

    def locate_tokens(self) -> tuple[NDArray[np.int64], ...]:
        """Return (index among the T tokens, slot, position) of all requests' prompt tokens, [n]."""
        lengths_N = self.lengths_N
        positions = concatenate_ranges(lengths_N)
        sources = np.repeat(self.last_N + 1 - lengths_N, lengths_N) + positions
        return sources, np.repeat(self.slots_N, lengths_N), positions

    def list_copies(self) -> tuple[NDArray[np.int64], NDArray[np.int64], int]:
        """Return the slots to copy from, those to copy to, and how many tokens at most."""
        computed_N = self.prompts.slots_P[self.prompt_N]
        is_copy = computed_N != self.slots_N
        longest = int(self.lengths_N[is_copy].max(initial=0))
        return computed_N[is_copy], self.slots_N[is_copy], longest
