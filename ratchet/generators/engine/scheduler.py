"""Continuous batching: requests enter free slots at once, every running one gets a token a step,
and whoever has ended leaves.

T = prompt tokens of a forward, N = requests, d = hidden size, V = vocabulary.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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
from ratchet.generators.engine.layout import ceil_to, counting, spans
from ratchet.generators.engine.multi_lora import Bank
from ratchet.generators.engine.running_requests import Active, Slots
from ratchet.generators.engine.sampling import draw, uniforms
from ratchet.generators.faults import blame, first_broken, uncomputable
from ratchet.generators.request import PromptKey, Request
from ratchet.models.decoder import Decoder
from ratchet.models.layers.expert_routing import Record
from ratchet.types import StopReason

GIB = 2**30
Ended = Mapping[int, StopReason | RequestFailed]  # by slot


@dataclass(frozen=True)
class Limits:
    """max_running: requests with a slot. kv_bytes: of the cache. prefill_tokens: of one forward,
    unless a prompt is longer. row_multiple: see `engine.rows`."""

    max_running: int
    kv_bytes: int
    prefill_tokens: int
    row_multiple: int


class Scheduler:
    """Implements `Core` for the built-in decoder, whose own parameters it reads at every step.

    prefilled_tokens, decoded_tokens: tokens that went through the model so far, padding left out.
    """

    def __init__(self, decoder: Decoder, limits: Limits) -> None:
        weight = decoder.head_weight
        self.decoder, self.limits, self.device = decoder, limits, weight.device
        self.vocab_size = decoder.config.vocab_size
        max_rows = ceil_to(limits.max_running, limits.row_multiple)
        self.cache = KVCache(
            decoder.config, max_rows=max_rows, dtype=weight.dtype, device=weight.device
        )
        routes = len(decoder.config.sparse_layers), decoder.config.experts_per_token
        self.slots = Slots(
            vocab_size=self.vocab_size,
            row_multiple=limits.row_multiple,
            device=weight.device,
            routes=routes,
        )
        self.bank = Bank(decoder, limits.row_multiple)
        self.compiled = CompiledDecoder(decoder)
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []  # by slot
        self.version = 0
        # Tokens of a request that has the cache to itself.
        self.longest = self.cache.stride if self._fits(1, self.cache.stride) else 0
        while 0 < self.longest < self.decoder.config.max_positions and self._fits(
            1, 2 * self.longest
        ):
            self.longest *= 2
        self.prefilled_tokens = self.decoded_tokens = 0
        self._active: Active | None = None  # of all running requests; None when they have changed
        self._watching = 0  # running requests with stop strings
        self._recording = 0  # running requests whose routes are asked for
        self._choosing = 0  # running requests that name an adapter
        self._stale = False  # keys and values belong to older weights

    # --- requests come and go

    @property
    def busy(self) -> bool:
        return bool(self.waiting or self.running)

    def add(self, request: Request) -> None:
        """Raises ConfigError when the cache could never hold it."""
        if request.limit > self.longest:
            raise ConfigError(
                f"a request of up to {request.limit} tokens doesn't fit a KV cache of "
                f"{self.limits.kv_bytes / GIB:.3g} GiB, "
                f"which holds {self.longest}: raise generator.kv_cache_gib or lower "
                "sampling.max_new_tokens"
            )
        self.waiting.append(request)

    def cancel(self, request: Request) -> None:
        if request in self.running:
            self._leave([self.running.index(request)])
        elif request in self.waiting:
            self.waiting.remove(request)

    def abort(self) -> None:
        try:
            self._retire(dict.fromkeys(range(len(self.running)), StopReason.ABORTED))
        except ModelError as error:
            for request in self.reset():
                request.fail(error)
        while self.waiting:
            request = self.waiting.popleft()
            request.deliver(request.without_tokens(StopReason.ABORTED))

    def reset(self) -> list[Request]:
        left = [*self.running, *self.waiting]
        self.running, self.waiting = [], deque()
        self.cache.clear()
        self.slots.clear()
        self._active, self._watching, self._recording, self._choosing, self._stale = (
            None,
            0,
            0,
            0,
            False,
        )
        return left

    def commit(self, version: int, *, keep_kv: bool) -> None:
        self.version = version
        self._stale |= bool(self.running) and not keep_kv
        for row, request in enumerate(self.running):
            request.marks.append((int(self.slots.lengths[row] - self.slots.prompts[row]), version))

    # --- a step

    @torch.inference_mode()
    def step(self) -> None:
        """Raises ModelError where the weights are broken. A request that can't be computed fails
        alone."""
        if self._stale:
            self._refresh()
        while batch := self._admissible():
            self._enter(batch)
        if self.running:
            self._decode()

    def _admissible(self) -> list[Request]:
        """The waiting requests that may enter now, in order: as slots, memory and the size of a
        forward allow."""
        if self.waiting and not self.running and not self._fits(1, self.waiting[0].limit):
            self.cache.clear()  # it has the shape of earlier requests
            self.slots.clear()
        tokens, batch, prompts = 0, list[Request](), set[tuple[str | None, PromptKey]]()
        for request in islice(self.waiting, self.limits.max_running - len(self.running)):
            if request.key not in prompts:
                tokens += len(request.prompt)
                prompts.add(request.key)
            if batch and tokens > self.limits.prefill_tokens:
                break
            batch.append(request)
        reach = int(self.slots.limits[: len(self.running)].max(initial=0))
        reaches = list(accumulate((request.limit for request in batch), max, initial=reach))
        counts = range(1, len(batch) + 1)
        count = bisect_left(
            counts, True, key=lambda n: not self._fits(len(self.running) + n, reaches[n])
        )
        return batch[:count]

    def _fits(self, rows: int, length: int) -> bool:
        return (
            self.cache.bytes_for(ceil_to(rows, self.limits.row_multiple), length)
            <= self.limits.kv_bytes
        )

    def _reserve(self, rows: int, length: int) -> bool:
        """Whether anything had to grow."""
        before = self.cache.rows, self.cache.capacity
        self.cache.reserve(rows, length)
        self.slots.reserve(self.cache.rows, self.cache.capacity)
        return before != (self.cache.rows, self.cache.capacity)

    def _enter(self, batch: list[Request]) -> None:
        """Starts these, the first that wait. Where computing them together raises, each is computed
        alone: those that raise then fail alone, with a RequestFailed where the model has computed
        others."""
        longest = max(len(request.prompt) for request in batch)
        self._reserve(
            ceil_to(len(self.running) + len(batch), self.limits.row_multiple), longest + 1
        )
        try:
            hidden_Nd = self._computed(batch)
        except Exception:  # of any kind: what breaks one request must not cost the others
            self._enter_each(batch)
        else:
            self._begin(batch, hidden_Nd)

    def _enter_each(self, batch: list[Request]) -> None:
        broken: dict[Request, Exception] = {}
        for request in batch:
            try:
                hidden_Nd = self._computed([request])
            except Exception as error:
                broken[request] = error
                self.waiting.remove(request)
            else:
                self._begin([request], hidden_Nd)
        computes = len(broken) < len(batch) or bool(self.running)
        for request, error in broken.items():
            request.fail(uncomputable(request, error) if computes else error)

    def _computed(self, batch: list[Request]) -> Tensor:
        """The hidden state of each request's last prompt token, [N, d] and padding rows: gives them
        the next free slots and computes each distinct prompt once. They wait until they run, so
        that after an error `reset` finds them."""
        recording, choosing = self._recording, self._choosing
        self._recording += sum(request.sampling.routes for request in batch)
        self._choosing += sum(request.sampling.adapter is not None for request in batch)
        try:
            return self._prefilled(batch)
        except BaseException:
            self._recording, self._choosing = recording, choosing
            raise

    def _prefilled(self, batch: list[Request]) -> Tensor:
        first, count = len(self.running), len(batch)
        numbers: dict[tuple[str | None, PromptKey], int] = {}
        which_N = np.array([numbers.setdefault(request.key, len(numbers)) for request in batch])
        prompts = [np.frombuffer(tokens, dtype=np.int64) for _, (tokens, _) in numbers]
        lengths_P = np.array([len(prompt) for prompt in prompts])
        starts_P = np.cumsum(lengths_P) - lengths_P
        self.slots.enter(batch, first)

        own_N = lengths_P[which_N]
        rows, positions = np.repeat(np.arange(first, first + count), own_N), counting(own_N)
        sources = np.repeat(starts_P[which_N], own_N) + positions
        tokens_T = self._upload(np.concatenate(prompts))
        self.slots.store(
            self._upload(rows), self._upload(positions), tokens_T[self._upload(sources)]
        )
        record = self._record(len(tokens_T))
        adapters = [adapter for adapter, _ in numbers]
        hidden_Td = self._prefill(tokens_T, lengths_P, adapters, sources, rows, positions, record)
        if record is not None:
            at = self._upload(rows), self._upload(positions)
            self.slots.routes_RCLK.index_put_(at, record.experts_TLK[self._upload(sources)])
        last_N = (starts_P + lengths_P - 1)[which_N]
        padded = np.pad(last_N, (0, -count % self.limits.row_multiple), mode="edge")
        return hidden_Td.index_select(0, self._upload(padded))

    def _begin(self, batch: list[Request], hidden_Nd: Tensor) -> None:
        """Draws their first tokens, of hidden states that `_computed` gave."""
        first, count = len(self.running), len(batch)
        self.running += batch
        for request in batch:
            self.waiting.remove(request)
        self._active = None
        self._watching += sum(request.watch is not None for request in batch)
        for request in batch:
            request.marks.append((0, self.version))
        self._retire(self._emit(self.slots.active(first, first + count), hidden_Nd))

    def _refresh(self) -> None:
        """Computes the keys and values of all running requests anew: of all their tokens but the
        last, which is fed next. Their routes stay: what was drawn came from those."""
        self._stale = False
        lengths = self.slots.lengths[: len(self.running)] - 1
        for rows in spans(lengths, self.limits.prefill_tokens):
            own = lengths[rows]
            slots, positions = np.repeat(np.arange(rows.start, rows.stop), own), counting(own)
            tokens_T = self.slots.tokens_RC[self._upload(slots), self._upload(positions)]
            adapters = [request.sampling.adapter for request in self.running[rows]]
            self._prefill(tokens_T, own, adapters, np.arange(len(tokens_T)), slots, positions)

    def _prefill(
        self,
        tokens_T: Tensor,
        lengths: NDArray[np.int64],
        adapters: Sequence[str | None],
        sources: NDArray[np.int64],
        slots: NDArray[np.int64],
        positions: NDArray[np.int64],
        record: Record | None = None,
    ) -> Tensor:
        """Hidden states of sequences laid end to end, [T, d] and padding rows. adapters: by
        sequence. Keys and values of token `sources[i]` go to `positions[i]` of slot `slots[i]`."""
        padding = (0, -len(tokens_T) % self.limits.row_multiple)
        places = (self._upload(x) for x in (sources, slots, positions))
        attend = PrefillAttention(self.cache, lengths, *places)
        self.prefilled_tokens += len(tokens_T)
        tokens_T, positions_T = (
            F.pad(tokens_T, padding),
            F.pad(self._upload(counting(lengths)), padding),
        )
        decoder = self._decoder(
            np.repeat(np.array(adapters, dtype=object), lengths).tolist() if self._choosing else ()
        )
        return decoder(
            tokens_T, positions_T, attend, row_multiple=self.limits.row_multiple, route=record
        )

    def _decoder(self, adapters: Sequence[str | None]) -> Decoder:
        """What computes rows with these adapters, and padding."""
        return self.bank.decoder(adapters) if self._choosing else self.decoder

    def _record(self, tokens: int) -> Record | None:
        """For a forward of so many tokens and padding; None where nobody asks."""
        rows = ceil_to(tokens, self.limits.row_multiple)
        return Record(self.decoder.config, rows, self.device) if self._recording else None

    def _upload(self, array: NDArray[np.int64]) -> Tensor:
        return torch.from_numpy(array).to(self.device)

    def _decode(self) -> None:
        if self._active is None:
            self._active = self.slots.active(0, len(self.running))
        active, longest = self._active, int(self.slots.lengths[: len(self.running)].max())
        if self._reserve(len(active.feed), longest + 1):
            self._active = active = self.slots.active(0, len(self.running))
        self.decoded_tokens += active.count
        self._retire(self._emit(active, self._fed(active, longest)))

    def _fed(self, active: Active, longest: int) -> Tensor:
        """Hidden states of the tokens that are fed, [N, d] and padding rows. Where there is a
        compiled step every request without an adapter goes through it, also beside others: a
        request's bits must not depend on its neighbours."""
        if (layers := self.compiled.layers()) is None:
            return self._decoded(active, longest)
        plain = torch.arange(active.count)
        if not self._choosing:
            hidden = self.compiled(
                layers,
                active.feed[: active.count],
                active.positions[: active.count],
                plain,
                self.cache,
            )
            return (
                F.pad(hidden, (0, 0, 0, padding))
                if (padding := len(active.feed) - active.count)
                else hidden
            )
        hidden = self._decoded(active, longest)
        plain = plain[[request.sampling.adapter is None for request in self.running]]
        if len(plain):
            hidden[plain] = self.compiled(
                layers, active.feed[plain], active.positions[plain], plain, self.cache
            )
        return hidden

    def _decoded(self, active: Active, longest: int) -> Tensor:
        """The same by PyTorch's operations."""
        attend = DecodeAttention(self.cache, active.positions, longest)
        record = self._record(len(active.feed))
        decoder = self._decoder(
            [request.sampling.adapter for request in self.running] if self._choosing else ()
        )
        hidden = decoder(
            active.feed,
            active.positions,
            attend,
            row_multiple=self.limits.row_multiple,
            route=record,
        )
        if record is not None:
            at = attend.slots_N[: active.count], active.positions[: active.count]
            self.slots.routes_RCLK.index_put_(at, record.experts_TLK[: active.count])
        return hidden

    def _emit(self, active: Active, hidden_Nd: Tensor) -> Ended:
        """Draws the next token of each slot in the range, from hidden states that may end with
        padding rows. Returns the slots that have ended."""
        weight_Vd = self.decoder.head_weight
        dtype = torch.promote_types(weight_Vd.dtype, torch.float32)  # as the learner computes them
        weight_Vd, count = weight_Vd.to(dtype), active.count
        u_N = uniforms(
            torch.cat([chunk.settings.streams_N for chunk in active.chunks]),
            active.positions[:count] + 1 - active.prompts_N,
        )
        draws = []
        for chunk in active.chunks:
            padded = hidden_Nd[
                chunk.rows.start : ceil_to(chunk.rows.stop, self.limits.row_multiple)
            ].to(dtype)
            logits_NV = F.linear(padded, weight_Vd)[: chunk.rows.stop - chunk.rows.start]
            draws.append(draw(logits_NV, u_N[chunk.rows], chunk.settings))
        return self._ended(active, self.slots.record(active, draws))

    def _ended(self, active: Active, tokens_N: Tensor) -> Ended:
        """The weakest reason first: a stop id outdoes a stop string, which outdoes a limit. Text
        that can't be decoded fails its request."""
        first, end = active.first, active.first + active.count
        full = np.flatnonzero(self.slots.lengths[first:end] >= self.slots.limits[first:end]) + first
        ended: dict[int, StopReason | RequestFailed] = {
            row: self.running[row].reason_at_limit for row in full.tolist()
        }
        watched = (
            [row for row in range(first, end) if self.running[row].watch] if self._watching else []
        )
        if watched:
            picked = tokens_N[torch.tensor(watched, device=self.device) - first]
            for row, token in zip(watched, picked.tolist(), strict=True):
                watch = self.running[row].watch
                try:
                    if watch is not None and watch.feed(token):
                        ended[row] = StopReason.STOP_STRING
                except RequestFailed as error:
                    ended[row] = error
        if active.stops_NS is not None:
            hits = (tokens_N[:, None] == active.stops_NS).any(-1).nonzero()[:, 0]
            ended |= dict.fromkeys((hits + first).tolist(), StopReason.STOP_TOKEN)
        return ended

    # --- the end of a request

    def _retire(self, ended: Ended) -> None:
        """Delivers the results of these slots, or their errors, and frees them. Raises ModelError
        as `blame` does."""
        if not ended:
            return
        rows = list(ended)
        requests = [self.running[row] for row in rows]
        results = self.slots.read(rows)
        routes = [
            self.slots.read_routes(row) if self.running[row].sampling.routes else None
            for row in rows
        ]
        at = [first_broken(logprobs) for _, logprobs, _ in results]
        broken = {
            request: index for request, index in zip(requests, at, strict=True) if index is not None
        }
        errors = self._blamed(broken) if broken else {}
        self._leave(rows)
        for request, (tokens, logprobs, kept), stop, taken in zip(
            requests, results, ended.values(), routes, strict=True
        ):
            error = errors.get(request, stop)
            if isinstance(error, Exception):
                request.fail(error)
            else:
                request.deliver(request.complete(tokens, logprobs, kept, error, taken))

    def _blamed(self, broken: Mapping[Request, int]) -> Mapping[Request, Exception]:
        running = list(range(len(self.running)))
        all_rows, weights = self.slots.broken(running) == running, self.decoder.named_parameters()
        return blame(broken, all_rows=all_rows, weights=weights, version=self.version)

    @torch.inference_mode()
    def _leave(self, rows: list[int]) -> None:
        """Frees slots; the last running requests move into the gaps. Where the keys and values in a
        slot aren't finite they are erased: the next request there would read them with weight 0,
        and get NaN."""
        remaining, gone = len(self.running) - len(rows), set(rows)
        holes = [row for row in rows if row < remaining]
        movers = [row for row in range(remaining, len(self.running)) if row not in gone]
        self._watching -= sum(self.running[row].watch is not None for row in rows)
        self._recording -= sum(self.running[row].sampling.routes for row in rows)
        self._choosing -= sum(self.running[row].sampling.adapter is not None for row in rows)
        self._active = None
        broken = self.slots.broken([*rows, *movers])
        self.cache.erase([row for row in rows if row in broken])
        if movers:
            length = int(self.slots.lengths[movers].max())
            self.slots.move(movers, holes, length)
            sources, targets = (torch.tensor(part, device=self.device) for part in (movers, holes))
            self.cache.move(sources, targets, length)
            self.cache.erase([row for row in movers if row in broken])
        for source, target in zip(movers, holes, strict=True):
            self.running[target] = self.running[source]
        del self.running[remaining:]
