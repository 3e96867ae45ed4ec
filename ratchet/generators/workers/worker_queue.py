"""The queue of one worker: its waiting, running and cancelled requests."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from ratchet.generators.request import PromptKey, make_prompt_key
from ratchet.generators.workers.batch_protocol import RequestBatch
from ratchet.types import Completion, PlacedMedium, Sampling, StopReason
from ratchet.worker_protocols import Workers


@dataclass(eq=False)
class PendingRequest:
    """A request whose caller waits for the completion."""

    number: int
    tokens: NDArray[np.int64]
    sampling: Sampling
    future: asyncio.Future[Completion]
    media: tuple[PlacedMedium, ...] = ()
    is_aborted: bool = False
    key: PromptKey = field(init=False)

    def __post_init__(self) -> None:
        self.key = make_prompt_key(self.tokens, self.media)

    @property
    def cost(self) -> int:
        """Return the maximum number of tokens, prompt and completion together."""
        return len(self.tokens) + self.sampling.max_new_tokens

    def deliver(self, answer: Completion | BaseException) -> None:
        """Give the caller a completion or an error; do nothing if the request is already done."""
        if self.future.done():
            return
        if isinstance(answer, BaseException):
            self.future.set_exception(answer)
        else:
            self.future.set_result(answer)

    def deliver_aborted(self) -> None:
        """Deliver an aborted completion without tokens."""
        tokens = np.zeros(0, dtype=np.int64)
        logprobs = np.zeros(0, dtype=np.float32)
        versions = np.zeros(0, dtype=np.int32)
        self.deliver(Completion(tokens, logprobs, logprobs.copy(), versions, StopReason.ABORTED))


@dataclass(eq=False)
class WorkerQueue:
    """The requests of one generator worker, and the process that serves them."""

    rank: int  # index among the workers
    process: Workers | None = None  # the worker's process; None once it is lost
    is_absent: bool = False  # lost, and no machine has room for a replacement
    is_current: bool = False  # has the pool's version of the weights, so it may serve
    lost_process: Workers | None = None  # the lost process, until it is closed
    waiting: dict[int, PendingRequest] = field(default_factory=dict)  # by number; not yet sent
    sent: dict[int, PendingRequest] = field(default_factory=dict)  # by number; not yet answered
    # Numbers of cancelled requests whose cancellation was not sent to the worker yet.
    cancelled_numbers: list[int] = field(default_factory=list)
    must_abort: bool = False  # the next exchange aborts the sent requests
    load: int = 0  # sum of `cost` over waiting and sent requests
    # Number of waiting and sent requests with each prompt.
    request_count_by_prompt: Counter[PromptKey] = field(default_factory=Counter)
    # The task that exchanges messages with the worker.
    exchange_task: asyncio.Task[None] | None = None

    @property
    def busy(self) -> bool:
        """True if there is something to exchange with the worker."""
        return bool(self.waiting or self.sent or self.cancelled_numbers)

    def add(self, request: PendingRequest) -> None:
        """Queue a request."""
        self.waiting[request.number] = request
        self.load += request.cost
        self.request_count_by_prompt[request.key] += 1

    def take_batch(self) -> tuple[RequestBatch, list[int], bool]:
        """Return what the next exchange sends, and mark the waiting requests as sent.

        Returns (the waiting requests, numbers of cancelled requests, True if the worker must abort
        the requests that it already has).
        """
        requests = RequestBatch.from_requests(
            {
                number: (request.tokens, request.key, request.sampling, request.media)
                for number, request in self.waiting.items()
            }
        )
        batch = (requests, self.cancelled_numbers, self.must_abort)
        self.sent.update(self.waiting)
        self.waiting = {}
        self.cancelled_numbers = []
        self.must_abort = False
        return batch

    def pop_sent(self, number: int) -> PendingRequest | None:
        """Remove and return an answered request; None if it was cancelled meanwhile."""
        request = self.sent.pop(number, None)
        if request is not None:
            self._forget(request)
        return request

    def cancel(self, request: PendingRequest) -> bool:
        """Remove a cancelled request. Returns True if it was in this queue."""
        if self.sent.pop(request.number, None) is not None:
            self.cancelled_numbers.append(request.number)
        elif self.waiting.pop(request.number, None) is None:
            return False
        self._forget(request)
        return True

    def abort(self) -> None:
        """End waiting requests, and have the next exchange abort those already sent."""
        for request in self.waiting.values():
            self._forget(request)
            request.deliver_aborted()
        self.waiting = {}
        for request in self.sent.values():
            request.is_aborted = True
        self.must_abort = bool(self.sent)

    def mark_lost(self) -> list[PendingRequest]:
        """Mark the process as lost, and remove and return its unanswered requests."""
        unanswered = [*self.sent.values(), *self.waiting.values()]
        self.lost_process = self.process
        self.process = None
        self.is_current = False
        self.waiting = {}
        self.sent = {}
        self.cancelled_numbers = []
        self.must_abort = False
        self.load = 0
        self.exchange_task = None
        self.request_count_by_prompt.clear()
        return unanswered

    def _forget(self, request: PendingRequest) -> None:
        self.load -= request.cost
        self.request_count_by_prompt[request.key] -= 1
        if not self.request_count_by_prompt[request.key]:
            del self.request_count_by_prompt[request.key]
