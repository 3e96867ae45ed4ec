"""The asynchronous front of the generators of this process: callers wait, a single task makes the
steps.

A step runs in the event loop's own thread, so that between two steps nothing runs: pausing and
committing need no locks.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

from ratchet.errors import ModelError
from ratchet.generators.engine.stop_strings import TextDecoder
from ratchet.generators.request import Core, Entrance
from ratchet.generators.weight_update import Staging
from ratchet.models.layers.quantized import Quantised
from ratchet.models.lora.decoder import Adapter
from ratchet.models.policy import PolicyModel
from ratchet.protocols import Shard
from ratchet.types import Completion, Placed, Sampling


class Front:
    """Implements `Generator` on a `Core`.

    A commit while requests run: the tokens that they have stay, with their version; the next ones
    are drawn from the new weights, over keys and values that are computed anew, unless `keep_kv`.
    Kept ones save a forward over all running requests, and make what follows a mixture of two
    policies that no learner can score exactly.

    weights, parameters, quantised: see `Staging`. tokenizer: needed for requests with stop strings
    only. policy: the model that the core reads, where it can have an adapter. adapters: says which
    others requests may name. reads_media: whether the model does.
    """

    shares_weights = True  # the learner's optimizer changes the very tensors that the core reads
    # that weights are brought to here, whatever is sent; None: as they come
    precision: str | None = None

    def __init__(
        self,
        core: Core,
        weights: Callable[[], Iterable[tuple[str, Tensor]]],
        parameters: Callable[[], Iterable[nn.Parameter]],
        tokenizer: TextDecoder | None,
        *,
        vocab_size: int,
        max_context: int,
        keep_kv: bool,
        records_routes: bool = False,
        policy: PolicyModel | None = None,
        adapters: Callable[[], Sequence[str]] = list,
        reads_media: bool = False,
        quantised: Callable[[], Iterable[Quantised]] = tuple,
    ) -> None:
        self.core, self.keep_kv, self.policy = core, keep_kv, policy
        self.entrance = Entrance(
            vocab_size, max_context, tokenizer, records_routes, adapters, reads_media
        )
        self._staging = Staging(weights, parameters, quantised)
        self._paused = False
        self._pump: asyncio.Task[None] | None = None

    @property
    def tokenizer(self) -> TextDecoder | None:
        return self.entrance.tokenizer

    @property
    def max_context(self) -> int:
        """Tokens of prompt and completion together."""
        return self.entrance.max_context

    @property
    def records_routes(self) -> bool:
        """Whether it can say which experts computed a token."""
        return self.entrance.records_routes

    @property
    def reads_media(self) -> bool:
        """Whether prompts may have some."""
        return self.entrance.reads_media

    @property
    def version(self) -> int:
        return self.core.version

    # --- generating

    async def generate(
        self,
        tokens: Sequence[int] | NDArray[np.int64],
        sampling: Sampling,
        media: Sequence[Placed] = (),
    ) -> Completion:
        """Raises DataError for a prompt that is empty, too long, has an unknown token or media that
        don't lie in it, ConfigError for an impossible sampling or media that the model can't read,
        RequestFailed where this request alone can't be computed, and whatever broke the step of
        all."""
        future: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        deliver, fail = _once(future, future.set_result), _once(future, future.set_exception)
        request = self.entrance.admit(tokens, sampling, deliver, fail, media)
        if request.limit == len(request.prompt):
            return request.without_tokens(request.reason_at_limit)
        self.core.add(request)
        self._start_pump()
        try:
            return await future
        except asyncio.CancelledError:
            self.core.cancel(request)
            raise

    def generate_all(
        self, prompts: Sequence[Sequence[int]], samplings: Sequence[Sampling]
    ) -> list[Completion]:
        """One completion per prompt, without an event loop. Raises as `generate` does."""
        assert not self._paused, "a paused generator can't be waited for"
        results: dict[int, Completion] = {}
        errors: list[BaseException] = []
        requests = [
            self.entrance.admit(prompt, sampling, _keep(results, i), errors.append)
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
                if errors:
                    raise errors[0]
        finally:
            for request in requests if len(results) < len(requests) else ():
                self.core.cancel(request)
        return [results[i] for i in range(len(requests))]

    # --- the task that makes the steps

    def _start_pump(self) -> None:
        loop = asyncio.get_running_loop()
        alive = self._pump is not None and not self._pump.done() and self._pump.get_loop() is loop
        if not alive and not self._paused:
            self._pump = loop.create_task(self._run())
            self._pump.add_done_callback(_retrieve)

    async def _run(self) -> None:
        # callers of the same moment enter together: equal prompts are then computed once
        await asyncio.sleep(0)
        while self.core.busy and not self._paused:
            self._step()
            await asyncio.sleep(0)

    def _step(self) -> None:
        """After an error that the core can't ascribe to single requests no state is trusted: every
        request, running or waiting, gets it."""
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
        """manifest: see `Staging.prepare`; "adapter": to which weights belong, where some do."""
        adapter = manifest.get("adapter")
        if adapter is not None and adapter != self._staging.adapter:
            self._attach(adapter)
        self._staging.prepare(manifest)

    def _attach(self, adapter: Adapter) -> None:
        """The model gets one, which changes nothing before its weights have come. Raises ModelError
        where it has another."""
        policy = self.policy
        if policy is None:
            raise ModelError(
                f"{type(self).__name__} was sent an adapter, and can't run one: set "
                "generator.kind=engine"
            )
        if policy.adapter is None:
            policy.attach(adapter)
        elif policy.adapter != adapter:
            raise ModelError(
                "the generator has another adapter: begin a new run, from the model with that one "
                "merged"
            )
        self._staging.carry(adapter, policy.adapter_weights)

    async def receive(self, shards: Iterator[Shard]) -> None:
        self._staging.receive(shards)

    async def commit(self, version: int) -> None:
        self._staging.apply()
        self.core.commit(version, keep_kv=self.keep_kv)

    async def rollback(self) -> None:
        self._staging.clear()

    @property
    def adopted(self) -> bool:
        return self._staging.adopted

    def weights(self) -> Iterator[Shard]:
        """What it holds at the moment."""
        for name, view in self._staging.shown():
            yield Shard(name, tuple(view.shape), (0,) * view.dim(), view)


def _once(
    future: asyncio.Future[Completion], settle: Callable[[Any], None]
) -> Callable[[Any], None]:
    """A caller that was cancelled has a future that is done already."""

    def call(result: Any) -> None:
        if not future.done():
            settle(result)

    return call


def _keep(results: dict[int, Completion], i: int) -> Callable[[Completion], None]:
    return lambda completion: results.__setitem__(i, completion)


def _retrieve(task: asyncio.Task[None]) -> None:
    """Its error has reached every caller: asyncio need not warn that nobody looked at it."""
    if not task.cancelled():
        task.exception()
