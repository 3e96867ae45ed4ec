"""Check that Megatron Core can divide a decoder, before any process starts.

This module does not import Megatron.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec

from ratchet.config.model_shape.decoder_config import DecoderConfig
from ratchet.errors import ConfigError, MissingDependency, ModelError
from ratchet.models.parallel.sharding import ModelShard, ShardIndex


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

    def stage(self, rank: int, chunk: int = 0) -> ShardIndex:
        """Return the index of a pipeline rank's chunk among all pipeline stages."""
        return ShardIndex(rank + self.pipeline * chunk, self.pipeline * self.chunks)

    def check(self, shape: DecoderConfig) -> None:
        """Raise ModelError if Megatron Core can't divide or build the decoder."""
        stages = self.pipeline * self.chunks
        ModelShard(
            ShardIndex(0, self.tensor), ShardIndex(0, stages), ShardIndex(0, self.experts)
        ).check(shape)
        if shape.n_layers % stages:
            divisor = max(n for n in range(1, stages) if shape.n_layers % n == 0)
            raise ModelError(
                f"Megatron gives each pipeline stage the same number of layers, but {stages} "
                f"stages don't divide {shape.n_layers} layers: set learner.pipeline_parallel x "
                f"pipeline_chunks to {divisor}"
            )
        if self.chunks > 1 and self.pipeline == 1:
            raise ModelError(
                "learner.pipeline_chunks interleaves the stages of a pipeline: set "
                "learner.pipeline_parallel too"
            )
        if shape.out_bias or shape.mlp_bias:
            raise ModelError(
                "Megatron has no biases in the attention's output projection or in gated MLPs, but "
                "this model has such biases: set learner.kind=dtensor"
            )
        if shape.n_experts and self.tensor > 1 and not self.sequence:
            raise ModelError(
                "experts under tensor parallelism need learner.sequence_parallel=true: without it "
                "every rank would send all tokens to the experts"
            )


def padded_vocabulary(size: int, tensor: int) -> int:
    """Return the number of embedding rows, padded to a multiple of the tensor-parallel ranks."""
    return -(-size // tensor) * tensor
