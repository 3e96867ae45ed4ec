"""Continuous batching: decide between steps which requests enter and leave the running batch.

A step admits waiting requests, or continues all running ones: the model runner computes the hidden
states of their last tokens, and the sampler draws one token of each. Requests that have ended
retire.
No request is preempted: a request enters only if the KV cache can hold all running requests at
their maximum length.

N = requests, d = hidden size.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, islice

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ratchet.errors import ConfigError, ModelError, RequestFailed
from ratchet.generators.engine.limits import GIB, SchedulerLimits
from ratchet.generators.engine.model_runner import ModelRunner
from ratchet.generators.engine.running_requests import ActiveSlots
from ratchet.generators.engine.sampler import Sampler
from ratchet.generators.engine.step_graphs import (
    LEAST_LENGTH,
    StepGraphs,
    round_up_to_bucket,
)
from ratchet.generators.faults import explain_nonfinite, find_first_nonfinite, make_request_error
from ratchet.generators.grammar_masks import BatchMasks
from ratchet.generators.request import GenerationRequest, PromptKey
from ratchet.models.decoder import Decoder
from ratchet.types import StopReason
from ratchet.utils.transfer import Fetch

EndReasons = dict[int, StopReason | RequestFailed]  # by slot
# Steps that admit requests before running ones continue. Without a limit, many long prompts would
# hold up the requests that run.
MAX_ADMITTING_STEPS = 8


@dataclass(frozen=True)
class DrawnTokens:
    """The tokens of a step on their way to the host, with the state of its requests then."""

    requests: Sequence[GenerationRequest]
    lengths: NDArray[np.int64]  # of the requests, with these tokens
    stop_ids: NDArray[np.int64]  # of the requests
    watched: Sequence[int]  # indices of the requests with stop strings
    fetch: Fetch


class Scheduler:
    """An `EngineCore` for the built-in decoder.

    `add` queues a request. Its completion or its error goes to the request's own callbacks.
    """

    def __init__(self, decoder: Decoder, limits: SchedulerLimits) -> None:
        self.limits = limits
        self.runner = ModelRunner(decoder, limits)
        self.slots = self.runner.slots
        self.sampler = Sampler(decoder, limits.row_multiple)
        self.waiting: deque[GenerationRequest] = deque()
        self.running: list[GenerationRequest] = []  # by slot
        self.version = 0
        self._is_cache_stale = False  # keys and values belong to older weights
        self._admitting_steps = 0  # since running requests continued
        self.graphs = (
            StepGraphs(self._compute_step, self.runner.device) if self.runner.can_capture else None
        )
        # The tokens of the last step, if the host reads them after it has launched the next one.
        self._unread: DrawnTokens | None = None

    @property
    def busy(self) -> bool:
        return bool(self.waiting or self.running)

    @property
    def computed_tokens(self) -> int:
        """Return the number of the model's input tokens so far, without padding."""
        return self.runner.prefilled_tokens + self.runner.decoded_tokens

    def set_kv_bytes(self, kv_bytes: int) -> None:
        """Change the maximum size of the KV cache, in bytes, while no request runs."""
        self.limits = replace(self.limits, kv_bytes=kv_bytes)
        self.runner.set_limits(self.limits)

    def add(self, request: GenerationRequest) -> None:
        """Queue a request. Raises ConfigError if the cache could never hold it."""
        if request.limit > self.runner.max_length:
            raise ConfigError(
                f"a request of up to {request.limit} tokens doesn't fit a KV cache of "
                f"{self.limits.kv_bytes / GIB:.3g} GiB, which holds {self.runner.max_length}: "
                "raise generator.kv_cache_gib or lower sampling.max_new_tokens"
            )
        self.waiting.append(request)

    def cancel(self, request: GenerationRequest) -> None:
        if request in self.running:
            self._free_slots([self.running.index(request)])
        elif request in self.waiting:
            self.waiting.remove(request)

    def abort(self) -> None:
        try:
            self._retire(self._read_late())
            self._retire(dict.fromkeys(range(len(self.running)), StopReason.ABORTED))
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
        self._unread = None
        self.runner.clear()
        self._is_cache_stale = False
        return requests

    def commit(self, version: int, *, keep_kv: bool) -> None:
        self.version = version
        self.runner.renew_weights()
        self._is_cache_stale |= bool(self.running) and not keep_kv
        for slot, request in enumerate(self.running):
            generated = int(self.slots.lengths[slot] - self.slots.prompt_lengths[slot])
            request.version_starts.append((generated, version))

    @torch.inference_mode()
    def step(self) -> None:
        """Admit waiting requests, or else compute one token for every running request.

        A step admits no more than one forward takes, so that the caller's event loop answers others
        between the forwards of many prompts. A request that can't be computed fails alone. Raises
        ModelError if the weights are broken.
        """
        # Weights may have changed without a commit, for example to their moving averages.
        if not self.running:
            self.runner.renew_weights()
        if self._is_cache_stale:
            self._is_cache_stale = False
            self.runner.recompute_cache(self.running)
        may_admit = not self.running or self._admitting_steps < MAX_ADMITTING_STEPS
        if may_admit and (batch := self._get_admissible()):
            self._admitting_steps += 1
            self._admit(batch)
        elif self.running:
            self._admitting_steps = 0
            self._decode()

    def _decode(self) -> None:
        """Compute the next token of every running request."""
        active, longest = self.runner.begin_decode(self.running)
        if self.graphs is None or active.adapters is not None or active.grammars is not None:
            self._append_tokens(active, self.runner.compute_next(active, longest))
            return
        self.runner.active = active = self.graphs.load(active, self.runner.memory)
        length = round_up_to_bucket(longest, LEAST_LENGTH)
        # The device always has work then. A request that stops has computed a token in vain.
        self._end_step(active, self.graphs(active, length), reads_late=True)

    def _compute_step(self, active: ActiveSlots, longest: int) -> Tensor:
        """Compute and return the next token of every slot, without the host's part of a step."""
        hidden_Nd = self.runner.compute_next(active, longest)
        draws = self.sampler(hidden_Nd, active.chunks, active.token_index_N)
        return self.slots.record(active, draws)

    # --- requests enter

    def _get_admissible(self) -> list[GenerationRequest]:
        """Return the waiting requests that may enter now, in order.

        Free slots, cache memory and `prefill_tokens` limit their number.
        """
        fits_cache = self.runner.fits_cache
        if self.waiting and not self.running and not fits_cache(1, self.waiting[0].limit):
            # The cache still has the shape of earlier requests.
            self.runner.clear()
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
        largest_limit = int(self.slots.limits[: len(self.running)].max(initial=0))
        # Entry n: the largest limit of the running requests and the first n of the batch.
        largest_limits = [*accumulate((r.limit for r in batch), max, initial=largest_limit)]
        n_running, counts = len(self.running), range(1, len(batch) + 1)
        count = bisect_left(
            counts, True, key=lambda n: not fits_cache(n_running + n, largest_limits[n])
        )
        return batch[:count]

    def _admit(self, batch: list[GenerationRequest]) -> None:
        """Start the first waiting requests.

        They stay in `waiting` until their prompts are computed, so that `reset` finds them after
        an error. If computing them together raises, each is computed alone, and only requests that
        raise again fail. Their error is RequestFailed if the model can compute other requests.
        """
        runner, n_running = self.runner, len(self.running)
        longest = max(len(request.prompt) for request in batch)
        longest = max(longest, int(self.slots.lengths[:n_running].max(initial=0)))
        runner.reserve(n_running + len(batch), longest + 1)
        try:
            both = runner.prefill_and_decode(batch, self.running) if n_running else None
            active, hidden_Nd = both or (None, runner.prefill(batch, n_running))
        except Exception:  # an error of one request must not fail the others
            self._admit_each(batch)
        else:
            if active is not None:
                self._admitting_steps = 0
            self._activate(batch, hidden_Nd, active)

    def _admit_each(self, batch: list[GenerationRequest]) -> None:
        broken: dict[GenerationRequest, Exception] = {}
        for request in batch:
            try:
                hidden_Nd = self.runner.prefill([request], len(self.running))
            except Exception as error:
                broken[request] = error
                self.waiting.remove(request)
            else:
                self._activate([request], hidden_Nd)
        can_compute_others = len(broken) < len(batch) or bool(self.running)
        for request, error in broken.items():
            request.fail(make_request_error(request, error) if can_compute_others else error)

    def _activate(
        self,
        batch: list[GenerationRequest],
        hidden_Nd: Tensor,
        active: ActiveSlots | None = None,
    ) -> None:
        """Draw the first tokens of requests whose prompts have been computed.

        active: all running requests, if they too get a token; None: only the batch does.
        """
        first = len(self.running)
        self.running += batch
        for request in batch:
            self.waiting.remove(request)
            request.version_starts.append((0, self.version))
        self._append_tokens(active or self.slots.upload_active(batch, first), hidden_Nd)

    # --- requests grow and leave

    def _append_tokens(self, active: ActiveSlots, hidden_Nd: Tensor) -> None:
        """Draw the next token of each active slot, and retire the requests that have ended."""
        masks = None
        if active.grammars is not None:
            masks = BatchMasks.compute(active.grammars, self.slots.vocab_size)
        draws = self.sampler(hidden_Nd, active.chunks, active.token_index_N, masks)
        self._end_step(active, self.slots.record(active, draws), masks)

    def _end_step(
        self,
        active: ActiveSlots,
        tokens_N: Tensor,
        masks: BatchMasks | None = None,
        *,
        reads_late: bool = False,
    ) -> None:
        """Count the tokens, and retire the requests that have ended.

        reads_late: True to leave the tokens to the next step. They are read now if a request has
            its full length, because the host then waits for its completion.
        """
        self.slots.advance(active)
        end_reasons = self._find_at_limit(active)
        drawn = None
        # Requests with a grammar have stop ids.
        if active.watched_slots or active.has_stop_ids:
            rows = slice(active.first_slot, active.first_slot + active.n_slots)
            drawn = DrawnTokens(
                self.running[rows],
                self.slots.lengths[rows].copy(),
                self.slots.stop_ids[rows].copy(),
                [slot - active.first_slot for slot in active.watched_slots],
                Fetch(tokens_N),
            )
        is_all = active.n_slots == len(self.running)
        earlier_ends = self._read_late() if is_all else {}
        if reads_late and not end_reasons:
            self._unread = drawn
        elif drawn is not None:
            tokens = drawn.fetch.wait().numpy()[: active.n_slots]
            end_reasons |= self._find_stopped(drawn, tokens)
            if masks is not None:
                end_reasons |= self._feed_grammars(active, tokens, masks, end_reasons)
        self._retire(end_reasons | earlier_ends)

    def _read_late(self) -> EndReasons:
        """Return the slots that the step before ended, with the reason. Drops their newest token.

        This waits for the step before, while the device computes the next one.
        """
        drawn, self._unread = self._unread, None
        if drawn is None:
            return {}
        tokens = drawn.fetch.wait().numpy()[: len(drawn.requests)]
        end_reasons = self._find_stopped(drawn, tokens)
        lengths = dict(zip(drawn.requests, drawn.lengths.tolist(), strict=True))
        for slot in end_reasons:
            self.slots.lengths[slot] = lengths[self.running[slot]]
        return end_reasons

    def _feed_grammars(
        self,
        active: ActiveSlots,
        tokens: NDArray[np.int64],
        masks: BatchMasks,
        end_reasons: EndReasons,
    ) -> dict[int, RequestFailed]:
        """Feed the drawn tokens to the grammars of requests that continue.

        Returns the errors of grammars that can't be followed, by slot.
        """
        first = active.first_slot
        errors = {first + row: error for row, error in masks.errors.items()}
        for row, token in zip(masks.rows.tolist(), tokens[masks.rows].tolist(), strict=True):
            grammar = self.running[first + row].grammar
            if grammar is None or first + row in end_reasons or first + row in errors:
                continue
            try:
                grammar.feed(token)
            except RequestFailed as error:
                errors[first + row] = error
        return errors

    def _find_at_limit(self, active: ActiveSlots) -> EndReasons:
        """Return the slots whose sequences have their full length, with the reason."""
        first = active.first_slot
        end = first + active.n_slots
        is_at_limit = self.slots.lengths[first:end] >= self.slots.limits[first:end]
        return {
            slot: self.running[slot].reason_at_limit
            for slot in (np.flatnonzero(is_at_limit) + first).tolist()
        }

    def _find_stopped(self, drawn: DrawnTokens, tokens: NDArray[np.int64]) -> EndReasons:
        """Return the slots that stop strings or stop ids ended, with the reason.

        A stop id overrides a stop string. Text that can't be decoded fails its request. Requests
        that have left since are passed over.
        """
        reasons: dict[GenerationRequest, StopReason | RequestFailed] = {}
        for row, token in zip(drawn.watched, tokens[drawn.watched].tolist(), strict=True):
            request = drawn.requests[row]
            try:
                if request.stop_strings is not None and request.stop_strings.feed(token):
                    reasons[request] = StopReason.STOP_STRING
            except RequestFailed as error:
                reasons[request] = error
        for row in np.flatnonzero((tokens[:, None] == drawn.stop_ids).any(-1)).tolist():
            reasons[drawn.requests[row]] = StopReason.STOP_TOKEN
        return {
            self.running.index(request): reason
            for request, reason in reasons.items()
            if request in self.running
        }

    def _retire(self, end_reasons: EndReasons) -> None:
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
        weights = self.runner.decoder.named_parameters()
        return explain_nonfinite(broken, all_fail=all_fail, weights=weights, version=self.version)

    def _free_slots(self, slots: list[int]) -> None:
        """Free slots; the last running requests move into the gaps."""
        remaining = len(self.running) - len(slots)
        freed = set(slots)
        gaps = [slot for slot in slots if slot < remaining]
        moved = [slot for slot in range(remaining, len(self.running)) if slot not in freed]
        self.runner.free(slots, moved, gaps)
        for source, target in zip(moved, gaps, strict=True):
            self.running[target] = self.running[source]
        del self.running[remaining:]
