"""The asynchronous front of the generators of this process: callers wait, a single task makes the steps.

A step runs in the event loop's own thread, so that between two steps nothing runs: pausing and committing need no locks.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from ratchet.errors import ConfigError, DataError
from ratchet.generators.engine.sampling import check_sampling
from ratchet.generators.engine.stopping import StopStrings, TextDecoder
from ratchet.generators.requests import Core, Request
from ratchet.generators.staging import Staging
from ratchet.interfaces import Shard
from ratchet.types import Completion, Sampling


class Front:
    """Implements `Generator` on a `Core`.

    A commit while requests run: the tokens that they have stay, with their version; the next ones are drawn from the new
    weights, over keys and values that are computed anew, unless `keep_kv`. Kept ones save a forward over all running
    requests, and make what follows a mixture of two policies that no learner can score exactly.

    tokenizer: needed for requests with stop strings only.
    """

    def __init__(
        self,
        core: Core,
        weights: Iterable[tuple[str, Tensor]],
        tokenizer: TextDecoder | None,
        *,
        vocab_size: int,
        max_context: int,
        keep_kv: bool,
    ) -> None:
        self.core, self.tokenizer = core, tokenizer
        self.vocab_size, self.max_context, self.keep_kv = vocab_size, max_context, keep_kv
        self._staging = Staging(weights)
        self._paused = False
        self._pump: asyncio.Task[None] | None = None

    @property
    def version(self) -> int:
        return self.core.version

    # --- generating

    async def generate(self, tokens: Sequence[int], sampling: Sampling) -> Completion:
        """Raises DataError for a prompt that is empty, too long or has an unknown token, ConfigError for an impossible
        sampling, and whatever broke the step that the request was in."""
        future: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        request = self._request(tokens, sampling, _once(future, future.set_result), _once(future, future.set_exception))
        if request.limit == len(request.prompt):
            return request.without_tokens(request.reason_at_limit)
        self.core.add(request)
        self._start_pump()
        try:
            return await future
        except asyncio.CancelledError:
            self.core.cancel(request)
            raise

    def generate_all(self, prompts: Sequence[Sequence[int]], samplings: Sequence[Sampling]) -> list[Completion]:
        """One completion per prompt, without an event loop. Raises as `generate` does."""
        assert not self._paused, "a paused generator can't be waited for"
        results: dict[int, Completion] = {}
        requests = [
            self._request(prompt, sampling, _keep(results, i), _ignore)
            for i, (prompt, sampling) in enumerate(zip(prompts, samplings, strict=True))
        ]
        try:
            for i, request in enumerate(requests):
                if request.limit == len(request.prompt):
                    results[i] = request.without_tokens(request.reason_at_limit)
                else:
                    self.core.add(request)
            while len(results) < len(requests):
                self._step()
        finally:
            for request in requests if len(results) < len(requests) else ():
                self.core.cancel(request)
        return [results[i] for i in range(len(requests))]

    def _request(
        self,
        tokens: Sequence[int],
        sampling: Sampling,
        deliver: Callable[[Completion], None],
        fail: Callable[[BaseException], None],
    ) -> Request:
        prompt = np.array(tokens, dtype=np.int64)
        if not len(prompt):
            raise DataError("an empty prompt: the first token needs something before it, at least a BOS token")
        if len(prompt) > self.max_context:
            raise DataError(f"a prompt of {len(prompt)} tokens doesn't fit a context of {self.max_context}: shorten or drop it")
        if prompt.view(np.uint64).max() >= self.vocab_size:  # a negative id is a huge one
            wrong = next(token for token in prompt.tolist() if not 0 <= token < self.vocab_size)
            raise DataError(f"token {wrong} isn't in the model's vocabulary of {self.vocab_size}: is this its tokenizer?")
        check_sampling(sampling)
        if sampling.stop and self.tokenizer is None:
            raise ConfigError("sampling.stop has strings, but the generator has no tokenizer: give it one, or use stop_ids")
        watch = StopStrings(sampling.stop, self.tokenizer) if sampling.stop and self.tokenizer is not None else None
        limit = min(len(prompt) + sampling.max_new_tokens, self.max_context)
        return Request(prompt, sampling, limit, deliver, fail, watch)

    # --- the task that makes the steps

    def _start_pump(self) -> None:
        loop = asyncio.get_running_loop()
        alive = self._pump is not None and not self._pump.done() and self._pump.get_loop() is loop
        if not alive and not self._paused:
            self._pump = loop.create_task(self._run())
            self._pump.add_done_callback(_retrieve)

    async def _run(self) -> None:
        await asyncio.sleep(0)  # callers of the same moment enter together: equal prompts are then computed once
        while self.core.busy and not self._paused:
            self._step()
            await asyncio.sleep(0)

    def _step(self) -> None:
        """After an error no state is trusted: every request, running or waiting, gets it."""
        try:
            self.core.step()
        except BaseException as error:
            for request in self.core.reset():
                request.fail(error)
            raise

    # --- control

    def abort(self) -> None:
        self.core.abort()

    async def pause(self) -> None:
        """Running requests keep their tokens, keys and values, and go on at `resume`."""
        self._paused = True

    async def resume(self) -> None:
        self._paused = False
        if self.core.busy:
            self._start_pump()

    async def prepare(self, manifest: Mapping[str, Any]) -> None:
        self._staging.prepare(manifest)

    async def receive(self, shards: Iterator[Shard]) -> None:
        self._staging.receive(shards)

    async def commit(self, version: int) -> None:
        self._staging.apply()
        self.core.commit(version, keep_kv=self.keep_kv)

    async def rollback(self) -> None:
        self._staging.clear()

    def weights(self) -> Iterator[Shard]:
        """What it holds at the moment."""
        for name, view in self._staging.views.items():
            yield Shard(name, tuple(view.shape), (0,) * view.dim(), view)


def _once(future: asyncio.Future[Completion], settle: Callable[[Any], None]) -> Callable[[Any], None]:
    """A caller that was cancelled has a future that is done already."""

    def call(result: Any) -> None:
        if not future.done():
            settle(result)

    return call


def _keep(results: dict[int, Completion], i: int) -> Callable[[Completion], None]:
    return lambda completion: results.__setitem__(i, completion)


def _ignore(error: BaseException) -> None:
    """The caller of `generate_all` gets the error as an exception."""


def _retrieve(task: asyncio.Task[None]) -> None:
    """Its error has reached every caller: asyncio need not warn that nobody looked at it."""
    if not task.cancelled():
        task.exception()
