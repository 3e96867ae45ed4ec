"""The configuration sections of the learners. This module imports no torch."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field

from ratchet.config.sections import LearnerSection

MicroBatchTokens = Annotated[
    Annotated[int, Field(ge=1)] | Literal["auto"],
    Field(
        description="Token limit of a micro-batch (one forward and backward). More tokens need "
        "more memory, and the result is the same. A sequence above the limit is a micro-batch of "
        "its own. auto: 2304 on a CPU; on CUDA what its memory allows, at most 16384 "
        "(docs/accelerators.md).",
    ),
]
PackedAttentionKind = Annotated[
    Literal["auto", "padded", "varlen"],
    Field(
        description="Attention over packed sequences: padded to calls of equal lengths, or varlen, "
        "PyTorch's kernel for variable lengths on CUDA. auto: varlen where it works.",
    ),
]


class LocalConfig(LearnerSection):
    """The section of the learner that runs in one process, on one device."""

    builds: ClassVar[str] = "ratchet.learners.local:LocalLearner"
    supports_cpu_kernels: ClassVar[bool] = True
    supports_background_save: ClassVar[bool] = True

    kind: Literal["local"] = "local"
    micro_batch_tokens: MicroBatchTokens = "auto"
    workers: Annotated[int, Field(ge=1)] | Literal["auto"] = "auto"
    """Micro-batches that are computed at the same time on a CPU. The threads (key `threads`) are
    divided evenly over them. auto: measured when the run starts."""
    activation_checkpointing: bool = False
    """Activation (gradient) checkpointing: recompute activations in the backward. Takes about a
    third more time and much less memory."""
    attention: PackedAttentionKind = "auto"
    logprob_chunk_mib: Annotated[int, Field(ge=1)] | Literal["auto"] = "auto"
    """MiB of logits that exist at a time; the backward recomputes them. auto: 16 on a CPU, 256 on
    an accelerator."""
    max_bad_steps: int = Field(default=3, ge=1)
    """Consecutive non-finite optimizer steps after which training stops."""

    @property
    def measures_workers(self) -> bool:
        return self.workers == "auto"

    def with_workers(self, workers: int) -> Self:
        return self.model_copy(update={"workers": workers}) if self.measures_workers else self


class DistributedConfig(LearnerSection):
    """The base section of learners that run in several processes, each with its own device.

    provider: path of the class that loads models (`ratchet.learners.distributed.model_providers`).
    division_check: path of a function (section, model, lora) that raises if the ranks can't divide
      the model with its adapter.
    config_check: path of such a function (section, config.json, lora, model.backend), which
      `ratchet check` calls; None: the model has to be loaded.
    data_parallel_keys: keys whose product is the number of data-parallel ranks. The last key is the
      number of shards; keys before it are numbers of replicas.
    """

    is_distributed: ClassVar[bool] = True
    provider: ClassVar[str]
    division_check: ClassVar[str]
    config_check: ClassVar[str | None] = None
    data_parallel_keys: ClassVar[tuple[str, ...]]

    tensor_parallel: int = Field(1, ge=1)
    """Ranks over which heads, MLPs and vocabulary are divided."""
    sequence_parallel: bool = False
    """Between matrix products, divide tokens over the tensor-parallel ranks too."""
    context_parallel: int = Field(1, ge=1)
    """Ranks over which the tokens of each sequence are divided."""
    pipeline_parallel: int = Field(1, ge=1)
    """Ranks over which layers are divided."""
    pipeline_chunks: int = Field(1, ge=1)
    """Pipeline stages on each pipeline rank; more than one interleaves them."""
    stage_layers: tuple[Annotated[int, Field(ge=1)], ...] = ()
    """Layers of each pipeline stage, in the order of the layers; empty: about as many in each. With
    pipeline_chunks the first stages of all ranks come first."""
    expert_parallel: int = Field(1, ge=1)
    """Data-parallel ranks over which the experts of each layer are divided."""
    micro_batch_tokens: MicroBatchTokens = "auto"
    logprob_chunk_mib: Annotated[int, Field(ge=1)] | Literal["auto"] = "auto"
    """MiB of logits that exist at a time; the backward recomputes them. auto: 16 on a CPU, 256 on
    an accelerator."""
    max_bad_steps: int = Field(default=3, ge=1)
    """Consecutive non-finite optimizer steps after which training stops."""

    @property
    def tensor_ranks(self) -> int:
        return self.tensor_parallel

    def check_keys(self) -> None:
        if self.pipeline_chunks > 1 and self.pipeline_parallel == 1:
            raise ValueError(
                f"pipeline_chunks={self.pipeline_chunks} divides the stages of a pipeline: set "
                "pipeline_parallel too, or remove it"
            )
        stages = self.pipeline_parallel * self.pipeline_chunks
        if self.stage_layers and len(self.stage_layers) != stages:
            raise ValueError(
                f"stage_layers={list(self.stage_layers)} has {len(self.stage_layers)} stages, but "
                f"pipeline_parallel x pipeline_chunks is {stages}: give {stages} numbers, or none"
            )

    @property
    def pipeline_ranks(self) -> int:
        return self.pipeline_parallel

    @property
    def expert_ranks(self) -> int:
        return self.expert_parallel

    @property
    def uses_sequence_parallelism(self) -> bool:
        return self.sequence_parallel

    @property
    def can_share_prefixes(self) -> bool:
        """Return True if a prefix that sequences share may be computed once.

        Context parallelism can't divide it between ranks.
        """
        return self.context_parallel == 1


class DTensorConfig(DistributedConfig):
    """The section of the learner that uses PyTorch's FSDP2.

    The model is Ratchet's decoder, or any model of transformers.
    """

    builds: ClassVar[str] = "ratchet.learners.distributed.fsdp:DTensorLearner"
    provider: ClassVar[str] = "ratchet.learners.distributed.fsdp_models:DTensorModels"
    division_check: ClassVar[str] = "ratchet.learners.distributed.checks:check_dtensor"
    data_parallel_keys: ClassVar[tuple[str, ...]] = ("dp_replicate", "dp_shard")
    supports_background_save: ClassVar[bool] = True

    kind: Literal["dtensor"] = "dtensor"
    dp_shard: int = Field(1, ge=1)
    """Ranks over which rows and weights are divided (FSDP)."""
    dp_replicate: int = Field(1, ge=1)
    """Replicas of the dp_shard ranks, over which rows are divided too (HSDP)."""
    activation_checkpointing: bool = False
    """Activation (gradient) checkpointing: recompute activations in the backward. Takes about a
    third more time and much less memory."""
    attention: PackedAttentionKind = "auto"
    cpu_offload: bool = False
    """Keep weights and optimizer state in host memory between uses."""

    def check_keys(self) -> None:
        super().check_keys()
        if self.attention == "varlen" and self.context_parallel > 1:
            raise ValueError(
                "attention=varlen has no effect with context_parallel, whose ranks attend to parts "
                "of sequences: set attention to auto"
            )


class MegatronConfig(DistributedConfig):
    """The section of the learner that uses Megatron Core.

    Layers, pipeline schedules, optimizer and checkpoints are Megatron's.
    """

    builds: ClassVar[str] = "ratchet.learners.megatron.learner:MegatronLearner"
    provider: ClassVar[str] = "ratchet.learners.megatron.models:MegatronModels"
    division_check: ClassVar[str] = "ratchet.learners.distributed.checks:check_megatron"
    config_check: ClassVar[str | None] = "ratchet.learners.distributed.checks:check_megatron_config"
    data_parallel_keys: ClassVar[tuple[str, ...]] = ("data_parallel",)
    has_own_adamw: ClassVar[bool] = True
    supports_freeze: ClassVar[bool] = False

    kind: Literal["megatron"] = "megatron"
    data_parallel: int = Field(1, ge=1)
    """Ranks over which rows are divided."""
    first_stage_layers: Annotated[int, Field(ge=1)] | None = None
    """Layers on the first pipeline rank (Megatron's num_layers_in_first_pipeline_stage); null:
    about as many as on the other ranks."""
    last_stage_layers: Annotated[int, Field(ge=1)] | None = None
    """Layers on the last pipeline rank (Megatron's num_layers_in_last_pipeline_stage); null: about
    as many as on the other ranks."""
    distributed_optimizer: bool = True
    """Divide the optimizer state over the data-parallel ranks (ZeRO-1)."""
    overlap_gradients: bool = False
    """Sum gradients over ranks while the backward still runs."""
    weights: Literal["float32", "bfloat16"] = "float32"
    """Format in which weights are stored and multiplied. With bfloat16 the optimizer also keeps
    float32 master weights, and gradients are summed in float32."""
    fp8: Literal["e4m3", "hybrid"] | None = None
    """FP8 format of Transformer Engine's matrix products; hybrid: e5m2 for gradients, e4m3
    otherwise; null: no FP8."""
    fp8_recipe: Literal["tensorwise", "delayed", "blockwise", "mxfp8"] = "tensorwise"
    """Scaling recipe of Transformer Engine: which numbers share an FP8 scale."""
    recompute: Literal["none", "attention", "full"] = "none"
    """Activations that the backward recomputes to save memory: none, those of attention, or those
    of whole layers."""
    mtp_loss_scaling_factor: float = Field(0.0, ge=0)
    """Factor of the loss of multi-token prediction, which is added to the stage's loss to train the
    MTP layers of DeepSeek-V3 and GLM-4-MoE; 0: they are left out."""

    def check_keys(self) -> None:
        super().check_keys()
        ends = self.first_stage_layers, self.last_stage_layers
        if self.stage_layers and ends != (None, None):
            raise ValueError(
                "stage_layers has the layers of the first and of the last rank too: remove "
                "first_stage_layers and last_stage_layers"
            )

    @property
    def can_share_prefixes(self) -> bool:
        # MTP layers read the token after each, and sequences go on differently after a prefix.
        return super().can_share_prefixes and not self.mtp_loss_scaling_factor

    @property
    def fp8_format(self) -> str | None:
        return self.fp8

    @property
    def weight_format(self) -> str:
        return self.weights

    @property
    def recomputes_layers(self) -> bool:
        return self.recompute == "full"
