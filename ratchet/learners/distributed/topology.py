"""The topology of a distributed learner's ranks, which both the driver and the ranks compute.

Ranks that communicate most are adjacent: the tensor coordinate varies fastest, then context, data
and pipeline.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod

from ratchet.errors import ConfigError
from ratchet.learners.config import DistributedConfig, DTensorConfig, MegatronConfig
from ratchet.models.parallel.megatron_sizes import MegatronSizes
from ratchet.models.parallel.sharding import (
    ModelShard,
    ShardIndex,
    StageIndex,
    list_stage_indices,
)


@dataclass(frozen=True)
class Coordinates:
    """The coordinates of a rank in the topology, one for each kind of parallelism."""

    pipeline: int
    replica: int
    shard: int
    context: int
    tensor: int


@dataclass(frozen=True)
class Topology:
    """The number of ranks in each dimension of parallelism.

    replicas x shards: data parallelism. Weights are divided over the shards (FSDP) and repeated in
      each replica (HSDP).
    context: number of ranks over which the tokens of a sequence are divided.
    tensor: number of ranks over which matrices are divided.
    pipeline: number of ranks over which layers are divided.
    experts: number of ranks of a replica over which a layer's experts are divided.
    """

    replicas: int = 1
    shards: int = 1
    context: int = 1
    tensor: int = 1
    pipeline: int = 1
    experts: int = 1

    def __post_init__(self) -> None:
        if (self.shards * self.context) % self.experts:
            raise ConfigError(
                f"learner.expert_parallel={self.experts} must divide dp_shard x context_parallel = "
                f"{self.shards * self.context}. Set learner.expert_parallel to a divisor of "
                f"{self.shards * self.context}."
            )

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return self.pipeline * self.replicas * self.shards * self.context * self.tensor

    @property
    def data_ranks(self) -> int:
        """The number of data ranks, each with its own shard of the batch."""
        return self.replicas * self.shards

    @property
    def gradient_ranks(self) -> int:
        """The number of ranks over which gradients are summed.

        FSDP averages over them instead, so losses are multiplied by this number.
        """
        return self.data_ranks * self.context

    def coordinates(self) -> Iterator[Coordinates]:
        """Yield the coordinates of each rank, in order."""
        sizes = (self.pipeline, self.replicas, self.shards, self.context, self.tensor)
        return (Coordinates(*indices) for indices in product(*map(range, sizes)))

    def data_rank(self, coordinates: Coordinates) -> int:
        """Return the index of the batch shard that a rank computes."""
        return coordinates.replica * self.shards + coordinates.shard

    def is_reporting_rank(self, coordinates: Coordinates) -> bool:
        """True if this rank reports the results of its data rank."""
        return (
            coordinates.pipeline == self.pipeline - 1
            and coordinates.context == 0
            and coordinates.tensor == 0
        )


def build_topology(config: DistributedConfig) -> Topology:
    """Return the topology of a config section. Raises ConfigError if its sizes don't fit."""
    *replicas, shards = (getattr(config, key) for key in config.data_parallel_keys)
    return Topology(
        replicas=prod(replicas),
        shards=shards,
        context=config.context_parallel,
        tensor=config.tensor_parallel,
        pipeline=config.pipeline_parallel,
        experts=config.expert_parallel,
    )


def build_first_shard(config: DTensorConfig) -> ModelShard:
    """Return the first rank's part of the model, to check that the model can be divided."""
    pipeline = ShardIndex(0, config.pipeline_parallel)
    return ModelShard(
        ShardIndex(0, config.tensor_parallel),
        list_stage_indices(pipeline, config.pipeline_chunks, config.stage_layers)[0],
        ShardIndex(0, config.expert_parallel),
    )


def build_megatron_sizes(config: MegatronConfig) -> MegatronSizes:
    """Return Megatron's parallel sizes for a config section."""
    return MegatronSizes(
        tensor=config.tensor_parallel,
        context=config.context_parallel,
        pipeline=config.pipeline_parallel,
        experts=config.expert_parallel,
        chunks=config.pipeline_chunks,
        sequence=config.sequence_parallel,
        first_layers=config.first_stage_layers,
        last_layers=config.last_stage_layers,
        stage_layers=config.stage_layers,
    )


def list_rank_stages(config: DistributedConfig, rank: int) -> Sequence[StageIndex]:
    """Return the stages of a pipeline rank, in the order of their layers."""
    if isinstance(config, MegatronConfig):
        sizes = build_megatron_sizes(config)
        return [sizes.stage(rank, chunk) for chunk in range(config.pipeline_chunks)]
    pipeline = ShardIndex(rank, config.pipeline_parallel)
    return list_stage_indices(pipeline, config.pipeline_chunks, config.stage_layers)
