"""vLLM as a generator: it has the weights a second time, and gets every version of them by a push
that is checked first.

A push is a transaction. What is received lies in a file; at the commit every worker compares the
checksums while the old weights serve; only then the engine halts between two steps, loads, and goes
on. Running requests keep their tokens.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from shutil import disk_usage, rmtree
from typing import Any

import torch

from ratchet.data.chat.tokenizer import Tokenizer
from ratchet.errors import ConfigError, MissingDependency, ModelError
from ratchet.generators.async_engine import Front
from ratchet.generators.config import VLLMConfig
from ratchet.generators.engine.multi_lora import BASE
from ratchet.generators.engine.stop_strings import TextDecoder
from ratchet.generators.vllm.engines import CORES, VLLMCore
from ratchet.generators.vllm.lora import RANKS, AdapterBox
from ratchet.generators.vllm.media import arguments_of_media, check_installed
from ratchet.generators.vllm.weights import Outbox
from ratchet.models.lora.decoder import Adapter
from ratchet.models.lora.files import load_adapter
from ratchet.models.policy import PolicyModel
from ratchet.models.weights.hf_weights import read_json
from ratchet.models.weights.weight_layout import PEFT
from ratchet.protocols import Shard
from ratchet.types import Completion, Placed, Sampling
from ratchet.utils.temp_dirs import TemporaryFolder

GIB = 2**30
SHARED_MEMORY = Path("/dev/shm")
BACKEND = "ratchet.generators.vllm.worker_extension.VLLMBackend"


class VLLMGeneration(Front):
    """Implements `Generator` and `Placeable` with vLLM. model: whose weights it starts with, and
    whose names pushes have.

    Equal requests give equal tokens but for logits that differ in their last bits, as those of a
    batch of another size do. The seeds are vLLM's: they give other tokens than those of the
    embedded engine.

    Raises MissingDependency without vLLM, ModelError for a model that it can't run, and what vLLM
    raises when it can't start; no process is left behind then.
    """

    core: VLLMCore
    shares_weights = False

    def __init__(
        self, config: VLLMConfig, model: PolicyModel, tokenizer: TextDecoder | None = None
    ) -> None:
        # the distribution has another name where it is built for CPUs
        if find_spec("vllm") is None:
            raise MissingDependency("vllm", extra="vllm", needed_for="generator.kind=vllm")
        on_cpu = import_module("vllm.platforms").current_platform.is_cpu()
        shapes = {name: tuple(weight.shape) for name, weight in model.canonical_weights()}
        dtype = dtype_of(config, on_cpu=on_cpu)
        self.precision = config.quantise or str(dtype).removeprefix("torch.")
        max_context = min(config.max_context or model.max_positions, model.max_positions)
        self._folder = _folder(
            config, sum(weight.numel() * 4 for _, weight in model.canonical_weights())
        )
        self._directory = self._folder.path
        self.config = config
        self._outbox, self._adapters = (
            Outbox(self._directory, shapes, dtype),
            AdapterBox(self._directory),
        )
        self._broken = ""  # why the weights can't be trusted
        try:
            start = self._directory / "start"
            model.save(start)
            if reason := misfit(config, read_json(start / "config.json"), on_cpu=on_cpu):
                raise ModelError(reason)
            arguments = engine_arguments(config, start, dtype, max_context, on_cpu=on_cpu)
            if model.reads_media:
                self._prepare_media(tokenizer, start)
                arguments |= arguments_of_media()
            core = CORES[config.engine](
                arguments, partial(_take_away, start, weights_alone=model.reads_media)
            )
        except BaseException:
            self._folder.close()
            raise
        vocab_size = model.vocab_size
        self._shapes = shapes
        super().__init__(
            core,
            tuple,
            tuple,
            tokenizer,
            vocab_size=vocab_size,
            max_context=max_context,
            keep_kv=config.keep_kv,
            adapters=lambda: [BASE, *self._named],
            reads_media=model.reads_media,
        )

    def _prepare_media(self, tokenizer: TextDecoder | None, start: Path) -> None:
        check_installed()
        if not isinstance(tokenizer, Tokenizer):
            raise ModelError(
                "vLLM prepares images together with text: give the generator the model's tokenizer"
            )
        tokenizer.save(start)

    @property
    def _named(self) -> list[str]:
        return [name for name in self.core.loras if name is not None]

    async def generate(
        self, tokens: Any, sampling: Sampling, media: Sequence[Placed] = ()
    ) -> Completion:
        """Raises as `Front.generate` does, and ModelError after a push that failed in the middle of
        loading."""
        if sampling.truncates:
            raise ConfigError(
                "vLLM doesn't say how much of the distribution its filters kept, which training on "
                "their tokens needs: "
                "set sampling.top_p=1, top_k=0 and min_p=0, or generator.kind=engine"
            )
        if 0 < sampling.temperature < (least := self.config.least_temperature):
            raise ConfigError(
                f"sampling.temperature={sampling.temperature:g}, and vLLM would take {least:g} "
                "instead: "
                "set it to 0 (greedy) or that much"
            )
        if self._broken:
            raise ModelError(
                f"vLLM's weights are neither old nor new since a push failed ({self._broken}): "
                "push again"
            )
        return await super().generate(tokens, sampling, media)

    async def pause(self) -> None:
        await super().pause()
        await self.core.halt(forget=False)

    async def resume(self) -> None:
        await self.core.proceed()
        await super().resume()

    # --- new weights

    async def prepare(self, manifest: Mapping[str, Any]) -> None:
        """Raises ModelError for an adapter that vLLM was not started for."""
        self._outbox.clear()
        adapter: Adapter | None = manifest.get("adapter")
        if adapter is not None:
            self._check_rank(adapter)
        weights = manifest.get("weights") or {}
        shapes = {
            name: tuple(weight["shape"])
            for name, weight in weights.items()
            if name.startswith(PEFT)
        }
        self._adapters.expect(adapter, shapes)

    async def receive(self, shards: Iterator[Shard]) -> None:
        """Raises ModelError for a weight that the model doesn't have, of another shape, or sent
        twice."""
        self._outbox.add(shard for shard in shards if not self._of_adapter(shard))

    def _of_adapter(self, shard: Shard) -> bool:
        """Whether it is, and has been put aside."""
        if not shard.name.startswith(PEFT):
            return False
        self._adapters.add(shard)
        return True

    async def commit(self, version: int) -> None:
        """Raises ModelError where weights are missing, or didn't arrive as they were sent: the old
        ones then go on serving. If vLLM fails while it loads them, running requests end as aborted
        and no other begins before a push that succeeds."""
        manifest, adapter = self._outbox.manifest(), self._adapters.write()
        if manifest is not None:
            await self._ask("check_push", manifest)
        if adapter is not None:
            await self._ask("check_adapter", str(adapter[0]), adapter[1])
            if None not in self.core.loras:  # requests that began without one would end without
                self.core.abort()
        await self.core.halt(
            forget=(manifest is not None or adapter is not None) and not self.keep_kv
        )
        try:
            if manifest is not None:
                await self._load(version)
            if adapter is not None:
                await self._adapt(adapter[0])
            await self.core.label(version)
            self.core.commit(version, keep_kv=self.keep_kv)
        finally:
            if not self._paused:
                await self.core.proceed()
        self._outbox.clear()

    async def _load(self, version: int) -> None:
        try:
            await self._ask("apply_push", version)
        except BaseException as error:
            self._broken = str(error)
            self.core.abort()
            raise
        self._broken = ""

    async def _adapt(self, path: Path) -> None:
        try:
            await self.core.adapt(str(path))
        except Exception as error:  # vLLM's own kinds differ by engine
            self._broken = f"the adapter was not loaded: {error}"
            self.core.abort()
            raise ModelError(self._broken) from error
        self._broken = ""
        self._adapters.took(path)

    async def _ask(self, method: str, *arguments: Any) -> None:
        try:
            reasons = [reason for reason in await self.core.call(method, *arguments) if reason]
        except Exception as error:  # vLLM's own kinds differ by engine
            raise ModelError(f"the push was refused by a worker: {error}") from error
        if reasons:
            raise ModelError(
                f"the push was refused by {len(reasons)} of vLLM's workers: {reasons[0]}"
            )

    async def add_adapter(self, name: str, directory: Path) -> None:
        """From now on requests whose `Sampling.adapter` has this name are served by the adapter in
        a directory of peft's form, over the weights of the policy as they are, without the policy's
        own. Raises ModelError where it can't be read, doesn't fit, or has no place in a vLLM that
        was started for fewer."""
        most = self.config.lora_others
        if name in (BASE, *self._named):
            raise ModelError(f"an adapter '{name}' is served already: give this one another name")
        if len(self._named) == most:
            raise ModelError(
                f"vLLM was started for {most} adapters beside the policy's, and '{name}' is one "
                "more: set "
                f"generator.lora_others={most + 1}"
            )
        stored = load_adapter(directory)
        self._check_rank(stored.adapter)
        stored.check(self._shapes)
        path, checksum = self._adapters.keep(stored)
        await self._ask("check_adapter", str(path), checksum)
        try:
            await self.core.adapt(str(path), name)
        except Exception as error:  # vLLM's own kinds differ by engine
            raise ModelError(f"vLLM can't load adapter '{name}': {error}") from error

    def _check_rank(self, adapter: Adapter) -> None:
        if adapter.lora.rank > self.config.lora_rank:
            raise ModelError(
                f"an adapter has rank {adapter.lora.rank}, and vLLM was started for "
                f"{self.config.lora_rank}: set "
                f"generator.lora_rank={adapter.lora.rank}"
            )

    async def rollback(self) -> None:
        self._outbox.clear()
        self._adapters.expect(None, {})

    # --- who holds the accelerator

    async def onload(self) -> None:
        await self.core.wake()
        await super().resume()

    async def offload(self) -> None:
        """Frees the accelerator's memory of weights and cache; running requests keep their tokens.
        On a CPU it only halts."""
        await super().pause()
        await self.core.sleep()

    async def close(self) -> None:
        """Ends vLLM's processes, and takes its files away. Running requests end as aborted."""
        self._paused = True
        self.core.close()
        self._folder.close()


def engine_arguments(
    config: VLLMConfig, model: Path, dtype: torch.dtype, max_context: int, *, on_cpu: bool
) -> dict[str, Any]:
    """Keywords of vLLM's `EngineArgs`."""
    return {
        "model": str(model),
        "dtype": str(dtype).removeprefix("torch."),
        "max_num_seqs": config.max_running,
        "max_model_len": max_context,
        "kv_cache_memory_bytes": int(config.kv_cache_gib * GIB),
        "block_size": config.block_size,
        "tensor_parallel_size": config.tensor_parallel,
        "pipeline_parallel_size": config.pipeline_parallel,
        "data_parallel_size": config.data_parallel,
        "enforce_eager": config.enforce_eager,
        "enable_prefix_caching": True,
        "enable_sleep_mode": not on_cpu,
        "logprobs_mode": "processed_logprobs",  # without filters: under the temperature alone
        "worker_extension_cls": BACKEND,
        "skip_tokenizer_init": True,
        "generation_config": "vllm",
        "use_tqdm_on_load": False,
        "disable_log_stats": True,
        "seed": 0,
        # of weights that come plain, each time they come
        **({} if config.quantise is None else {"quantization": "fp8"}),
        **_of_adapters(config, on_cpu=on_cpu),
    }


def _of_adapters(config: VLLMConfig, *, on_cpu: bool) -> dict[str, Any]:
    """On a CPU vLLM 0.32 adds to requests without an adapter, beside others with one, what lies in
    its last place: there is one more than adapters, so that this is nothing."""
    if not config.lora_rank:
        return {}
    most = next(rank for rank in RANKS if rank >= config.lora_rank)
    return {
        "enable_lora": True,
        "max_loras": 1 + config.lora_others + on_cpu,
        "max_lora_rank": most,
    }


def dtype_of(config: VLLMConfig, *, on_cpu: bool) -> torch.dtype:
    if config.dtype == "auto":
        return torch.float32 if on_cpu else torch.bfloat16
    return getattr(torch, config.dtype)


def misfit(config: VLLMConfig, model: Mapping[str, Any], *, on_cpu: bool) -> str | None:
    """model: the content of its `config.json`."""
    text = model.get("text_config", model)
    heads = text.get("num_attention_heads")
    if heads is None:  # a family of other names: vLLM judges
        return None
    return config.misfit(
        n_heads=heads,
        n_kv_heads=text.get("num_key_value_heads") or heads,
        head_dim=text.get("head_dim") or text["hidden_size"] // heads,
        n_layers=text["num_hidden_layers"],
        on_cpu=on_cpu,
    )


def _take_away(start: Path, *, weights_alone: bool) -> None:
    """What vLLM has read. weights_alone: the files of what prepares media are read later."""
    if weights_alone:
        for path in start.glob("*.safetensors"):
            path.unlink()
    else:
        rmtree(start)


def _folder(config: VLLMConfig, size: int) -> TemporaryFolder:
    """Make a folder for files of that many bytes at a time."""
    parent = config.handover_dir
    if parent is None and SHARED_MEMORY.is_dir() and disk_usage(SHARED_MEMORY).free > 2 * size:
        parent = str(SHARED_MEMORY)
    # By its process group, so that whoever kills that can take it away.
    return TemporaryFolder(f"vllm-{os.getpgid(0)}", parent)
