"""Continuous batching: requests enter and leave between steps, and each running request has a slot.

T = prompt tokens of a forward, N = requests, d = hidden size, V = vocabulary.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Mapping, Sequence
from itertools import accumulate, islice

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from ratchet.errors import ConfigError, ModelError, RequestFailed
from ratchet.generators.engine.attention import DecodeAttention, PrefillAttention
from ratchet.generators.engine.compiled_decode import CompiledDecoder
from ratchet.generators.engine.kv_cache import KVCache
from ratchet.generators.engine.layout import concatenate_ranges, round_up_to, split_spans
from ratchet.generators.engine.limits import SchedulerLimits
from ratchet.generators.engine.multi_lora import MultiLoRA
from ratchet.generators.engine.running_requests import ActiveSlots, RequestSlots
from ratchet.generators.engine.sampling import draw_tokens, draw_uniforms
from ratchet.generators.faults import explain_nonfinite, find_first_nonfinite, make_request_error
from ratchet.generators.request import GenerationRequest, PromptKey
from ratchet.models.decoder import Decoder
from ratchet.models.layers.expert_routing import RouteRecorder
from ratchet.types import StopReason

GIB = 2**30
EndReasons = Mapping[int, StopReason | RequestFailed]  # by slot


class Scheduler:
    """An `EngineCore` for the built-in decoder. It reads the decoder's parameters at every step.

    `prefilled_tokens` and `decoded_tokens` count the model's input tokens so far, without padding.
    """

    def __init__(self, decoder: Decoder, limits: SchedulerLimits) -> None:
        weight = decoder.head_weight
        self.decoder = decoder
        self.limits = limits
        self.device = weight.device
        self.vocab_size = decoder.config.vocab_size
        max_rows = round_up_to(limits.max_running, limits.row_multiple)
        self.cache = KVCache(
            decoder.config, max_rows=max_rows, dtype=weight.dtype, device=weight.device
        )
        routes_shape = len(decoder.config.sparse_layers), decoder.config.experts_per_token
        self.slots = RequestSlots(
            vocab_size=self.vocab_size,
            row_multiple=limits.row_multiple,
            device=weight.device,
            routes_shape=routes_shape,
        )
        self.adapters = MultiLoRA(decoder, limits.row_multiple)
        self.compiled = CompiledDecoder(decoder)
        self.waiting: deque[GenerationRequest] = deque()
        self.running: list[GenerationRequest] = []  # by slot
        self.version = 0
        # Maximum tokens of a request that has the cache to itself.
        self.max_length = self.cache.stride if self._fits_cache(1, self.cache.stride) else 0
        while 0 < self.max_length < self.decoder.config.max_positions and self._fits_cache(
            1, 2 * self.max_length
        ):
            self.max_length *= 2
        self.prefilled_tokens = self.decoded_tokens = 0
        self._active: ActiveSlots | None = None  # all running requests; None when they have changed
        self._n_stop_strings = 0  # running requests with stop strings
        self._n_routed = 0  # running requests whose routes are recorded
        self._n_adapted = 0  # running requests that name an adapter
        self._is_cache_stale = False  # keys and values belong to older weights

    # --- requests enter and leave

    @property
    def busy(self) -> bool:
        return bool(self.waiting or self.running)

    def add(self, request: GenerationRequest) -> None:
        """Queue a request. Raises ConfigError if the cache could never hold it."""
        if request.limit > self.max_length:
            raise ConfigError(
                f"a request of up to {request.limit} tokens doesn't fit a KV cache of "
                f"{self.limits.kv_bytes / GIB:.3g} GiB, which holds {self.max_length}: raise "
                "generator.kv_cache_gib or lower sampling.max_new_tokens"
            )
        self.waiting.append(request)

    def cancel(self, request: GenerationRequest) -> None:
        if request in self.running:
            self._free_slots([self.running.index(request)])
        elif request in self.waiting:
            self.waiting.remove(request)

    def abort(self) -> None:
        try:
            self._finish(dict.fromkeys(range(len(self.running)), StopReason.ABORTED))
        except ModelError as error:
            for request in self.reset():
                request.fail(error)
        while self.waiting:
            request = self.waiting.popleft()
            request.deliver(request.without_tokens(StopReason.ABORTED))

    def reset(self) -> list[GenerationRequest]:
        requests = [*self.running, *self.waiting]
        self.running = []
        self.waiting = deque()
        self.cache.clear()
        self.slots.clear()
        self._active = None
        self._n_stop_strings = self._n_routed = self._n_adapted = 0
        self._is_cache_stale = False
        return requests

    def commit(self, version: int, *, keep_kv: bool) -> None:
        self.version = version
        self._is_cache_stale |= bool(self.running) and not keep_kv
        for slot, request in enumerate(self.running):
            generated = int(self.slots.lengths[slot] - self.slots.prompt_lengths[slot])
            request.version_starts.append((generated, version))

    # --- a step

    @torch.inference_mode()
    def step(self) -> None:
        """Admit waiting requests and compute one token for every running request.

        A request that can't be computed fails alone. Raises ModelError if the weights are broken.
        """
        if self._is_cache_stale:
            self._recompute_cache()
        while batch := self._get_admissible():
            self._start_batch(batch)
        if self.running:
            self._decode()

    def _get_admissible(self) -> list[GenerationRequest]:
        """Return the waiting requests that may enter now, in order.

        Free slots, cache memory and `prefill_tokens` limit their number.
        """
        if self.waiting and not self.running and not self._fits_cache(1, self.waiting[0].limit):
            # The cache still has the shape of earlier requests.
            self.cache.clear()
            self.slots.clear()
        n_tokens = 0
        batch: list[GenerationRequest] = []
        prompt_keys: set[tuple[str | None, PromptKey]] = set()
        for request in islice(self.waiting, self.limits.max_running - len(self.running)):
            if request.key not in prompt_keys:
                n_tokens += len(request.prompt)
                prompt_keys.add(request.key)
            if batch and n_tokens > self.limits.prefill_tokens:
                break
            batch.append(request)
        longest = int(self.slots.limits[: len(self.running)].max(initial=0))
        # Entry n: the longest of the running requests and the first n of the batch.
        longest_of_first = [*accumulate((r.limit for r in batch), max, initial=longest)]
        n_running, counts = len(self.running), range(1, len(batch) + 1)
        count = bisect_left(
            counts, True, key=lambda n: not self._fits_cache(n_running + n, longest_of_first[n])
        )
        return batch[:count]

    def _fits_cache(self, n_slots: int, length: int) -> bool:
        return (
            self.cache.get_bytes(round_up_to(n_slots, self.limits.row_multiple), length)
            <= self.limits.kv_bytes
        )

    def _reserve(self, n_slots: int, length: int) -> bool:
        """Make room in the cache and the slots. Returns True if they had to grow."""
        previous_size = self.cache.n_slots, self.cache.capacity
        self.cache.reserve(n_slots, length)
        self.slots.reserve(self.cache.n_slots, self.cache.capacity)
        return previous_size != (self.cache.n_slots, self.cache.capacity)

    def _start_batch(self, batch: list[GenerationRequest]) -> None:
        """Start the first waiting requests.

        If computing them together raises, each is computed alone, and only requests that raise
        again fail. Their error is RequestFailed if the model can compute other requests.
        """
        longest = max(len(request.prompt) for request in batch)
        self._reserve(
            round_up_to(len(self.running) + len(batch), self.limits.row_multiple), longest + 1
        )
        try:
            hidden_Nd = self._compute_prompts(batch)
        except Exception:  # an error of one request must not fail the others
            self._start_each(batch)
        else:
            self._activate(batch, hidden_Nd)

    def _start_each(self, batch: list[GenerationRequest]) -> None:
        broken: dict[GenerationRequest, Exception] = {}
        for request in batch:
            try:
                hidden_Nd = self._compute_prompts([request])
            except Exception as error:
                broken[request] = error
                self.waiting.remove(request)
            else:
                self._activate([request], hidden_Nd)
        can_compute_others = len(broken) < len(batch) or bool(self.running)
        for request, error in broken.items():
            request.fail(make_request_error(request, error) if can_compute_others else error)

    def _compute_prompts(self, batch: list[GenerationRequest]) -> Tensor:
        """Return hidden states of the last prompt tokens: [N, d], followed by padding rows.

        The requests get the next free slots, and each distinct prompt is computed once. The
        requests stay in `waiting` until `_activate`, so that `reset` finds them after an error.
        """
        n_routed = self._n_routed
        n_adapted = self._n_adapted
        self._n_routed += sum(request.sampling.routes for request in batch)
        self._n_adapted += sum(request.sampling.adapter is not None for request in batch)
        try:
            return self._prefill_batch(batch)
        except BaseException:
            self._n_routed = n_routed
            self._n_adapted = n_adapted
            raise

    def _prefill_batch(self, batch: list[GenerationRequest]) -> Tensor:
        first, count = len(self.running), len(batch)
        # P = distinct prompts; prompt_N: the prompt of each request.
        prompt_numbers: dict[tuple[str | None, PromptKey], int] = {}
        prompt_N = np.array(
            [prompt_numbers.setdefault(request.key, len(prompt_numbers)) for request in batch]
        )
        prompts = [np.frombuffer(tokens, dtype=np.int64) for _, (tokens, _) in prompt_numbers]
        lengths_P = np.array([len(prompt) for prompt in prompts])
        starts_P = np.cumsum(lengths_P) - lengths_P
        self.slots.enter(batch, first)

        lengths_N = lengths_P[prompt_N]
        slots = np.repeat(np.arange(first, first + count), lengths_N)
        positions = concatenate_ranges(lengths_N)
        sources = np.repeat(starts_P[prompt_N], lengths_N) + positions
        tokens_T = self._upload(np.concatenate(prompts))
        targets = self._upload(slots), self._upload(positions)
        self.slots.store(*targets, tokens_T[self._upload(sources)])
        recorder = self._make_recorder(len(tokens_T))
        adapters = [adapter for adapter, _ in prompt_numbers]
        hidden_Td = self._prefill(
            tokens_T, lengths_P, adapters, sources, slots, positions, recorder
        )
        if recorder is not None:
            self.slots.routes_RCLK.index_put_(targets, recorder.experts_TLK[self._upload(sources)])
        last_N = (starts_P + lengths_P - 1)[prompt_N]
        padded = np.pad(last_N, (0, -count % self.limits.row_multiple), mode="edge")
        return hidden_Td.index_select(0, self._upload(padded))

    def _activate(self, batch: list[GenerationRequest], hidden_Nd: Tensor) -> None:
        """Draw the first tokens of new requests from the result of `_compute_prompts`."""
        first, count = len(self.running), len(batch)
        self.running += batch
        for request in batch:
            self.waiting.remove(request)
        self._active = None
        self._n_stop_strings += sum(request.stop_strings is not None for request in batch)
        for request in batch:
            request.version_starts.append((0, self.version))
        self._finish(self._draw_next(self.slots.upload_active(first, first + count), hidden_Nd))

    def _recompute_cache(self) -> None:
        """Recompute the keys and values of all running requests with the new weights.

        Each request's last token is excluded, because it is the input of the next step. Recorded
        routes stay, because the tokens so far were drawn with them.
        """
        self._is_cache_stale = False
        lengths = self.slots.lengths[: len(self.running)] - 1
        for span in split_spans(lengths, self.limits.prefill_tokens):
            slots = np.repeat(np.arange(span.start, span.stop), lengths[span])
            positions = concatenate_ranges(lengths[span])
            tokens_T = self.slots.tokens_RC[self._upload(slots), self._upload(positions)]
            adapters = [request.sampling.adapter for request in self.running[span]]
            sources = np.arange(len(tokens_T))
            self._prefill(tokens_T, lengths[span], adapters, sources, slots, positions)

    def _prefill(
        self,
        tokens_T: Tensor,
        lengths: NDArray[np.int64],
        adapters: Sequence[str | None],
        sources: NDArray[np.int64],
        slots: NDArray[np.int64],
        positions: NDArray[np.int64],
        recorder: RouteRecorder | None = None,
    ) -> Tensor:
        """Return hidden states of sequences laid end to end: [T, d], followed by padding rows.

        Keys and values of token `sources[i]` go to `positions[i]` of slot `slots[i]`.
        adapters: the adapter of each sequence.
        """
        padding = (0, -len(tokens_T) % self.limits.row_multiple)
        cache_positions = (self._upload(array) for array in (sources, slots, positions))
        attend = PrefillAttention(self.cache, lengths, *cache_positions)
        self.prefilled_tokens += len(tokens_T)
        tokens_T = F.pad(tokens_T, padding)
        positions_T = F.pad(self._upload(concatenate_ranges(lengths)), padding)
        adapters_T: Sequence[str | None] = ()
        if self._n_adapted:
            adapters_T = np.repeat(np.array(adapters, dtype=object), lengths).tolist()
        multiple = self.limits.row_multiple
        return self._select_decoder(adapters_T)(
            tokens_T, positions_T, attend, row_multiple=multiple, route=recorder
        )

    def _select_decoder(self, adapters: Sequence[str | None]) -> Decoder:
        """Return the decoder for rows with these adapters, followed by padding."""
        return self.adapters.select_decoder(adapters) if self._n_adapted else self.decoder

    def _make_recorder(self, n_tokens: int) -> RouteRecorder | None:
        """Return a recorder of routes for a forward of `n_tokens` rows and padding.

        Return None if no running request records routes.
        """
        rows = round_up_to(n_tokens, self.limits.row_multiple)
        return RouteRecorder(self.decoder.config, rows, self.device) if self._n_routed else None

    def _upload(self, array: NDArray[np.int64]) -> Tensor:
        return torch.from_numpy(array).to(self.device)

    def _decode(self) -> None:
        if self._active is None:
            self._active = self.slots.upload_active(0, len(self.running))
        active = self._active
        longest = int(self.slots.lengths[: len(self.running)].max())
        if self._reserve(len(active.feed), longest + 1):
            self._active = active = self.slots.upload_active(0, len(self.running))
        self.decoded_tokens += active.n_slots
        self._finish(self._draw_next(active, self._compute_next(active, longest)))

    def _compute_next(self, active: ActiveSlots, longest: int) -> Tensor:
        """Return hidden states of the requests' last tokens: [N, d], followed by padding rows.

        If the compiled step is available, it always computes the requests without an adapter,
        even if other running requests have one: a request's bits must not depend on its neighbours.
        """
        if (layers := self.compiled.layers()) is None:
            return self._decode_with_torch(active, longest)
        count = active.n_slots
        plain_slots = torch.arange(count)
        if not self._n_adapted:
            hidden = self.compiled(
                layers, active.feed[:count], active.positions[:count], plain_slots, self.cache
            )
            padding = len(active.feed) - count
            return F.pad(hidden, (0, 0, 0, padding)) if padding else hidden
        hidden = self._decode_with_torch(active, longest)
        plain_slots = plain_slots[[request.sampling.adapter is None for request in self.running]]
        if len(plain_slots):
            feed, positions = active.feed[plain_slots], active.positions[plain_slots]
            hidden[plain_slots] = self.compiled(layers, feed, positions, plain_slots, self.cache)
        return hidden

    def _decode_with_torch(self, active: ActiveSlots, longest: int) -> Tensor:
        """Return hidden states like `_compute_next`, without the compiled step."""
        attend = DecodeAttention(self.cache, active.positions, longest)
        feed, positions, count = active.feed, active.positions, active.n_slots
        recorder = self._make_recorder(len(feed))
        decoder = self._select_decoder(
            [request.sampling.adapter for request in self.running] if self._n_adapted else ()
        )
        multiple = self.limits.row_multiple
        hidden = decoder(feed, positions, attend, row_multiple=multiple, route=recorder)
        if recorder is not None:
            targets = attend.slots_N[:count], positions[:count]
            self.slots.routes_RCLK.index_put_(targets, recorder.experts_TLK[:count])
        return hidden

    def _draw_next(self, active: ActiveSlots, hidden_Nd: Tensor) -> EndReasons:
        """Draw the next token of each active slot and return the slots that have ended.

        hidden_Nd: may end with padding rows.
        """
        # The learner computes logits in this dtype too.
        weight_Vd = self.decoder.head_weight
        dtype = torch.promote_types(weight_Vd.dtype, torch.float32)
        weight_Vd = weight_Vd.to(dtype)
        count = active.n_slots
        uniforms_N = draw_uniforms(
            torch.cat([chunk.settings.streams_N for chunk in active.chunks]),
            active.positions[:count] + 1 - active.prompt_lengths_N,
        )
        draws = []
        for chunk in active.chunks:
            span = chunk.rows
            padded_hidden = hidden_Nd[
                span.start : round_up_to(span.stop, self.limits.row_multiple)
            ].to(dtype)
            logits_NV = F.linear(padded_hidden, weight_Vd)[: span.stop - span.start]
            draws.append(draw_tokens(logits_NV, uniforms_N[span], chunk.settings))
        return self._find_ended(active, self.slots.record(active, draws))

    def _find_ended(self, active: ActiveSlots, tokens_N: Tensor) -> EndReasons:
        """Return the slots that have ended, with the reason.

        Later reasons overwrite earlier ones: a stop id overrides a stop string, which overrides a
        limit. Text that can't be decoded fails its request.
        """
        first = active.first_slot
        end = first + active.n_slots
        full = np.flatnonzero(self.slots.lengths[first:end] >= self.slots.limits[first:end]) + first
        end_reasons: dict[int, StopReason | RequestFailed] = {
            slot: self.running[slot].reason_at_limit for slot in full.tolist()
        }
        slots = range(first, end) if self._n_stop_strings else ()
        if watched_slots := [slot for slot in slots if self.running[slot].stop_strings]:
            watched_tokens = tokens_N[torch.tensor(watched_slots, device=self.device) - first]
            for slot, token in zip(watched_slots, watched_tokens.tolist(), strict=True):
                stop_strings = self.running[slot].stop_strings
                try:
                    if stop_strings is not None and stop_strings.feed(token):
                        end_reasons[slot] = StopReason.STOP_STRING
                except RequestFailed as error:
                    end_reasons[slot] = error
        if active.stops_NS is not None:
            stop_id_rows = (tokens_N[:, None] == active.stops_NS).any(-1).nonzero()[:, 0]
            end_reasons |= dict.fromkeys((stop_id_rows + first).tolist(), StopReason.STOP_TOKEN)
        return end_reasons

    # --- the end of a request

    def _finish(self, end_reasons: EndReasons) -> None:
        """Deliver the results of these slots, or their errors, and free the slots.

        Raises ModelError as `explain_nonfinite` does.
        """
        if not end_reasons:
            return
        slots = list(end_reasons)
        requests = [self.running[slot] for slot in slots]
        results = self.slots.read_completions(slots)
        routes = [
            self.slots.read_routes(slot) if self.running[slot].sampling.routes else None
            for slot in slots
        ]
        first_nonfinite = [find_first_nonfinite(logprobs) for _, logprobs, _ in results]
        broken = {
            request: index
            for request, index in zip(requests, first_nonfinite, strict=True)
            if index is not None
        }
        errors = self._explain_errors(broken) if broken else {}
        self._free_slots(slots)
        for request, (tokens, logprobs, log_kept), stop, request_routes in zip(
            requests, results, end_reasons.values(), routes, strict=True
        ):
            end = errors.get(request, stop)
            if isinstance(end, Exception):
                request.fail(end)
            else:
                request.deliver(request.complete(tokens, logprobs, log_kept, end, request_routes))

    def _explain_errors(
        self, broken: Mapping[GenerationRequest, int]
    ) -> Mapping[GenerationRequest, Exception]:
        running = list(range(len(self.running)))
        all_fail = self.slots.find_nonfinite(running) == running
        weights = self.decoder.named_parameters()
        return explain_nonfinite(broken, all_fail=all_fail, weights=weights, version=self.version)

    @torch.inference_mode()
    def _free_slots(self, slots: list[int]) -> None:
        """Free slots; the last running requests move into the gaps.

        Keys and values that aren't finite are erased. Otherwise the next request in the slot would
        read them with weight 0, and 0 * NaN is NaN.
        """
        remaining = len(self.running) - len(slots)
        freed = set(slots)
        gaps = [slot for slot in slots if slot < remaining]
        moved = [slot for slot in range(remaining, len(self.running)) if slot not in freed]
        self._n_stop_strings -= sum(self.running[slot].stop_strings is not None for slot in slots)
        self._n_routed -= sum(self.running[slot].sampling.routes for slot in slots)
        self._n_adapted -= sum(self.running[slot].sampling.adapter is not None for slot in slots)
        self._active = None
        broken = self.slots.find_nonfinite([*slots, *moved])
        self.cache.erase([slot for slot in slots if slot in broken])
        if moved:
            length = int(self.slots.lengths[moved].max())
            self.slots.move(moved, gaps, length)
            sources, targets = (torch.tensor(part, device=self.device) for part in (moved, gaps))
            self.cache.move(sources, targets, length)
            self.cache.erase([slot for slot in moved if slot in broken])
        for source, target in zip(moved, gaps, strict=True):
            self.running[target] = self.running[source]
        del self.running[remaining:]
