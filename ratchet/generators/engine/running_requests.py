"""The state of the engine's running requests, in arrays.

Settings and lengths are on the host, tokens are on the device. Running requests fill the slots
0 .. n-1, in any order. Each gets one token per step, so the host knows every length without a
transfer. The host needs a step's tokens only if a stop id or a stop string may end a request.

R = slots, C = capacity in tokens, N = slots of a range (in steps that are captured: also the free
slots after it that pad the step), S = stop ids, F = filtered rows of a chunk,
L = sparse layers, K = experts per token.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ratchet.generators.engine.sampler import (
    SETTING_DTYPE,
    LogitsChunk,
    SampledTokens,
    make_chunks,
    make_setting_row,
)
from ratchet.generators.grammar_masks import GrammarMatcher
from ratchet.generators.request import GenerationRequest
from ratchet.models.layers.expert_routing import UNKNOWN
from ratchet.utils.transfer import fetch_together, upload

NO_STOP = -1


@dataclass(frozen=True)
class ActiveSlots:
    """A range of slots uploaded for decoding; valid until requests enter or leave.

    `input_tokens` and `positions` end with padding rows, up to the multiple at which matrix
    products are batch-invariant.
    """

    first_slot: int
    n_slots: int
    input_tokens: Tensor  # the last token of each slot, which the model reads next
    positions: Tensor  # position of that token
    prompt_lengths_N: Tensor  # length of each prompt in tokens
    offset_N: Tensor  # index of the slot's first token in the flat [R * C] histories
    has_stop_ids: bool  # True if a request has stop ids
    chunks: tuple[LogitsChunk, ...]
    adapters: list[str | None] | None  # the adapter of each request; None: no request has one
    records_routes: bool  # True if a request records routes
    watched_slots: list[int]  # slots of requests with stop strings
    grammars: list[GrammarMatcher | None] | None  # by request; None: no request has a grammar

    @property
    def n_sampled(self) -> int:
        """The number of rows that get a token: N."""
        return len(self.offset_N)

    @property
    def token_index_N(self) -> Tensor:
        """Return the index that each slot's next token has in its completion."""
        return self.positions[: self.n_sampled] + 1 - self.prompt_lengths_N

    @property
    def kind(self) -> Hashable:
        """The shapes and branches of a step; steps of one kind run the same kernels."""
        chunks = tuple(
            (chunk.settings.greedy_N is None, chunk.settings.filters is None)
            for chunk in self.chunks
        )
        return len(self.input_tokens), self.n_sampled, self.records_routes, chunks

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors that a step reads, in an order that depends only on its kind."""
        return [
            self.input_tokens,
            self.positions,
            self.prompt_lengths_N,
            self.offset_N,
            *(tensor for chunk in self.chunks for tensor in chunk.settings.tensors),
        ]


class RequestSlots:
    """The state of all running requests, a row per slot.

    routes_shape: shape of a token's expert choices, (sparse layers, experts per token); (0, 0): the
        model has no experts.
    """

    def __init__(
        self,
        *,
        vocab_size: int,
        row_multiple: int,
        device: torch.device,
        routes_shape: tuple[int, int] = (0, 0),
    ) -> None:
        self.vocab_size = vocab_size
        self.row_multiple = row_multiple
        self.device = device
        self.routes_shape = routes_shape
        self.clear()

    def clear(self) -> None:
        """Drop all slots and their memory."""
        self.n_slots = self.capacity = 0
        self.settings = np.zeros(0, dtype=SETTING_DTYPE)
        self.prompt_lengths = np.zeros(0, dtype=np.int64)  # length of the prompt
        self.lengths = np.zeros(0, dtype=np.int64)  # prompt and completion so far
        self.limits = np.zeros(0, dtype=np.int64)  # length at which the request ends
        self.stop_ids = np.zeros((0, 0), dtype=np.int64)
        self.tokens_RC = torch.zeros(0, 0, dtype=torch.int64, device=self.device)
        self.logprobs_RC = torch.zeros(0, 0, device=self.device)
        self.log_kept_RC = torch.zeros(0, 0, device=self.device)
        self.routes_RCLK = torch.zeros(
            0, 0, *self.routes_shape, dtype=torch.int16, device=self.device
        )

    def reserve(self, n_slots: int, capacity: int) -> None:
        """Grow the arrays to exactly this size and keep their values."""
        if (n_slots, capacity) == (self.n_slots, self.capacity):
            return
        for name in ("settings", "prompt_lengths", "lengths", "limits", "stop_ids"):
            setattr(self, name, _grow(getattr(self, name), n_slots))
        for name in ("tokens_RC", "logprobs_RC", "log_kept_RC", "routes_RCLK"):
            old_array = getattr(self, name)
            new_array = torch.zeros(
                n_slots, capacity, *old_array.shape[2:], dtype=old_array.dtype, device=self.device
            )
            new_array[: self.n_slots, : self.capacity] = old_array
            setattr(self, name, new_array)
        self.n_slots, self.capacity = n_slots, capacity

    def enter(self, requests: Sequence[GenerationRequest], first_slot: int) -> None:
        """Write settings, lengths and stop ids of new requests to the slots from `first_slot` on.

        `store` writes the tokens of their prompts.
        """
        rows = slice(first_slot, first_slot + len(requests))
        self.settings[rows] = np.array(
            [make_setting_row(request.sampling, self.vocab_size) for request in requests],
            dtype=SETTING_DTYPE,
        )
        self.prompt_lengths[rows] = self.lengths[rows] = [
            len(request.prompt) for request in requests
        ]
        self.limits[rows] = [request.limit for request in requests]
        width = max(len(request.sampling.stop_ids) for request in requests)
        if width > self.stop_ids.shape[1]:
            self.stop_ids = np.pad(
                self.stop_ids,
                ((0, 0), (0, width - self.stop_ids.shape[1])),
                constant_values=NO_STOP,
            )
        self.stop_ids[rows] = NO_STOP
        for row, request in enumerate(requests, first_slot):
            self.stop_ids[row, : len(request.sampling.stop_ids)] = request.sampling.stop_ids

    def store(self, rows_n: Tensor, positions_n: Tensor, tokens_n: Tensor) -> None:
        """Write tokens at (row, position) pairs."""
        self.tokens_RC.view(-1).index_copy_(0, rows_n * self.capacity + positions_n, tokens_n)

    def move(self, sources: list[int], targets: list[int], length: int) -> None:
        """Copy source slots over target slots. length: the longest source's number of tokens."""
        for table in (
            self.settings,
            self.prompt_lengths,
            self.lengths,
            self.limits,
            self.stop_ids,
        ):
            table[targets] = table[sources]
        source, target = (upload(torch.tensor(rows), self.device) for rows in (sources, targets))
        for history in (self.tokens_RC, self.logprobs_RC, self.log_kept_RC, self.routes_RCLK):
            used_part = history[:, :length]
            used_part.index_copy_(0, target, used_part.index_select(0, source))

    def read_completions(
        self, slots: list[int]
    ) -> list[tuple[NDArray[np.int64], NDArray[np.float32], NDArray[np.float32] | None]]:
        """Return (tokens, logprobs, log of the kept mass) of each slot's completion.

        The log of the kept mass is None for a slot without filters.
        """
        slots_n = upload(torch.tensor(slots), self.device)
        longest = int(self.lengths[slots].max())
        histories = [
            self.tokens_RC,
            self.logprobs_RC,
            *([self.log_kept_RC] if self.settings["filtered"][slots].any() else []),
        ]
        tokens, logprobs, *log_kept_if_filtered = (
            rows.numpy()
            for rows in fetch_together(
                [history[:, :longest].index_select(0, slots_n) for history in histories]
            )
        )
        results = []
        for i, slot in enumerate(slots):
            completion = slice(self.prompt_lengths[slot], self.lengths[slot])
            log_kept = None
            if self.settings["filtered"][slot]:
                log_kept = log_kept_if_filtered[0][i, completion].copy()
            results.append((tokens[i, completion].copy(), logprobs[i, completion].copy(), log_kept))
        return results

    def find_nonfinite(self, slots: list[int]) -> list[int]:
        """Return the slots among `slots` whose newest logprob isn't finite."""
        newest = self.lengths[slots] - 1
        # NumPy indexes in a tenth of PyTorch's time.
        if self.device.type == "cpu":
            logprobs = self.logprobs_RC.numpy()[slots, newest]
        else:
            logprobs = (
                self.logprobs_RC[upload(torch.tensor(slots), self.device), self._upload(newest)]
                .cpu()
                .numpy()
            )
        is_finite_slot = np.isfinite(logprobs)
        if is_finite_slot.all():
            return []
        return [
            slot for slot, is_finite in zip(slots, is_finite_slot, strict=True) if not is_finite
        ]

    def read_routes(self, slot: int) -> NDArray[np.int16]:
        """Return the expert choices of prompt and completion [tokens, L, K]; UNKNOWN for the last.

        The last token was sampled but has not yet been an input of the model.
        """
        routes = self.routes_RCLK[slot, : self.lengths[slot]].cpu().numpy().copy()
        routes[-1] = UNKNOWN
        return routes

    def upload_active(
        self, requests: Sequence[GenerationRequest], first_slot: int = 0, n_rows: int = 0
    ) -> ActiveSlots:
        """Upload the state of the requests in the slots from `first_slot` on, for a step.

        n_rows: Number of slots that get a token, if more than the requests: the free slots after
            them are padding, which starts at position 0.
        """
        end = first_slot + len(requests)
        n_sampled = max(n_rows, len(requests))
        padding = -n_sampled % self.row_multiple
        free = (0, n_sampled - len(requests))
        slot_indices = torch.arange(first_slot, first_slot + n_sampled, device=self.device)
        positions_N = self._upload(np.pad(self.lengths[first_slot:end] - 1, free))
        prompt_lengths = np.pad(self.prompt_lengths[first_slot:end], free)
        tokens_N = self.tokens_RC[slot_indices, positions_N]
        adapters = [request.sampling.adapter for request in requests]
        grammars = [request.grammar for request in requests]
        settings = np.pad(self.settings[first_slot:end], free, mode="edge")
        return ActiveSlots(
            first_slot=first_slot,
            n_slots=len(requests),
            input_tokens=torch.cat([tokens_N, tokens_N.new_zeros(padding)]),
            positions=torch.cat([positions_N, positions_N.new_zeros(padding)]),
            prompt_lengths_N=self._upload(prompt_lengths),
            offset_N=slot_indices * self.capacity,
            has_stop_ids=bool((self.stop_ids[first_slot:end] != NO_STOP).any()),
            chunks=make_chunks(
                settings,
                self.vocab_size,
                self.row_multiple,
                self.device,
                pads_filters=n_rows > 0,
            ),
            adapters=None if adapters.count(None) == len(adapters) else adapters,
            records_routes=any(request.sampling.routes for request in requests),
            watched_slots=[
                slot
                for slot, request in enumerate(requests, first_slot)
                if request.stop_strings is not None
            ],
            grammars=None if grammars.count(None) == len(grammars) else grammars,
        )

    def _upload(self, array: NDArray[np.int64]) -> Tensor:
        return upload(torch.from_numpy(array.copy()), self.device)

    def record(self, active: ActiveSlots, draws: Sequence[SampledTokens]) -> Tensor:
        """Append the sampled tokens to the slots of the range and return them, int64 [N].

        Only tensors on the device change; `advance` counts the tokens.
        """
        n_sampled = active.n_sampled
        index_N = active.offset_N + active.positions[:n_sampled] + 1
        tokens_N = torch.cat([draw.tokens_N for draw in draws])
        self.tokens_RC.view(-1).index_copy_(0, index_N, tokens_N)
        self.logprobs_RC.view(-1).index_copy_(
            0, index_N, torch.cat([draw.logprobs_N for draw in draws])
        )
        for chunk, sampled in zip(active.chunks, draws, strict=True):
            filters = chunk.settings.filters
            if filters is not None and sampled.log_kept_F is not None:
                kept_F = sampled.log_kept_F.to(torch.float32)
                self.log_kept_RC.view(-1).index_copy_(
                    0, index_N[chunk.rows][filters.rows_F], kept_F
                )
        active.input_tokens[:n_sampled] = tokens_N
        active.positions[:n_sampled] += 1
        return tokens_N

    def advance(self, active: ActiveSlots) -> None:
        """Count a further token of each slot of the range."""
        self.lengths[active.first_slot : active.first_slot + active.n_slots] += 1


def _grow(table: NDArray, rows: int) -> NDArray:
    larger = np.zeros((rows, *table.shape[1:]), dtype=table.dtype)
    larger[: len(table)] = table
    return larger
