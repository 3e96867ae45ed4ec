"""The configuration sections of the learners. This module imports no torch."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from ratchet.config.base import Section


class LocalConfig(Section):
    """The section of the learner that runs in one process, on one device."""

    builds: ClassVar[str] = "ratchet.learners.local:LocalLearner"
    # True if it can use Ratchet's own CPU kernels; distributed learners use only PyTorch's.
    compiles: ClassVar[bool] = True

    kind: Literal["local"] = "local"
    micro_batch_tokens: Annotated[int, Field(ge=1)] | Literal["auto"] = Field(
        default="auto",
        description="Tokens of one forward and backward; more memory, not another result. A longer "
        "sequence goes alone.",
    )
    workers: Annotated[int, Field(ge=1)] | Literal["auto"] = Field(
        default="auto",
        description="Micro-batches that are computed at once, on a CPU, each by its share of "
        "`threads`; auto: a few, where "
        "it is quicker, measured when the run starts.",
    )
    activation_checkpointing: bool = Field(
        default=False,
        description="Recompute activations in the backward: about a third more time for much less "
        "memory.",
    )
    logprob_chunk_mib: Annotated[int, Field(ge=1)] | Literal["auto"] = Field(
        default="auto",
        description="Logits that exist at a time, in MiB; the rest is recomputed. auto: 16 on a "
        "CPU, 256 on an accelerator.",
    )
    max_bad_steps: int = Field(
        default=3,
        ge=1,
        description="Non-finite optimizer steps in a row after which training stops.",
    )


class DistributedConfig(Section):
    """The base section of learners that run in several processes, each with its own device.

    provider: path of the class that loads models (`ratchet.learners.distributed.model_providers`).
    divides: path of a function (section, model) that raises if the ranks can't divide the model.
    rows: keys whose product is the number of data-parallel ranks, replicas first.
    own_adamw: True if it brings its own AdamW, and accepts no other optimizer.
    placeable: True if it can be offloaded from its accelerator (colocation).
    adapts_pipelines: True if it supports `lora` with `pipeline_parallel`.
    """

    provider: ClassVar[str]
    divides: ClassVar[str]
    rows: ClassVar[tuple[str, ...]]
    own_adamw: ClassVar[bool] = False
    placeable: ClassVar[bool] = True
    adapts_pipelines: ClassVar[bool] = False

    tensor_parallel: int = Field(
        1, ge=1, description="Ranks that share out heads, MLPs and vocabulary."
    )
    sequence_parallel: bool = Field(
        False, description="Tensor-parallel ranks share out the tokens too, between the products."
    )
    context_parallel: int = Field(
        1, ge=1, description="Ranks that share out the tokens of each sequence."
    )
    pipeline_parallel: int = Field(1, ge=1, description="Ranks that share out the layers.")
    pipeline_chunks: int = Field(
        1, ge=1, description="Runs of layers on each pipeline rank: several are interleaved."
    )
    expert_parallel: int = Field(
        1, ge=1, description="Ranks that share out the experts of each layer, among the data ranks."
    )
    micro_batch_tokens: Annotated[int, Field(ge=1)] | Literal["auto"] = Field(
        default="auto",
        description="Tokens of one forward and backward; more memory, not another result. A longer "
        "sequence goes alone.",
    )
    logprob_chunk_mib: Annotated[int, Field(ge=1)] | Literal["auto"] = Field(
        default="auto",
        description="Logits that exist at a time, in MiB; the rest is recomputed. auto: 16 on a "
        "CPU, 256 on an accelerator.",
    )
    max_bad_steps: int = Field(
        default=3,
        ge=1,
        description="Non-finite optimizer steps in a row after which training stops.",
    )


class DTensorConfig(DistributedConfig):
    """The section of the learner that uses PyTorch's own parallelism: FSDP2.

    The model is Ratchet's decoder, or any model of transformers.
    """

    builds: ClassVar[str] = "ratchet.learners.distributed.fsdp:DTensorLearner"
    provider: ClassVar[str] = "ratchet.learners.distributed.fsdp_models:DTensorModels"
    divides: ClassVar[str] = "ratchet.learners.distributed.checks:check_dtensor"
    rows: ClassVar[tuple[str, ...]] = ("dp_replicate", "dp_shard")

    kind: Literal["dtensor"] = "dtensor"
    dp_shard: int = Field(
        1, ge=1, description="Ranks over which rows and weights are divided (FSDP)."
    )
    dp_replicate: int = Field(
        1, ge=1, description="Replicas of the dp_shard ranks, which share out the rows too (HSDP)."
    )
    activation_checkpointing: bool = Field(
        default=False,
        description="Recompute activations in the backward: about a third more time for much less "
        "memory.",
    )
    cpu_offload: bool = Field(
        False, description="Weights and optimizer rest in main memory between uses."
    )


class MegatronConfig(DistributedConfig):
    """The section of the learner on Megatron Core: layers, pipeline schedules, optimizer and
    checkpoints."""

    builds: ClassVar[str] = "ratchet.learners.megatron.learner:MegatronLearner"
    provider: ClassVar[str] = "ratchet.learners.megatron.models:MegatronModels"
    divides: ClassVar[str] = "ratchet.learners.distributed.checks:check_megatron"
    rows: ClassVar[tuple[str, ...]] = ("data_parallel",)
    own_adamw: ClassVar[bool] = True
    placeable: ClassVar[bool] = False
    adapts_pipelines: ClassVar[bool] = True

    kind: Literal["megatron"] = "megatron"
    data_parallel: int = Field(1, ge=1, description="Ranks over which rows are divided.")
    distributed_optimizer: bool = Field(
        default=True,
        description="Data-parallel ranks share out the optimizer state, each for some of the "
        "weights (ZeRO-1).",
    )
    overlap_gradients: bool = Field(
        False, description="Gradients are summed over ranks while the backward still runs."
    )
    weights: Literal["float32", "bfloat16"] = Field(
        default="float32",
        description="Format that weights are stored and computed in; with bfloat16 the optimizer "
        "keeps them in float32 too, and gradients are summed in float32.",
    )
    fp8: Literal["e4m3", "hybrid"] | None = Field(
        default=None,
        description="8-bit format in which Transformer Engine multiplies; hybrid: gradients have "
        "e5m2's range. null: none.",
    )
    fp8_recipe: Literal["tensorwise", "delayed", "blockwise", "mxfp8"] = Field(
        default="tensorwise",
        description="Numbers that share a scale in fp8: see Transformer Engine's recipes.",
    )
    recompute: Literal["none", "attention", "full"] = Field(
        default="none",
        description="Activations that the backward computes again to save memory: none, those of "
        "attention, or of whole layers.",
    )
