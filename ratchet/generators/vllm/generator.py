"""Generate with vLLM, and load the learner's weights into vLLM at each weight sync.

vLLM has its own copy of the weights. A push is a transaction: received weights are stored where
vLLM's workers can read them. At the commit every worker compares the checksums while the old
weights serve. Then the engine halts between two steps, loads the new weights, and continues.
Running requests keep their tokens.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from shutil import rmtree
from typing import Any

import torch

from ratchet.config.model_shape.decoder_config import EXPERT_KEYS
from ratchet.config.sections import ModelSizes
from ratchet.data.chat.tokenizer import Tokenizer
from ratchet.errors import ConfigError, MissingDependency, ModelError, suggest_install
from ratchet.generators.async_engine import AsyncEngine
from ratchet.generators.config import VLLMConfig
from ratchet.generators.engine.multi_lora import BASE
from ratchet.generators.engine.stop_strings import TextDecoder
from ratchet.generators.vllm.arguments import parse_arguments
from ratchet.generators.vllm.engines import CORES, VLLMCore
from ratchet.generators.vllm.lora import SUPPORTED_RANKS, AdapterSender, check_expert_matrices
from ratchet.generators.vllm.media import (
    MediaSettings,
    load_media_settings,
    make_media_arguments,
)
from ratchet.generators.vllm.structured import check_structured, make_structured_arguments
from ratchet.generators.vllm.transfer import (
    CarrierChoice,
    call_workers,
    choose_transfer,
    count_push_bytes,
    make_push_folder,
)
from ratchet.generators.vllm.weight_names import make_rename, rewrite_start_weights
from ratchet.generators.vllm.weights import FileCarrier, PushWriter
from ratchet.models.lora.decoder import Adapter
from ratchet.models.lora.files import load_adapter
from ratchet.models.policy import DecoderPolicy, PolicyModel
from ratchet.models.weights.hf_weights import read_json
from ratchet.models.weights.weight_layout import PEFT_PREFIX
from ratchet.protocols import Shard
from ratchet.types import Completion, PlacedMedium, Sampling

log = logging.getLogger(__name__)

GIB = 2**30
# Share of the accelerator's memory that must be free when vLLM starts. Its default is 92 %, and the
# learner's weights are there already. The share decides nothing else, because the size of the KV
# cache is given (`request_memory` and `determine_available_memory` of vLLM 0.32).
MIN_FREE_SHARE = 0.05
VERSION = "0.32"  # the supported release of vLLM; its engine core changes with each release
# Maximum number of tokens in a step on a CPU, unless a prompt is longer; vLLM's own default.
CPU_STEP_TOKENS = 4096
TRANSFER_BACKEND = "ratchet"  # the name under which the module below registers its engine
WORKER_EXTENSION = "ratchet.generators.vllm.transfer_engine.VLLMWorkerExtension"


class VLLMGenerator(AsyncEngine):
    """A generator on vLLM.

    Equal requests give equal tokens, except where logits differ in their last bits, as in batches
    of different sizes. vLLM's sampler uses seeds in its own way, so its tokens differ from those of
    the embedded engine.

    Args:
        model: The source of the first weights, and of the names and shapes of pushed weights.
        tokenizer: The model's tokenizer, needed if the model reads media.

    Raises:
        MissingDependency: vLLM is not installed.
        ModelError: vLLM can't run the model.
        ConfigError: vLLM refuses one of `config.arguments`.
        Exception: vLLM's own error if it can't start. No process is left behind.
    """

    core: VLLMCore
    records_masks = False
    shares_weights = False
    can_offload = True

    def __init__(
        self, config: VLLMConfig, model: PolicyModel, tokenizer: TextDecoder | None = None
    ) -> None:
        # Look for the module: the distribution has another name if it is built for CPUs.
        if find_spec("vllm") is None:
            raise MissingDependency("vllm", extra="vllm", needed_for="generator.kind=vllm")
        warn_of_version(import_module("vllm").__version__)
        on_cpu = import_module("vllm.platforms").current_platform.is_cpu()
        weights = dict(model.canonical_weights())
        self._shapes = {name: tuple(weight.shape) for name, weight in weights.items()}
        dtype = choose_dtype(config, on_cpu=on_cpu)
        self.precision = config.quantise or str(dtype).removeprefix("torch.")
        max_context = min(config.max_context or model.max_positions, model.max_positions)
        self._folder = make_push_folder(
            config, sum(weight.numel() * 4 for weight in weights.values())
        )
        self._directory = self._folder.path
        self.config = config
        self._carriers = CarrierChoice(
            choose_transfer(config, model, on_cpu=on_cpu),
            FileCarrier(self._directory, dtype),
            count_push_bytes(weights, dtype),
        )
        self._weight_writer = PushWriter(self._carriers.file, self._shapes)
        self._adapters = AdapterSender(self._directory)
        self._broken_reason = ""  # why the weights can't be used; "" if they can
        try:
            start_directory = self._directory / "start"
            model.save(start_directory)
            model_config = read_json(start_directory / "config.json")
            rewrite_start_weights(start_directory, model_config, model.canonical_weights())
            self._weight_writer.rename = make_rename(model_config)
            if reason := explain_misfit(config, model_config, on_cpu=on_cpu):
                raise ModelError(reason)
            arguments = make_engine_arguments(
                config, start_directory, dtype, max_context, on_cpu=on_cpu
            )
            structured_arguments, self._grammar_refusal = make_structured_arguments(
                tokenizer, model.vocab_size, start_directory
            )
            arguments |= structured_arguments
            arguments |= parse_arguments(config.arguments)
            media_settings = MediaSettings()
            if model.reads_media:
                self._save_tokenizer(tokenizer, start_directory)
                arguments |= make_media_arguments(arguments)
                media_settings = load_media_settings(start_directory, arguments)
            core = CORES[config.engine](
                arguments,
                partial(_remove_start_files, start_directory, only_weights=model.reads_media),
            )
        except BaseException:
            self._folder.close()
            raise
        core.media_settings = media_settings
        core.sparse_layers = _list_recorded_layers(config, model)
        super().__init__(
            core,
            tuple,  # vLLM holds the weights, so `WeightStaging` gets none
            tuple,
            tokenizer,
            vocab_size=model.vocab_size,
            max_context=max_context,
            keep_kv=config.keep_kv,
            records_routes=bool(core.sparse_layers),
            adapters=lambda: [BASE, *self._added_adapters],
            reads_media=model.reads_media,
        )

    def _save_tokenizer(self, tokenizer: TextDecoder | None, start_directory: Path) -> None:
        if not isinstance(tokenizer, Tokenizer):
            raise ModelError(
                "vLLM prepares media together with text: pass the model's tokenizer to the "
                "generator"
            )
        tokenizer.save(start_directory)

    @property
    def _added_adapters(self) -> list[str]:
        return [name for name in self.core.loras if name is not None]

    async def generate(
        self, tokens: Any, sampling: Sampling, media: Sequence[PlacedMedium] = ()
    ) -> Completion:
        """Return the completion of a prompt.

        Raises like `AsyncEngine.generate`. Also raises ConfigError for sampling filters, a grammar
        or a temperature that vLLM can't use, and ModelError after a push that failed while it was
        loaded.
        """
        if sampling.has_filters:
            await self._check_filters()
        if sampling.structured is not None:
            if self._grammar_refusal:
                raise ConfigError(
                    f"sampling.structured: {self._grammar_refusal}. Set generator.kind=engine."
                )
            check_structured(sampling.structured, sampling, self.tokenizer.eos_ids[0])
        if 0 < sampling.temperature < (min_temperature := self.config.min_temperature):
            raise ConfigError(
                f"sampling.temperature={sampling.temperature:g}, but vLLM would use "
                f"{min_temperature:g} instead: set sampling.temperature to 0 (greedy), or to "
                f"{min_temperature:g} or more"
            )
        if self._broken_reason:
            raise ModelError(
                "a push failed while vLLM loaded it, so its weights are a mixture of old and new "
                f"ones ({self._broken_reason}): push again"
            )
        return await super().generate(tokens, sampling, media)

    async def _check_filters(self) -> None:
        """Raise ConfigError if vLLM can't report the probability mass that its filters keep."""
        fix = "set sampling.top_p=1, top_k=0 and min_p=0"
        if not self.config.reports_kept_mass:
            raise ConfigError(
                "vLLM with speculative decoding or returned routes of experts doesn't report the "
                f"probability mass that sampling filters keep, which training needs: {fix}, or "
                "remove that from generator.arguments"
            )
        if not await self.core.reports_kept_mass():
            raise ConfigError(
                "vLLM's V2 model runner doesn't report the probability mass that sampling "
                "filters keep, which training needs: set VLLM_USE_V2_MODEL_RUNNER=0 in the "
                f"environment, or {fix}"
            )

    async def pause(self) -> None:
        await super().pause()
        await self.core.halt(clear_cache=False)

    async def resume(self) -> None:
        await self.core.proceed()
        await super().resume()

    # --- new weights

    async def prepare(self, manifest: Mapping[str, Any]) -> None:
        """Begin a push.

        Raises ModelError for an adapter whose rank exceeds `lora_rank`, or that has only some of
        an expert's matrices.
        """
        self._weight_writer.clear()
        adapter: Adapter | None = manifest.get("adapter")
        if adapter is not None:
            self._check_rank(adapter)
        weights = manifest.get("weights") or {}
        shapes = {
            name: tuple(weight["shape"])
            for name, weight in weights.items()
            if name.startswith(PEFT_PREFIX)
        }
        check_expert_matrices(shapes)
        self._adapters.expect(adapter, shapes)

    async def receive(self, shards: Iterator[Shard]) -> None:
        """Store the shards of a push.

        Raises ModelError for a weight that is unknown, has another shape, or was sent twice.
        """
        weights = (shard for shard in shards if not self._take_adapter_shard(shard))
        first = next(weights, None)
        if first is None:
            return
        if self._weight_writer.is_empty:
            self._weight_writer.carrier = await self._carriers.choose(self.core, first.tensor)
        self._weight_writer.add(itertools.chain([first], weights))

    def _take_adapter_shard(self, shard: Shard) -> bool:
        """Store a shard if it belongs to the adapter, and return True; else return False."""
        if not shard.name.startswith(PEFT_PREFIX):
            return False
        self._adapters.add(shard)
        return True

    async def commit(self, version: int) -> None:
        """Check the pushed weights in every worker and load them.

        Raises ModelError if weights are missing or damaged; the old ones then continue to serve. If
        vLLM fails while it loads them, running requests end as aborted, and new ones fail until a
        push succeeds.
        """
        manifest = self._weight_writer.build_manifest()
        adapter = self._adapters.write()
        if manifest is not None:
            await call_workers(self.core, "check_push", manifest)
        if adapter is not None:
            await call_workers(self.core, "check_adapter", str(adapter[0]), adapter[1])
            # Abort requests that began before the first adapter: they would never use it.
            if None not in self.core.loras:
                self.core.abort()
        await self.core.halt(
            clear_cache=(manifest is not None or adapter is not None) and not self.keep_kv
        )
        try:
            if manifest is not None:
                await self._load_weights(version)
            if adapter is not None:
                await self._load_adapter(adapter[0])
            await self.core.set_version(version)
            self.core.commit(version, keep_kv=self.keep_kv)
        finally:
            if not self._paused:
                await self.core.proceed()
        self._weight_writer.clear()

    async def _load_weights(self, version: int) -> None:
        try:
            await call_workers(self.core, "apply_push", version)
        except BaseException as error:
            self._broken_reason = str(error)
            self.core.abort()
            raise
        self._broken_reason = ""

    async def _load_adapter(self, path: Path) -> None:
        try:
            await self.core.load_adapter(str(path))
        except Exception as error:  # vLLM's exception types differ by engine
            self._broken_reason = f"the adapter was not loaded: {error}"
            self.core.abort()
            raise ModelError(self._broken_reason) from error
        self._broken_reason = ""
        self._adapters.mark_loaded(path)

    async def add_adapter(self, name: str, directory: Path) -> None:
        """Load an adapter from a directory in peft's format, for requests that name it.

        Requests whose `Sampling.adapter` is `name` use it in place of the policy's own adapter,
        over the policy's current base weights. Raises ModelError if the adapter can't be read or
        doesn't fit the model, if its name is taken, or if `lora_others` adapters are loaded.
        """
        max_adapters = self.config.lora_others
        if name in (BASE, *self._added_adapters):
            raise ModelError(f"the name '{name}' is taken by another adapter: choose another name")
        if len(self._added_adapters) == max_adapters:
            raise ModelError(
                f"vLLM was started for {max_adapters} adapters beside the policy's, so it can't "
                f"add '{name}': set generator.lora_others={max_adapters + 1}"
            )
        stored = load_adapter(directory)
        stored.check_served(name)
        self._check_rank(stored.adapter)
        stored.check(self._shapes)
        check_expert_matrices(stored.weights)
        path, checksum = self._adapters.write_stored(stored)
        await call_workers(self.core, "check_adapter", str(path), checksum)
        try:
            await self.core.load_adapter(str(path), name)
        except Exception as error:  # vLLM's exception types differ by engine
            raise ModelError(f"vLLM can't load adapter '{name}': {error}") from error

    def _check_rank(self, adapter: Adapter) -> None:
        if adapter.lora.rank > self.config.lora_rank:
            raise ModelError(
                f"an adapter has rank {adapter.lora.rank}, but vLLM was started for ranks up to "
                f"{self.config.lora_rank}: set generator.lora_rank={adapter.lora.rank}"
            )

    async def rollback(self) -> None:
        self._weight_writer.clear()
        self._adapters.expect(None, {})

    # --- placement on the accelerator

    async def onload(self) -> None:
        await self.core.wake()
        await super().resume()

    async def offload(self) -> None:
        """Free the weights and KV cache on the accelerator; running requests keep their tokens.

        On a CPU, it only halts generation.
        """
        await super().pause()
        await self.core.sleep()

    async def close(self) -> None:
        """End vLLM's processes and remove its files. Running requests end as aborted."""
        self._paused = True
        self.core.close()
        self._carriers.close()
        self._folder.close()


def warn_of_version(installed: str) -> None:
    """Log a warning if the installed vLLM is not of the release that Ratchet is tested with."""
    if not f"{installed}.".startswith(f"{VERSION}."):
        log.warning(
            "vLLM %s is installed, but Ratchet is tested with vLLM %s, and it uses internals of "
            "vLLM's engine that change between releases: %s",
            installed,
            VERSION,
            suggest_install("vllm"),
        )


def make_engine_arguments(
    config: VLLMConfig, model: Path, dtype: torch.dtype, max_context: int, *, on_cpu: bool
) -> dict[str, Any]:
    """Return the keywords of vLLM's `EngineArgs`."""
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
        **({} if on_cpu else {"gpu_memory_utilization": MIN_FREE_SHARE}),
        "enable_sleep_mode": not on_cpu,
        "logprobs_mode": "processed_logprobs",  # after temperature and filters
        "worker_extension_cls": WORKER_EXTENSION,
        "weight_transfer_config": {"backend": TRANSFER_BACKEND},
        "skip_tokenizer_init": True,
        "generation_config": "vllm",
        "use_tqdm_on_load": False,
        "disable_log_stats": True,
        "seed": 0,
        # Pushed weights are unquantised; vLLM quantises them.
        **({} if config.quantise is None else {"quantization": "fp8"}),
        **_make_adapter_arguments(config, on_cpu=on_cpu),
        **(_make_prefill_arguments(max_context) if on_cpu else {}),
    }


def _make_prefill_arguments(max_context: int) -> dict[str, Any]:
    """Return the keywords by which each prompt is computed in one step.

    If prompts together have more tokens than a step, vLLM splits a prompt over steps. On a CPU,
    vLLM 0.32 then ends with an error if the request has a seed ("CPU Generator does not use
    offset").
    """
    return {
        "enable_chunked_prefill": False,
        "max_num_batched_tokens": max(CPU_STEP_TOKENS, max_context),
    }


def _make_adapter_arguments(config: VLLMConfig, *, on_cpu: bool) -> dict[str, Any]:
    """Return the keywords for adapters; {} if the configuration allows none.

    On a CPU, vLLM 0.32 applies its last adapter slot to requests without an adapter that run beside
    requests with one. So one more slot than needed is requested, and it stays empty. Adapters of
    fused experts are loaded beside those of each expert's matrices.
    """
    if not config.lora_rank:
        return {}
    max_rank = next(rank for rank in SUPPORTED_RANKS if rank >= config.lora_rank)
    return {
        "enable_lora": True,
        "max_loras": 1 + config.lora_others + on_cpu,
        "max_lora_rank": max_rank,
        "enable_mixed_moe_lora_format": True,
    }


def choose_dtype(config: VLLMConfig, *, on_cpu: bool) -> torch.dtype:
    """Return the dtype of vLLM's weights and KV cache."""
    if config.dtype == "auto":
        return torch.float32 if on_cpu else torch.bfloat16
    return getattr(torch, config.dtype)


def explain_misfit(config: VLLMConfig, model: Mapping[str, Any], *, on_cpu: bool) -> str | None:
    """Return the reason why vLLM can't run a model; None if it can or if this is unknown.

    model: the content of the model's `config.json`.
    """
    text_config = model.get("text_config", model)
    heads = text_config.get("num_attention_heads")
    if heads is None:  # the model family uses other keys
        return None
    sizes = ModelSizes(
        n_heads=heads,
        n_kv_heads=text_config.get("num_key_value_heads") or heads,
        head_dim=text_config.get("head_dim") or text_config["hidden_size"] // heads,
        n_layers=text_config["num_hidden_layers"],
        n_experts=max(text_config.get(key) or 0 for key in (*EXPERT_KEYS, "n_routed_experts")),
    )
    return config.explain_misfit(sizes, on_cpu=on_cpu)


def _list_recorded_layers(config: VLLMConfig, model: PolicyModel) -> Sequence[int]:
    """Return the layers whose experts vLLM returns as routes."""
    if config.returns_routes and isinstance(model, DecoderPolicy):
        return model.shape.sparse_layers
    return ()


def _remove_start_files(start_directory: Path, *, only_weights: bool) -> None:
    """Remove the model files that vLLM has read.

    only_weights: True keeps all files but weights; the media processor reads them later.
    """
    if only_weights:
        for path in start_directory.glob("*.safetensors"):
            path.unlink()
    else:
        rmtree(start_directory)
