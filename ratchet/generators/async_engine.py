"""The asynchronous interface of the generators in this process.

Callers await their completions while a single task runs the core's steps. Steps run in the event
loop's thread, so no other code runs during a step, and pausing and committing need no locks.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

from ratchet.data.chat.tokenizer import Tokenizer
from ratchet.errors import ModelError
from ratchet.generators.engine.stop_strings import TextDecoder
from ratchet.generators.grammar_masks import GrammarCompiler
from ratchet.generators.request import EngineCore, RequestValidator
from ratchet.generators.weight_update import WeightStaging
from ratchet.models.layers.quantized import QuantizedMatrix
from ratchet.models.lora.decoder import Adapter
from ratchet.models.policy import PolicyModel
from ratchet.protocols import Generator, Shard
from ratchet.types import Completion, PlacedMedium, Sampling


class AsyncEngine(Generator):
    """A generator that runs requests on an `EngineCore`.

    When weights are committed, running requests keep their tokens, each with the version that drew
    it. The next tokens are drawn from the new weights. The KV cache is recomputed unless `keep_kv`
    is set. A kept KV cache saves a forward over all running requests. But then new weights read
    keys and values of the old ones, and no learner can score the next tokens exactly.

    Args:
        core: runs the requests.
        weights, parameters, quantised: see `WeightStaging`.
        tokenizer: needed only for requests with stop strings or a grammar.
        max_context: maximum number of tokens of prompt and completion together.
        keep_kv: True to keep the KV cache of running requests when weights are committed.
        records_routes: True if the core can record the experts that computed each token.
        policy: the model that the core reads, if it can have an adapter.
        adapters: returns the names of further adapters that requests may select.
        reads_media: True if the model reads media.
    """

    records_masks = True
    shares_weights = True  # the learner's optimizer changes the same tensors that the core reads

    def __init__(
        self,
        core: EngineCore,
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
        quantised: Callable[[], Iterable[QuantizedMatrix]] = tuple,
    ) -> None:
        self.core = core
        self.keep_kv = keep_kv
        self.policy = policy
        self.tokenizer = tokenizer
        self.records_routes = records_routes
        grammars = None
        if self.records_masks and isinstance(tokenizer, Tokenizer):
            grammars = GrammarCompiler(tokenizer, vocab_size)
        self.validator = RequestValidator(
            vocab_size,
            max_context,
            tokenizer,
            records_routes,
            adapters,
            reads_media,
            grammars,
            passes_grammars=not self.records_masks,
        )
        self._staging = WeightStaging(weights, parameters, quantised)
        # Called after each step of the core.
        self.on_step: Callable[[], None] | None = None
        self._paused = False
        self._step_task: asyncio.Task[None] | None = None

    @property
    def max_context(self) -> int:
        """Return the maximum number of tokens of prompt and completion together."""
        return self.validator.max_context

    @property
    def reads_media(self) -> bool:
        """True if prompts may contain media."""
        return self.validator.reads_media

    @property
    def version(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.core.version

    # --- generating

    async def generate(
        self,
        tokens: Sequence[int] | NDArray[np.int64],
        sampling: Sampling,
        media: Sequence[PlacedMedium] = (),
    ) -> Completion:
        """Return the completion of a prompt.

        Raises:
            DataError: The prompt is empty or too long, or has an unknown token or misplaced media.
            ConfigError: The generator can't apply the sampling settings or read the media.
            RequestFailed: Only this request can't be computed.
            Exception: The error of a step that failed for all requests.
        """
        future: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        deliver = _make_callback(future, future.set_result)
        fail = _make_callback(future, future.set_exception)
        await self.validator.compile_grammar(sampling)
        request = self.validator.admit(tokens, sampling, deliver, fail, media)
        if request.limit == len(request.prompt):
            return request.without_tokens(request.reason_at_limit)
        self.core.add(request)
        self._start_stepping()
        try:
            return await future
        except asyncio.CancelledError:
            self.core.cancel(request)
            raise

    def generate_all(
        self, prompts: Sequence[Sequence[int]], samplings: Sequence[Sampling]
    ) -> list[Completion]:
        """Return one completion per prompt, without an event loop. Raises as `generate` does."""
        assert not self._paused, "a paused generator can't be waited for"
        results: dict[int, Completion] = {}
        errors: list[BaseException] = []
        requests = [
            self.validator.admit(prompt, sampling, _store_result(results, i), errors.append)
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

    # --- the task that runs the steps

    def _start_stepping(self) -> None:
        loop = asyncio.get_running_loop()
        is_running = (
            self._step_task is not None
            and not self._step_task.done()
            and self._step_task.get_loop() is loop
        )
        if not is_running and not self._paused:
            self._step_task = loop.create_task(self._run())
            self._step_task.add_done_callback(_mark_retrieved)

    async def _run(self) -> None:
        # Let callers that arrive together join one step, so that equal prompts are computed once.
        await asyncio.sleep(0)
        while self.core.busy and not self._paused:
            self._step()
            await asyncio.sleep(0)

    def _step(self) -> None:
        """Run one step of the core.

        If the step raises, the core's state can't be trusted. So every request, running or waiting,
        fails with that error.
        """
        try:
            self.core.step()
        except BaseException as error:
            for request in self.core.reset():
                request.fail(error)
            raise
        if self.on_step is not None:
            self.on_step()

    # --- control

    def abort(self) -> None:
        """End all requests; they return their partial completions."""
        self.core.abort()

    async def pause(self) -> None:
        """Stop stepping until `resume`; running requests keep their tokens, keys and values."""
        self._paused = True

    async def resume(self) -> None:
        self._paused = False
        if self.core.busy:
            self._start_stepping()

    async def prepare(self, manifest: Mapping[str, Any]) -> None:
        """Begin a push of weights.

        manifest: see `WeightStaging.prepare`. Its "adapter" is the adapter whose weights are
          pushed, if any.
        """
        adapter = manifest.get("adapter")
        if adapter is not None and adapter != self._staging.adapter:
            self._attach_adapter(adapter)
        self._staging.prepare(manifest)

    def _attach_adapter(self, adapter: Adapter) -> None:
        """Attach an adapter to the model; it has no effect until its weights arrive.

        Raises ModelError if the model can't have an adapter, or has another one.
        """
        policy = self.policy
        if policy is None:
            raise ModelError(
                f"{type(self).__name__} received an adapter, but can't run adapters. Set "
                "generator.kind=engine"
            )
        if policy.adapter is None:
            policy.attach(adapter)
        elif policy.adapter != adapter:
            raise ModelError(
                "the generator already has another adapter. Begin a new run from the model into "
                "which that adapter is merged"
            )
        self._staging.set_adapter(adapter, policy.adapter_weights)

    async def receive(self, shards: Iterator[Shard]) -> None:
        self._staging.receive(shards)

    async def commit(self, version: int) -> None:
        self._staging.apply()
        self.core.commit(version, keep_kv=self.keep_kv)

    async def rollback(self) -> None:
        self._staging.clear()

    @property
    def adopted(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self._staging.adopted

    def weights(self) -> Iterator[Shard]:
        """Yield the current weights."""
        for name, view in self._staging.all_weights():
            yield Shard(name, tuple(view.shape), (0,) * view.dim(), view)


def _make_callback(
    future: asyncio.Future[Completion], set_outcome: Callable[[Any], None]
) -> Callable[[Any], None]:
    """Return a callback that sets the future's outcome, unless the caller has cancelled it."""

    def set_if_pending(result: Any) -> None:
        if not future.done():
            set_outcome(result)

    return set_if_pending


def _store_result(results: dict[int, Completion], index: int) -> Callable[[Completion], None]:
    return lambda completion: results.__setitem__(index, completion)


def _mark_retrieved(task: asyncio.Task[None]) -> None:
    """Retrieve the task's exception, so that asyncio does not warn; every request has raised it."""
    if not task.cancelled():
        task.exception()
