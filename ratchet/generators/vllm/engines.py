"""Run vLLM as the core of an `AsyncEngine`, in this process or in processes of its own.

Both cores exchange token ids with vLLM. Text and stop strings are handled here.
"""

from __future__ import annotations

import asyncio
import itertools
import multiprocessing
import os
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib import import_module
from multiprocessing.process import BaseProcess
from typing import Any, Protocol

import torch

from ratchet.errors import RequestFailed
from ratchet.generators.request import EngineCore, GenerationRequest
from ratchet.generators.vllm.media import MediaSettings, check_expanded
from ratchet.generators.vllm.requests import (
    LoRARequests,
    PartialCompletion,
    make_sampling_params,
    make_vllm_prompt,
)
from ratchet.processes.process_group import remove_paths
from ratchet.types import Completion, StopReason

ABORT_AGAIN_S = 0.01  # interval between repeated aborts
END_TIMEOUT_S = 10.0  # time that a process has to end before it is killed
UNPUSHED_LABEL = "default"  # vLLM's label of weights that were not pushed


class VLLMCore(EngineCore, Protocol):
    """The engine core that `VLLMGenerator` drives: generation, weight pushes and placement."""

    sparse_layers: Sequence[int]
    """The layers with experts, whose routes completions have if a request asks for them."""
    media_settings: MediaSettings
    """How the model's media are read."""

    async def call(self, method: str, *arguments: Any) -> list[Any]:
        """Call a method of every worker and return all results."""
        ...

    async def reports_kept_mass(self) -> bool:
        """True if completions have the probability mass that sampling filters kept."""
        ...

    async def halt(self, *, clear_cache: bool) -> None:
        """Stop stepping; running requests keep their tokens.

        clear_cache: drop all keys and values, so that they are recomputed.
        """
        ...

    async def proceed(self) -> None:
        """Continue stepping after `halt`."""
        ...

    async def set_version(self, version: int) -> None:
        """Set the version of the weights. Call it only while the core is halted."""
        ...

    @property
    def loras(self) -> Mapping[str | None, Any]:
        """Return vLLM's `LoRARequest`s by adapter name; None is the policy's, once it is loaded."""
        ...

    async def load_adapter(self, path: str, name: str | None = None) -> None:
        """Load an adapter from a directory.

        name: The name of an additional adapter. None replaces the policy's, which is allowed only
            while the core is halted.
        """
        ...

    async def sleep(self) -> None:
        """Free the accelerator's memory."""
        ...

    async def wake(self) -> None:
        """Restore what `sleep` removed from the accelerator's memory."""
        ...

    def close(self) -> None: ...


# --- in this process


@contextmanager
def _restore_torch_state() -> Iterator[None]:
    """Restore the global torch state that vLLM changes in this process.

    Its worker seeds the random generators and replaces `torch.set_num_threads`.
    """
    set_num_threads = torch.set_num_threads
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        torch.set_num_threads = set_num_threads


class InProcessCore:
    """A core on vLLM's `LLMEngine` in this process.

    Its coroutines never wait, so nothing else runs between the parts of a push.

    on_files_read: called when vLLM has read the model's files.
    """

    sparse_layers: Sequence[int] = ()
    media_settings = MediaSettings()

    def __init__(self, arguments: dict[str, Any], on_files_read: Callable[[], None]) -> None:
        with _restore_torch_state():
            config = (
                import_module("vllm.engine.arg_utils")
                .EngineArgs(**arguments)
                .create_engine_config()
            )
            executor = import_module("vllm.v1.executor.abstract").Executor.get_class(config)
            engine = import_module("vllm.v1.engine.llm_engine").LLMEngine
            self.llm: Any = engine(config, executor, log_stats=False, multiprocess_mode=False)
        self._reports_kept_mass = all(self.llm.collective_rpc("prepare_sampler"))
        on_files_read()
        self.version = 0
        self.loras = LoRARequests()
        self._partials: dict[str, PartialCompletion] = {}
        self._ids = map(str, itertools.count())

    @property
    def busy(self) -> bool:
        return bool(self._partials)

    def add(self, request: GenerationRequest) -> None:
        request.version_starts.append((0, self.version))
        name = next(self._ids)
        parameters = make_sampling_params(request, streams=True)
        lora = self.loras.get(request.sampling.adapter)
        self.llm.add_request(
            name,
            make_vllm_prompt(request, self.version, self.media_settings),
            parameters,
            lora_request=lora,
        )
        self._partials[name] = PartialCompletion(request)

    def step(self) -> None:
        for output in self.llm.step():
            partial_completion = self._partials.get(output.request_id)
            if partial_completion is None:
                continue
            piece = output.outputs[0]
            try:
                check_expanded(partial_completion.request, output.prompt_token_ids)
                partial_completion.add(piece)
                completion = (
                    None
                    if partial_completion.stop is None
                    else partial_completion.build_completion()
                )
            except Exception as error:  # of any type: it fails this request alone
                self._finish(output.request_id, piece)
                partial_completion.request.fail(error)
            else:
                if completion is not None:
                    self._finish(output.request_id, piece)
                    partial_completion.request.deliver(completion)

    def _finish(self, name: str, piece: Any) -> None:
        del self._partials[name]
        if piece.finish_reason is None:
            self.llm.abort_request([name])

    def cancel(self, request: GenerationRequest) -> None:
        self._abort_requests(
            name
            for name, partial_completion in self._partials.items()
            if partial_completion.request is request
        )

    def abort(self) -> None:
        for partial_completion in self._abort_requests(self._partials):
            partial_completion.stop = StopReason.ABORTED
            try:
                partial_completion.request.deliver(partial_completion.build_completion())
            except RequestFailed as error:
                partial_completion.request.fail(error)

    def reset(self) -> list[GenerationRequest]:
        requests = [partial_completion.request for partial_completion in self._partials.values()]
        names = list(self._partials)
        self._partials = {}
        # A broken engine may raise here too; its first error already goes to the callers.
        with suppress(Exception):
            self.llm.abort_request(names)
        return requests

    def _abort_requests(self, names: Iterable[str]) -> list[PartialCompletion]:
        dropped_names = list(names)
        self.llm.abort_request(dropped_names)
        return [self._partials.pop(name) for name in dropped_names]

    def commit(self, version: int, *, keep_kv: bool) -> None:
        self.version = version
        for partial_completion in self._partials.values():
            partial_completion.request.version_starts.append(
                (len(partial_completion.tokens), version)
            )

    async def call(self, method: str, *arguments: Any) -> list[Any]:
        return self.llm.collective_rpc(method, args=arguments)

    async def reports_kept_mass(self) -> bool:
        return self._reports_kept_mass

    async def halt(self, *, clear_cache: bool) -> None:
        if clear_cache:
            self.llm.reset_prefix_cache(reset_running_requests=True)
            self.llm.reset_encoder_cache()

    async def proceed(self) -> None: ...

    async def set_version(self, version: int) -> None:
        self.llm.set_weight_version(str(version))

    async def load_adapter(self, path: str, name: str | None = None) -> None:
        make_request = self.loras.make_factory(path, name)
        self.llm.add_lora(make_request(load_inplace=True))
        self.loras[name] = make_request()

    async def sleep(self) -> None:
        self.llm.sleep(level=1, mode="keep")

    async def wake(self) -> None:
        self.llm.wake_up()

    def close(self) -> None:
        self.abort()
        with _restore_torch_state():
            self.llm.engine_core.shutdown()


# --- in processes of its own


class MultiprocessCore:
    """A core on vLLM's `AsyncLLM`, whose engine and workers run in processes of their own.

    vLLM's processes step by themselves, so this core is never busy. Tokens get the version that
    vLLM's engine had when it drew them.

    on_files_read: called when vLLM has read the model's files, which is certain only after its
      first reply: an engine that reports itself ready may still be reading them.
    """

    busy = False
    sparse_layers: Sequence[int] = ()
    media_settings = MediaSettings()

    def __init__(self, arguments: dict[str, Any], on_files_read: Callable[[], None]) -> None:
        earlier_children = set(multiprocessing.active_children())
        try:
            engine_args = import_module("vllm.engine.arg_utils").AsyncEngineArgs(**arguments)
            engine = import_module("vllm.v1.engine.async_llm").AsyncLLM
            self.llm: Any = engine.from_engine_args(engine_args)
        except BaseException:
            _end_processes(set(multiprocessing.active_children()) - earlier_children)
            raise
        self._children = set(multiprocessing.active_children()) - earlier_children
        self.version = 0
        self.loras = LoRARequests()
        self._running: dict[str, asyncio.Task[None]] = {}
        self._requests: dict[str, GenerationRequest] = {}
        self._aborting: asyncio.Task[None] | None = None
        self._preparation: asyncio.Task[None] | None = None
        self._reports_kept_mass = False
        self._shared_memory: list[str] = []  # paths that only vLLM uses; `close` removes them
        self._on_files_read = on_files_read
        self._ids = map(str, itertools.count())

    def add(self, request: GenerationRequest) -> None:
        name = next(self._ids)
        self._requests[name] = request
        self._running[name] = asyncio.get_running_loop().create_task(self._run(name, request))
        self._running[name].add_done_callback(lambda task: self._drop_finished(name, task))

    def _drop_finished(self, name: str, task: asyncio.Task[None]) -> None:
        """Drop a finished request. If it was cancelled, as by `close`, deliver it as aborted."""
        del self._running[name]
        request = self._requests.pop(name)
        if task.cancelled():
            request.deliver(request.without_tokens(StopReason.ABORTED))

    async def _run(self, name: str, request: GenerationRequest) -> None:
        try:
            request.deliver(await self._complete(name, request))
        except Exception as error:  # of any type: it is raised to the request's caller
            request.fail(error)

    async def _complete(self, name: str, request: GenerationRequest) -> Completion:
        await self._await_preparation()
        partial_completion = PartialCompletion(request, self.sparse_layers)
        has_aborted = False
        parameters = make_sampling_params(request, streams=request.stop_strings is not None)
        prompt = make_vllm_prompt(request, self.version, self.media_settings)
        lora = self.loras.get(request.sampling.adapter)
        async for output in self.llm.generate(
            prompt, parameters, request_id=name, lora_request=lora
        ):
            piece = output.outputs[0]
            check_expanded(request, output.prompt_token_ids)
            partial_completion.add(piece)
            if piece.finish_reason is not None:
                request.version_starts += [
                    (span.start, _parse_version(span.version))
                    for span in piece.weight_versions or ()
                ]
            elif partial_completion.stop is not None and not has_aborted:
                await self.llm.abort(name)
                has_aborted = True
        return partial_completion.build_completion()

    async def _await_preparation(self) -> None:
        """Make vLLM's processes ready. Await this before any other call to vLLM."""
        if self._preparation is None:
            self._preparation = asyncio.get_running_loop().create_task(self._prepare_workers())
        # Shielded, because other callers await the same task when one caller is cancelled.
        await asyncio.shield(self._preparation)

    async def _prepare_workers(self) -> None:
        """Make vLLM's processes end with this process, and repair their samplers."""
        paths_by_worker = await self.llm.collective_rpc(
            "tie_to_driver", args=(socket.gethostname(), os.getpid())
        )
        self._shared_memory = [path for paths in paths_by_worker for path in paths]
        self._reports_kept_mass = all(await self.llm.collective_rpc("prepare_sampler"))
        self._on_files_read()

    def cancel(self, request: GenerationRequest) -> None:
        for name in [name for name, other in self._requests.items() if other is request]:
            self._running[name].cancel()  # vLLM aborts a request whose reader is cancelled

    def abort(self) -> None:
        if self._running:
            self._aborting = asyncio.get_running_loop().create_task(
                self._abort(dict(self._running))
            )

    async def _abort(self, requests_to_abort: dict[str, asyncio.Task[None]]) -> None:
        """Abort requests, repeatedly until all have ended.

        vLLM ignores the abort of a request that has not reached its engine yet.
        """
        while running := [name for name, task in requests_to_abort.items() if not task.done()]:
            await self.llm.abort(running)
            await asyncio.wait([requests_to_abort[name] for name in running], timeout=ABORT_AGAIN_S)

    def commit(self, version: int, *, keep_kv: bool) -> None:
        self.version = version

    def step(self) -> None: ...

    def reset(self) -> list[GenerationRequest]:
        return []

    async def call(self, method: str, *arguments: Any) -> list[Any]:
        await self._await_preparation()
        return await self.llm.collective_rpc(method, args=arguments)

    async def reports_kept_mass(self) -> bool:
        await self._await_preparation()
        return self._reports_kept_mass

    async def halt(self, *, clear_cache: bool) -> None:
        # This also clears the cache of image encodings.
        await self.llm.pause_generation(mode="keep", clear_cache=clear_cache)

    async def proceed(self) -> None:
        await self.llm.resume_generation()

    async def set_version(self, version: int) -> None:
        await self.llm.update_weight_version(str(version))

    async def load_adapter(self, path: str, name: str | None = None) -> None:
        make_request = self.loras.make_factory(path, name)
        await self.llm.add_lora(make_request(load_inplace=True))
        self.loras[name] = make_request()

    async def sleep(self) -> None:
        await self.llm.sleep(level=1, mode="keep")

    async def wake(self) -> None:
        await self.llm.wake_up()

    def close(self) -> None:
        for task in self._running.values():
            task.cancel()
        self.llm.shutdown()
        # Finalize vLLM now: its finalizer needs modules that are gone at the interpreter's exit.
        del self.llm
        _end_processes(self._children)
        remove_paths(self._shared_memory)


def _end_processes(children: Iterable[BaseProcess]) -> None:
    for child in children:
        child.join(END_TIMEOUT_S)
        if child.is_alive():
            child.kill()
            child.join()


def _parse_version(label: str) -> int:
    return 0 if label == UNPUSHED_LABEL else int(label)


CORES: dict[str, Callable[[dict[str, Any], Callable[[], None]], VLLMCore]] = {
    "sync": InProcessCore,
    "async": MultiprocessCore,
}
