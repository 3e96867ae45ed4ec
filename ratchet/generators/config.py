"""Configuration of the generators. This module does not import torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, field_validator

from ratchet.config.sections import GeneratorSection, ModelSizes
from ratchet.generators.vllm.arguments import (
    check_arguments,
    explain_refusal,
    is_speculative,
    returns_routes,
)


class EngineConfig(GeneratorSection):
    """The embedded engine. By itself it generates in this process, from the learner's own weights.

    Under generator.kind=workers, each worker process has an engine with its own copy of the
    weights.
    """

    builds: ClassVar[str] = "ratchet.generators.engine.engine:EmbeddedEngine"
    records_masks: ClassVar[bool] = True
    can_offload: ClassVar[bool] = False  # it holds no copy of the weights to offload
    rounds_like_learner: ClassVar[bool] = True

    kind: Literal["engine"] = "engine"
    max_running: int = Field(1024, ge=1)
    """Maximum number of requests that are generated at the same time; the others wait."""
    max_context: Annotated[int, Field(ge=1)] | None = None
    """Maximum number of tokens of prompt and completion together; null: as many as the model has
    positions."""
    kv_cache_gib: Annotated[float, Field(gt=0)] | Literal["auto"] = "auto"
    """Maximum size of the KV cache in GiB. auto: the device memory that learners in the same
    process leave, with a micro-batch's activations; without learners half of what is free; on a CPU
    a quarter of main memory."""
    prefill_tokens: int = Field(2048, ge=1)
    """Maximum number of prompt tokens in one forward; a longer prompt has a forward of its own."""
    row_multiple: Annotated[int, Field(ge=1)] | Literal["auto"] = "auto"
    """Token rows of a forward, and of each expert, are padded to a multiple of this, so that a
    request's result doesn't depend on its neighbours; auto: measured when the engine starts."""
    keep_kv: bool = False
    """When new weights arrive, running requests keep the keys and values that the old weights
    computed; false: they are computed anew."""
    quantise: Literal["nf4", "float8"] | None = None
    """Format to which the layers' matrices are quantised when a weight sync delivers them; only for
    engines in worker processes (generator.kind=workers), which have a copy of the weights. null:
    none."""

    @property
    def request_limit(self) -> int:
        return self.max_running

    @property
    def quantisation(self) -> str | None:
        return self.quantise


class HFConfig(GeneratorSection):
    """A generator that runs any causal language model of transformers in this process.

    It is slower than the embedded engine, and is meant for models that the engine can't run.
    """

    builds: ClassVar[str] = "ratchet.generators.hf:HFGenerator"
    records_masks: ClassVar[bool] = True
    can_offload: ClassVar[bool] = False  # it holds no copy of the weights to offload

    kind: Literal["hf"] = "hf"
    max_running: int = Field(64, ge=1)
    """Maximum number of requests in a padded batch; the next batch starts when all of them have
    ended."""
    max_context: Annotated[int, Field(ge=1)] | None = None
    """Maximum number of tokens of prompt and completion together; null: as many as the model has
    positions."""
    keep_kv: bool = False
    """When new weights arrive, running requests keep the keys and values that the old weights
    computed; false: they are computed anew."""

    @property
    def request_limit(self) -> int:
        return self.max_running


# Head sizes that vLLM's attention kernels for the CPU support.
CPU_HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
# These kernels need a block size, in tokens, that is a multiple of this.
CPU_BLOCK = 32


class VLLMConfig(GeneratorSection):
    """The vLLM generator, which has its own copy of the weights.

    The weight sync loads the learner's weights into vLLM's workers, which verify checksums first.
    """

    builds: ClassVar[str] = "ratchet.generators.vllm.generator:VLLMGenerator"
    # vLLM replaces lower positive temperatures by this one.
    min_temperature: ClassVar[float] = 0.01
    copies_weights: ClassVar[bool] = True  # the model passed in only provides the first weights

    kind: Literal["vllm"] = "vllm"
    engine: Literal["async", "sync"] = "async"
    """async: vLLM's engine runs in separate processes, which generate while this process does other
    work; sync: in this process, step by step."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Dtype of vLLM's weights and KV cache; auto: float32 on a CPU, else bfloat16. The learner's
    weights keep their dtype."""
    max_running: int = Field(256, ge=1)
    """Maximum number of requests that are generated at the same time; the others wait."""
    max_context: Annotated[int, Field(ge=1)] | None = None
    """Maximum number of tokens of prompt and completion together; null: as many as the model has
    positions."""
    kv_cache_gib: float = Field(4.0, gt=0)
    """Size of the KV cache of each worker, in GiB."""
    block_size: int = Field(32, ge=16, multiple_of=16)
    """Number of tokens in a block of the KV cache; prompts with equal prefixes share whole
    blocks."""
    tensor_parallel: int = Field(1, ge=1)
    """Number of workers among which every layer is divided."""
    pipeline_parallel: int = Field(1, ge=1)
    """Number of pipeline stages. Each stage has tensor_parallel workers, which hold some of the
    layers."""
    data_parallel: int = Field(1, ge=1)
    """Number of copies of the model, among which requests are divided."""
    enforce_eager: bool = False
    """true: vLLM does not compile the model or capture CUDA graphs. It starts sooner, but generates
    slower on an accelerator."""
    keep_kv: bool = False
    """When new weights arrive, running requests keep the keys and values that the old weights
    computed; false: they are computed anew."""
    lora_rank: int = Field(0, ge=0, le=512)
    """Largest rank of a LoRA adapter that vLLM can receive (`lora`); 0: none."""
    lora_others: int = Field(0, ge=0)
    """Number of adapters that vLLM can serve beside the policy's own, for requests that name them
    (`add_adapter`)."""
    quantise: Literal["float8"] | None = None
    """Format to which vLLM quantises the layers' matrices when a weight sync delivers them; for
    accelerators that multiply matrices in this format. null: none."""
    weight_transfer: Literal["auto", "file", "ipc"] = "auto"
    """Memory through which weights are passed to vLLM's workers; file: a file in handover_dir; ipc:
    a buffer on the learner's accelerator, which the workers map by CUDA IPC; auto: ipc if
    learner.kind=local trains in this process on an accelerator that they can map, else file."""
    handover_dir: str | None = None
    """Directory through which weights are passed to vLLM's workers; all workers must be able to
    read it. null: shared memory, or the temporary directory if shared memory is too small."""
    arguments: dict[str, Any] = Field({})
    """Further arguments of vLLM's engine, by their names in vLLM: {kv_cache_dtype: fp8,
    speculative_config: {method: ngram, num_speculative_tokens: 4}}."""

    @field_validator("arguments")
    @classmethod
    def _check_refused(cls, arguments: dict[str, Any]) -> dict[str, Any]:
        if reason := explain_refusal(arguments):
            raise ValueError(reason)
        return arguments

    def check_keys(self) -> None:
        parallel = [
            name
            for name in ("tensor_parallel", "pipeline_parallel", "data_parallel")
            if getattr(self, name) > 1
        ]
        if self.engine == "sync" and parallel:
            raise ValueError(f"{parallel[0]} needs processes of its own: set engine to async")
        if self.engine == "sync" and self.weight_transfer == "ipc":
            raise ValueError(
                "weight_transfer=ipc maps memory of another process, and engine=sync is in the "
                "learner's: set engine to async"
            )
        if self.lora_others and not self.lora_rank:
            raise ValueError(
                "lora_others: vLLM must know the largest rank of an adapter: set lora_rank too"
            )
        if self.returns_routes and (self.engine == "sync" or self.pipeline_parallel > 1):
            key = "engine=async" if self.engine == "sync" else "pipeline_parallel=1"
            raise ValueError(
                f"arguments.enable_return_routed_experts needs {key}: set it, or remove the "
                "argument"
            )
        if self.lora_rank and self.data_parallel > 1:
            raise ValueError(
                "lora_rank: vLLM loads an adapter into only one copy of the model: set "
                "data_parallel to 1"
            )

    @property
    def request_limit(self) -> int:
        return self.max_running

    @property
    def quantisation(self) -> str | None:
        return self.quantise

    @property
    def max_lora_rank(self) -> int:
        return self.lora_rank

    @property
    def reads_accelerator(self) -> bool:
        return self.weight_transfer == "ipc"

    @property
    def reports_kept_mass(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return not (is_speculative(self.arguments) or self.returns_routes)

    @property
    def returns_routes(self) -> bool:
        """True if vLLM returns the experts that computed each token, by its V2 model runner."""
        return returns_routes(self.arguments)

    @property
    def accelerators(self) -> int:
        return self.tensor_parallel * self.pipeline_parallel * self.data_parallel

    @property
    def environment(self) -> Mapping[str, str]:
        """Return environment variables for vLLM's start; the user's own values take precedence."""
        return {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0" if self.engine == "sync" else "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # the learner computes on the same cores
            "VLLM_LOGGING_LEVEL": "ERROR",
            "VLLM_NO_USAGE_STATS": "1",
            **({"VLLM_USE_V2_MODEL_RUNNER": "1"} if self.returns_routes else {}),
        }

    def check_arguments(self) -> None:
        check_arguments(self.arguments)

    def explain_misfit(self, sizes: ModelSizes, *, on_cpu: bool) -> str | None:
        """Return the reason why vLLM can't run a model of these sizes; None if it can."""
        ranks = self.tensor_parallel
        if on_cpu and self.quantise is not None:
            return (
                f"quantise={self.quantise}: vLLM multiplies in 8 bits only on accelerators: remove "
                "quantise"
            )
        if on_cpu and self.reads_accelerator:
            return (
                "weight_transfer=ipc passes weights through an accelerator's memory: remove "
                "weight_transfer"
            )
        if on_cpu and self.returns_routes:
            return (
                "arguments.enable_return_routed_experts: vLLM records experts by its V2 model "
                "runner, which needs Triton, and its builds for CPUs have none: set "
                "generator.kind=engine, which records them too, or remove the argument"
            )
        if on_cpu and self.lora_rank and sizes.n_experts:
            return (
                f"lora_rank={self.lora_rank}: vLLM computes experts beside adapters with Triton, "
                "and its builds for CPUs have none: set generator.kind=engine"
            )
        if sizes.n_heads % ranks or (sizes.n_kv_heads % ranks and ranks % sizes.n_kv_heads):
            return (
                f"tensor_parallel={ranks} doesn't divide the model's {sizes.n_heads} attention and "
                f"{sizes.n_kv_heads} KV heads: lower tensor_parallel"
            )
        if sizes.n_layers < self.pipeline_parallel:
            return (
                f"pipeline_parallel={self.pipeline_parallel} is more than the model's "
                f"{sizes.n_layers} layers: lower pipeline_parallel"
            )
        if on_cpu and self.pipeline_parallel > 1:
            return (
                "vLLM's pipeline parallelism hangs at the first request on a CPU: set "
                "tensor_parallel or data_parallel instead"
            )
        if on_cpu and sizes.head_dim not in CPU_HEAD_SIZES:
            allowed = ", ".join(map(str, CPU_HEAD_SIZES))
            return (
                f"vLLM on a CPU has no attention for head_dim={sizes.head_dim}, only {allowed}: "
                "choose a model with one of these"
            )
        if on_cpu and self.block_size % CPU_BLOCK:
            return f"block_size={self.block_size} must be a multiple of {CPU_BLOCK} on a CPU"
        return None
