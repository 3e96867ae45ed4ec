"""Compute the decoder's hidden states of whole prompts (prefill) and of one new token (decode).

T = prompt tokens of a forward, N = requests, d = hidden size.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from ratchet.generators.engine.attention import DecodeAttention, PrefillAttention
from ratchet.generators.engine.cast_weights import CastDecoder
from ratchet.generators.engine.compiled_decode import MAX_PROMPT, CompiledDecoder, Layers
from ratchet.generators.engine.kv_cache import KVCache
from ratchet.generators.engine.layout import concatenate_ranges, round_up_to, split_spans
from ratchet.generators.engine.limits import SchedulerLimits
from ratchet.generators.engine.multi_lora import MultiLoRA
from ratchet.generators.engine.prompt_batch import PromptBatch, TokenSequences
from ratchet.generators.engine.running_requests import ActiveSlots, RequestSlots
from ratchet.generators.engine.step_graphs import LEAST_ROWS, round_up_to_bucket
from ratchet.generators.request import GenerationRequest
from ratchet.kernels import bfloat16
from ratchet.models.decoder import AttentionFn, Decoder
from ratchet.models.layers.expert_routing import RouteRecorder
from ratchet.models.layers.moe import Experts, can_group
from ratchet.utils.transfer import upload


class ModelRunner:
    """The decoder with the device memory of its requests: KV cache and token histories.

    Its methods take requests in the order of their slots and return hidden states. They read the
    decoder's parameters at every call, or at `renew_weights` if the limits have a dtype.

    Attributes:
        max_length: maximum number of tokens of a single request that fills the whole cache.
        prefilled_tokens, decoded_tokens: the model's input tokens so far, without padding.
    """

    def __init__(self, decoder: Decoder, limits: SchedulerLimits) -> None:
        weight = decoder.head_weight
        self.decoder = decoder
        self.cast = None if limits.dtype is None else CastDecoder(decoder, limits.dtype)
        self.limits = limits
        self.device = weight.device
        max_rounded_slots = round_up_to(limits.max_running, limits.row_multiple)
        self.cache = KVCache(
            decoder.config,
            max_rounded_slots=max_rounded_slots,
            dtype=limits.dtype or weight.dtype,
            device=weight.device,
        )
        routes_shape = len(decoder.config.sparse_layers), decoder.config.experts_per_token
        self.slots = RequestSlots(
            vocab_size=decoder.config.vocab_size,
            row_multiple=limits.row_multiple,
            device=weight.device,
            routes_shape=routes_shape,
        )
        self.adapters = MultiLoRA(decoder, limits.row_multiple)
        self.compiled = CompiledDecoder(decoder)
        self.set_limits(limits)
        self.prefilled_tokens = self.decoded_tokens = 0
        self._addresses: tuple[int, ...] = ()
        self.active: ActiveSlots | None = None  # all running requests; None when they have changed

    # --- memory

    def set_limits(self, limits: SchedulerLimits) -> None:
        """Use limits that differ from the present ones in `kv_bytes` only."""
        self.limits = limits
        length = self.cache.stride if self.fits_cache(1, self.cache.stride) else 0
        while 0 < length < self.decoder.config.max_positions and self.fits_cache(1, 2 * length):
            length *= 2
        self.max_length = length

    def fits_cache(self, n_slots: int, length: int) -> bool:
        """True if the cache may grow to so many slots of so many tokens."""
        return (
            self.cache.get_bytes(round_up_to(n_slots, self.limits.row_multiple), length)
            <= self.limits.kv_bytes
        )

    def clear(self) -> None:
        """Drop all slots and their memory."""
        self.cache.clear()
        self.slots.clear()
        self.active = None

    def renew_weights(self) -> None:
        """Read the decoder's current weights, and note where they are."""
        bfloat16.forget_weights()
        if self.cast is not None:
            self.cast.renew()
        if self.device.type != "cpu":
            decoder = self.decoder if self.cast is None else self.cast.decoder
            self._addresses = tuple(
                tensor.data_ptr() for tensor in (*decoder.parameters(), *decoder.buffers())
            )

    @property
    def can_capture(self) -> bool:
        """True if a decoding step on CUDA reads nothing back, so that a graph can replay it."""
        if self.device.type != "cuda":
            return False
        experts = [layer for layer in self.decoder.modules() if isinstance(layer, Experts)]
        # The number of padding rows of experts is known only on the device.
        return not experts or (
            self.cache.dtype is torch.bfloat16
            and self.limits.row_multiple == 1
            and all(can_group(matrix) for layer in experts for matrix in layer.parameters())
        )

    @property
    def memory(self) -> Hashable:
        """A value that is new whenever weights, KV cache or histories have new addresses."""
        return self._addresses, self.cache.generation

    def reserve(self, n_slots: int, length: int) -> bool:
        """Make room in the cache and the slots. Returns True if they had to grow."""
        previous_size = self.cache.n_slots, self.cache.capacity
        self.cache.reserve(round_up_to(n_slots, self.limits.row_multiple), length)
        self.slots.reserve(self.cache.n_slots, self.cache.capacity)
        return previous_size != (self.cache.n_slots, self.cache.capacity)

    @torch.inference_mode()
    def free(self, slots: list[int], moved: list[int], gaps: list[int]) -> None:
        """Free slots, and move the slots `moved` to `gaps`, which are freed slots.

        Keys and values that aren't finite are erased. Otherwise the next request in the slot would
        read them with weight 0, and 0 * NaN is NaN.
        """
        self.active = None
        broken = self.slots.find_nonfinite([*slots, *moved])
        self.cache.erase([slot for slot in slots if slot in broken])
        if moved:
            length = int(self.slots.lengths[moved].max())
            self.slots.move(moved, gaps, length)
            sources, targets = (upload(torch.tensor(part), self.device) for part in (moved, gaps))
            self.cache.copy_slots(sources, targets, length)
            self.cache.erase([slot for slot in moved if slot in broken])

    # --- prefill

    def prefill(self, requests: Sequence[GenerationRequest], first_slot: int) -> Tensor:
        """Return hidden states of the last prompt tokens: [N, d], followed by padding rows.

        The requests get the slots from `first_slot` on, which `reserve` has made. Each distinct
        prompt is computed once, in the slot of the first request that has it.
        """
        batch = PromptBatch.of(requests, first_slot, self.device)
        self._enter(requests, batch)
        recorder = None
        if any(request.sampling.routes for request in requests):
            recorder = self._make_recorder(len(batch.prompts.tokens_T))
        hidden_Td = self._compute_sequences(batch.prompts, recorder)
        self._copy_prompts(batch)
        if recorder is not None:
            sources, *targets = map(self._upload, batch.locate_tokens())
            self.slots.routes_RCLK.index_put_(tuple(targets), recorder.experts_TLK[sources])
        return self._select_rows(hidden_Td, batch.last_N)

    def prefill_and_decode(
        self, requests: Sequence[GenerationRequest], running: Sequence[GenerationRequest]
    ) -> tuple[ActiveSlots, Tensor] | None:
        """Compute the prompts of entering requests and the next token of running ones in one call.

        Returns the slots of all these requests, and hidden states of their last tokens, the running
        ones first: [N, d], followed by padding rows. `reserve` has made room. Returns None, and
        changes nothing, if the compiled kernel can't compute all of them.
        """
        is_short = all(len(request.prompt) <= MAX_PROMPT for request in requests)
        if not is_short or self.adapters.names or (layers := self._get_layers()) is None:
            return None
        n_running = len(running)
        batch = PromptBatch.of(requests, n_running, self.device)
        self._enter(requests, batch)
        prompts = batch.prompts
        self.active = active = self.slots.upload_active([*running, *requests])
        self.prefilled_tokens += len(prompts.tokens_T)
        self.decoded_tokens += n_running
        hidden_Td = self.compiled(
            layers,
            torch.cat([active.input_tokens[:n_running], prompts.tokens_T]),
            torch.cat([active.positions[:n_running], torch.from_numpy(prompts.positions_T)]),
            torch.from_numpy(np.concatenate([np.arange(n_running), prompts.slots_T])),
            self.cache,
            [1] * n_running + prompts.lengths_P.tolist(),
        )
        self._copy_prompts(batch)
        rows = np.concatenate([np.arange(n_running), n_running + batch.last_N])
        return active, self._select_rows(hidden_Td, rows)

    def _enter(self, requests: Sequence[GenerationRequest], batch: PromptBatch) -> None:
        """Write the requests and the tokens of their prompts to their slots."""
        self.active = None
        self.slots.enter(requests, int(batch.slots_N[0]))
        sources, slots, positions = map(self._upload, batch.locate_tokens())
        self.slots.store(slots, positions, batch.prompts.tokens_T[sources])

    def _copy_prompts(self, batch: PromptBatch) -> None:
        """Copy computed prompts to the slots of the other requests that have them."""
        sources, targets, length = batch.list_copies()
        if length:
            self.cache.copy_slots(self._upload(sources), self._upload(targets), length)

    def _select_rows(self, hidden_Td: Tensor, rows: NDArray[np.int64]) -> Tensor:
        """Return these rows, followed by padding rows."""
        padded = np.pad(rows, (0, -len(rows) % self.limits.row_multiple), mode="edge")
        return hidden_Td.index_select(0, self._upload(padded))

    def _get_layers(self) -> Layers | None:
        """Return the weights for the compiled kernel; None if it can't compute with them."""
        return self.compiled.layers() if self.cast is None else None

    def recompute_cache(self, requests: Sequence[GenerationRequest]) -> None:
        """Recompute the keys and values of all running requests with the new weights.

        Each request's last token is excluded, because it is the input of the next step. Recorded
        routes stay, because the tokens so far were drawn with them.
        """
        lengths = self.slots.lengths[: len(requests)] - 1
        for span in split_spans(lengths, self.limits.prefill_tokens):
            slots_P = np.arange(span.start, span.stop)
            slots = self._upload(np.repeat(slots_P, lengths[span]))
            positions = self._upload(concatenate_ranges(lengths[span]))
            adapters = [request.sampling.adapter for request in requests[span]]
            tokens_T = self.slots.tokens_RC[slots, positions]
            self._compute_sequences(TokenSequences(tokens_T, lengths[span], adapters, slots_P))

    def _compute_sequences(
        self, sequences: TokenSequences, recorder: RouteRecorder | None = None
    ) -> Tensor:
        """Return hidden states of sequences: [T, d], which padding rows may follow.

        If the compiled kernel is available, it computes every short sequence without an adapter,
        whatever the others are: a request's bits must not depend on its neighbours.

        recorder: records the experts of each token; None records none. The kernel has no experts.
        """
        self.prefilled_tokens += len(sequences.tokens_T)
        if (layers := self._get_layers()) is None:
            return self._prefill_with_torch(sequences, recorder)
        is_plain_P = np.array([adapter is None for adapter in sequences.adapters])
        kernel_P = is_plain_P & (sequences.lengths_P <= MAX_PROMPT)
        hidden_Td = torch.empty(len(sequences.tokens_T), self.decoder.config.hidden_size)
        if kernel_P.any():
            part, mask_T = sequences.select(kernel_P)
            positions_T, slots_T = map(torch.from_numpy, (part.positions_T, part.slots_T))
            lengths = part.lengths_P.tolist()
            hidden_Td[mask_T] = self.compiled(
                layers, part.tokens_T, positions_T, slots_T, self.cache, lengths
            )
        if not kernel_P.all():
            part, mask_T = sequences.select(~kernel_P)
            hidden_Td[mask_T] = self._prefill_with_torch(part)[: len(part.tokens_T)]
        return hidden_Td

    def _prefill_with_torch(
        self, sequences: TokenSequences, recorder: RouteRecorder | None = None
    ) -> Tensor:
        """Return hidden states like `_compute_sequences`, without the compiled kernel."""
        lengths_P, adapters = sequences.lengths_P, sequences.adapters
        positions_T = self._upload(sequences.positions_T)
        attend = PrefillAttention(
            self.cache, lengths_P, self._upload(sequences.slots_T), positions_T
        )
        decoder = None
        if any(adapter is not None for adapter in adapters):
            adapters_T = np.repeat(np.array(adapters, dtype=object), lengths_P).tolist()
            decoder = self.adapters.select_decoder(adapters_T)
        padding = (0, -len(sequences.tokens_T) % self.limits.row_multiple)
        tokens_T, positions_T = F.pad(sequences.tokens_T, padding), F.pad(positions_T, padding)
        return self._run(decoder, tokens_T, positions_T, attend, recorder)

    def _run(
        self,
        decoder: Decoder | None,
        tokens_T: Tensor,
        positions_T: Tensor,
        attend: AttentionFn,
        recorder: RouteRecorder | None,
    ) -> Tensor:
        """Return the decoder's hidden states, [T, d], computed as the learner's autocast would.

        decoder: with the adapters of requests; None: no request has one.
        """
        multiple = self.limits.row_multiple
        if decoder is None:
            decoder = self.decoder if self.cast is None else self.cast.decoder
        with torch.autocast(self.device.type, self.limits.dtype, enabled=self.cast is not None):
            return decoder(tokens_T, positions_T, attend, row_multiple=multiple, route=recorder)

    # --- decode

    def begin_decode(self, requests: Sequence[GenerationRequest]) -> tuple[ActiveSlots, int]:
        """Return the running requests' slots, and the length of the longest request.

        There is room for a further token of each. If steps can be captured, the slots are padded
        to the rows of a captured step.

        requests: all running requests, by slot.
        """
        count = len(requests)
        longest = int(self.slots.lengths[:count].max())
        if self.reserve(count, longest + 1) or self.active is None:
            n_rows = 0
            if self.can_capture:
                multiple = self.limits.row_multiple
                room = self.cache.n_slots // multiple * multiple
                n_rows = min(round_up_to_bucket(count, LEAST_ROWS), room)
            self.active = self.slots.upload_active(requests, n_rows=n_rows)
        self.decoded_tokens += count
        return self.active, longest

    def compute_next(self, active: ActiveSlots, longest: int) -> Tensor:
        """Return hidden states of the requests' last tokens: [N, d], followed by padding rows.

        If the compiled step is available, it always computes the requests without an adapter,
        even if other running requests have one: a request's bits must not depend on its neighbours.
        """
        if (layers := self._get_layers()) is None:
            return self._decode_with_torch(active, longest)
        count = active.n_slots
        slots = torch.arange(count)
        if active.adapters is None:
            hidden = self.compiled(
                layers, active.input_tokens[:count], active.positions[:count], slots, self.cache
            )
            padding = len(active.input_tokens) - count
            return F.pad(hidden, (0, 0, 0, padding)) if padding else hidden
        hidden = self._decode_with_torch(active, longest)
        slots = slots[[adapter is None for adapter in active.adapters]]
        if len(slots):
            tokens = active.input_tokens[slots]
            positions = active.positions[slots]
            hidden[slots] = self.compiled(layers, tokens, positions, slots, self.cache)
        return hidden

    def _decode_with_torch(self, active: ActiveSlots, longest: int) -> Tensor:
        """Return hidden states like `_compute_next`, without the compiled step."""
        attend = DecodeAttention(self.cache, active.positions, longest)
        tokens = active.input_tokens
        positions = active.positions
        count = active.n_sampled
        recorder = self._make_recorder(len(tokens)) if active.records_routes else None
        decoder = None
        if active.adapters is not None:
            decoder = self.adapters.select_decoder(active.adapters)
        hidden = self._run(decoder, tokens, positions, attend, recorder)
        if recorder is not None:
            targets = attend.slots_N[:count], positions[:count]
            self.slots.routes_RCLK.index_put_(targets, recorder.experts_TLK[:count])
        return hidden

    def _make_recorder(self, n_tokens: int) -> RouteRecorder:
        """Return a recorder of routes for a forward of `n_tokens` rows and padding."""
        rows = round_up_to(n_tokens, self.limits.row_multiple)
        return RouteRecorder(self.decoder.config, rows, self.device)

    def _upload(self, array: NDArray[np.int64]) -> Tensor:
        return upload(torch.from_numpy(array), self.device)
