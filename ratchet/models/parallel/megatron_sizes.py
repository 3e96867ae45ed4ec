"""Check that Megatron Core can divide a decoder, before any process starts.

This module does not import Megatron.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec

from ratchet.config.model_shape.decoder_config import DecoderConfig
from ratchet.config.model_shape.megatron_decoder import MegatronDecoderConfig
from ratchet.errors import ConfigError, MissingDependency, ModelError
from ratchet.models.parallel.sharding import ModelShard, ShardIndex, StageIndex, check_even


def require_megatron() -> None:
    """Raise MissingDependency if megatron-core is not installed."""
    if find_spec("megatron") is None or find_spec("megatron.core") is None:
        raise MissingDependency(
            "megatron-core", extra="megatron", needed_for="learner.kind=megatron"
        )


@dataclass(frozen=True)
class Fp8Format:
    """The fp8 format of Transformer Engine's matrix products."""

    format: str  # `MegatronConfig.fp8`
    recipe: str  # `MegatronConfig.fp8_recipe`

    @property
    def size_multiple(self) -> int:
        """The number that must divide both dimensions of a multiplied matrix."""
        return {"mxfp8": 32, "blockwise": 128}.get(self.recipe, 16)

    def check(self, capability: tuple[int, int]) -> None:
        """Raise ConfigError if a CUDA device of this compute capability lacks the format."""
        required = {"mxfp8": (10, 0), "blockwise": (9, 0)}.get(self.recipe, (8, 9))
        if capability < required:
            device_version, required_version = (
                ".".join(map(str, version)) for version in (capability, required)
            )
            fix = (
                "choose another fp8_recipe, or remove learner.fp8"
                if capability >= (8, 9)
                else "remove learner.fp8"
            )
            raise ConfigError(
                f"learner.fp8_recipe={self.recipe} needs a device of compute capability "
                f"{required_version}, but this one has {device_version}: {fix}"
            )

    def check_shape(self, shape: DecoderConfig, tensor: int) -> None:
        """Raise ModelError if the format can't multiply a decoder's matrices.

        Args:
            shape: The shape of the decoder.
            tensor: The number of tensor-parallel ranks.
        """
        if isinstance(shape, MegatronDecoderConfig) and (shape.latent or shape.clamped_glu):
            raise ModelError(
                f"learner.fp8={self.format} has no layers for a {shape.family} model: remove "
                "learner.fp8"
            )
        mlp = shape.expert_intermediate_size if shape.n_experts else shape.intermediate_size
        qkv_width = (shape.n_heads + 2 * shape.n_kv_heads) * shape.head_dim // tensor
        widths = {
            "hidden_size": shape.hidden_size,
            "the width of the QKV projection": qkv_width,
            "intermediate_size": mlp // tensor,
        }
        for name, width in widths.items():
            if width % self.size_multiple:
                raise ModelError(
                    f"learner.fp8_recipe={self.recipe} needs matrices whose sides are multiples of "
                    f"{self.size_multiple}, but {name} is {width} on a rank: lower "
                    "learner.tensor_parallel, or remove learner.fp8"
                )


@dataclass(frozen=True)
class PipelineStage(StageIndex):
    """The index of a pipeline stage, where the ranks at the ends may have numbers of layers.

    Stages are numbered as in `MegatronShard`: with p pipeline ranks, stage s is on rank s % p.
    """

    chunks: int = 1  # stages of each rank
    first_layers: int | None = None  # layers of the first rank; None: an even share of the rest
    last_layers: int | None = None  # layers of the last rank; None: an even share of the rest

    def count_layers(self, total: int) -> Sequence[int]:
        """Return the number of layers of each stage of a model with `total` layers.

        If a rank at an end has a number, the other ranks share the rest, and each rank divides its
        layers among its stages.
        """
        if self.first_layers is None and self.last_layers is None:
            return super().count_layers(total)
        first = [] if self.first_layers is None else [self.first_layers]
        last = [] if self.last_layers is None else [self.last_layers]
        ranks = self.count // self.chunks
        others = ranks - len(first) - len(last)
        rest = total - sum(first) - sum(last)
        by_rank = first + [len(ShardIndex(i, others).range(rest)) for i in range(others)] + last
        return [
            len(ShardIndex(chunk, self.chunks).range(layers))
            for chunk in range(self.chunks)
            for layers in by_rank
        ]


@dataclass(frozen=True)
class MegatronSizes:
    """The number of ranks of each kind of parallelism.

    The number of data-parallel ranks is the world size divided by tensor x context x pipeline.
    """

    tensor: int = 1
    context: int = 1
    pipeline: int = 1
    experts: int = 1
    chunks: int = 1  # stages per rank of an interleaved pipeline
    sequence: bool = False  # sequence parallelism, see `ratchet.models.parallel.tensor_parallel`
    first_layers: int | None = None  # layers of the first pipeline rank, see `PipelineStage`
    last_layers: int | None = None  # layers of the last pipeline rank
    stage_layers: tuple[int, ...] = ()  # layers of each pipeline stage, in place of these two

    def stage(self, rank: int, chunk: int = 0) -> PipelineStage:
        """Return the index of a pipeline rank's chunk among all pipeline stages."""
        return PipelineStage(
            rank + self.pipeline * chunk,
            self.pipeline * self.chunks,
            self.stage_layers,
            self.chunks,
            self.first_layers,
            self.last_layers,
        )

    def check(self, shape: DecoderConfig) -> None:
        """Raise ModelError if Megatron Core can't divide or build the decoder."""
        shard = ModelShard(ShardIndex(0, self.tensor), self.stage(0), ShardIndex(0, self.experts))
        # Unlike the built-in decoder, Megatron has biases under tensor parallelism too.
        shard.check(replace(shape, out_bias=False, mlp_bias=False))
        if isinstance(shape, MegatronDecoderConfig):
            self._check_family(shape)
        self._check_ends(shape.n_layers)
        if shape.n_experts and self.tensor > 1 and not self.sequence:
            raise ModelError(
                "experts under tensor parallelism need learner.sequence_parallel=true: without it "
                "every rank would send all tokens to the experts"
            )

    def _check_family(self, shape: MegatronDecoderConfig) -> None:
        """Raise ModelError if ranks can't divide what only some families have."""
        totals = {"columns of shared experts": shape.shared_intermediate_size}
        if shape.mtp_layers:
            totals["rows of eh_proj"] = shape.hidden_size
            if shape.tied:
                raise ModelError(
                    "learner.mtp_loss_scaling_factor is not for a model with tie_word_embeddings: "
                    "set it to 0"
                )
        if shape.latent is not None:
            totals["rows of latent queries"] = shape.latent.q_rank
            totals["rows of latent keys"] = shape.latent.kv_rank + shape.rotary_dim
        check_even(self.tensor, totals)

    def _check_ends(self, layers: int) -> None:
        """Raise ModelError if the first and the last rank leave no layers for other stages."""
        layers_by_key = {
            f"learner.{name}_stage_layers": size
            for name, size in (("first", self.first_layers), ("last", self.last_layers))
            if size is not None
        }
        if not layers_by_key:
            return
        keys = " and ".join(f"{key}={size}" for key, size in layers_by_key.items())
        if self.pipeline == 1:
            raise ModelError(
                f"{keys}: a pipeline of one rank has all layers. Set learner.pipeline_parallel too."
            )
        if too_small := [key for key, size in layers_by_key.items() if size < self.chunks]:
            raise ModelError(
                f"{too_small[0]} is less than learner.pipeline_chunks={self.chunks}, the stages of "
                f"that rank. Set it to at least {self.chunks}."
            )
        others = self.pipeline - len(layers_by_key)
        needed = others * self.chunks
        rest = layers - sum(layers_by_key.values())
        if rest < needed or (rest and not others):
            key, size = list(layers_by_key.items())[-1]
            largest = size + rest - needed
            fix = f"Set {key}={largest}." if largest >= self.chunks else f"Remove {key}."
            raise ModelError(
                f"{keys} can't divide the model's {layers} layers over {self.pipeline} pipeline "
                f"ranks. {fix}"
            )


def padded_vocabulary(size: int, tensor: int) -> int:
    """Return the number of embedding rows, padded to a multiple of the tensor-parallel ranks."""
    return -(-size // tensor) * tensor
