"""The topology of a learner's ranks: pure arithmetic, for the driver and the ranks.

Tensor-parallel ranks are next to each other, because they exchange most, then context, data and
pipeline.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from math import prod

from ratchet.errors import ConfigError
from ratchet.learners.config import DistributedConfig, MegatronConfig
from ratchet.models.parallel.megatron_sizes import MegatronSizes
from ratchet.models.parallel.sharding import ModelShard, ShardIndex


@dataclass(frozen=True)
class Coordinates:
    """The place of a rank in the topology."""

    pipeline: int
    replica: int
    shard: int
    context: int
    tensor: int


@dataclass(frozen=True)
class Topology:
    """The sizes by which ranks divide the work.

    replicas x shards: data parallelism. Weights are divided over the shards (FSDP) and repeated in
      each replica (HSDP).
    experts: number of ranks of one replica that divide the experts of a layer.

    context, tensor, pipeline: see `ratchet.models`.
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
                f"{self.shards * self.context}"
            )

    @property
    def world(self) -> int:
        """The number of ranks."""
        return self.pipeline * self.replicas * self.shards * self.context * self.tensor

    @property
    def data(self) -> int:
        """The number of ranks with rows of their own."""
        return self.replicas * self.shards

    @property
    def summands(self) -> int:
        """The number of ranks over which FSDP averages a gradient that should be a sum."""
        return self.data * self.context

    def coordinates(self) -> Iterator[Coordinates]:
        """Yield the coordinates of each rank, in order."""
        sizes = (self.pipeline, self.replicas, self.shards, self.context, self.tensor)
        return (Coordinates(*at) for at in product(*map(range, sizes)))

    def data_rank(self, at: Coordinates) -> int:
        """Return the shard of the batch that a rank computes."""
        return at.replica * self.shards + at.shard

    def is_reporting_rank(self, at: Coordinates) -> bool:
        """True if this rank reports the results of its data rank."""
        return at.pipeline == self.pipeline - 1 and at.context == 0 and at.tensor == 0


def build_topology(config: DistributedConfig) -> Topology:
    """Return the topology of a section. Raises ConfigError if its sizes don't fit together."""
    *replicas, shards = (getattr(config, key) for key in config.rows)
    return Topology(
        replicas=prod(replicas),
        shards=shards,
        context=config.context_parallel,
        tensor=config.tensor_parallel,
        pipeline=config.pipeline_parallel,
        experts=config.expert_parallel,
    )


def build_first_shard(config: DistributedConfig) -> ModelShard:
    """Return the first rank's part of the model, to check if the model can be divided so."""
    stages = config.pipeline_parallel * config.pipeline_chunks
    return ModelShard(
        ShardIndex(0, config.tensor_parallel),
        ShardIndex(0, stages),
        ShardIndex(0, config.expert_parallel),
    )


def build_megatron_sizes(config: MegatronConfig) -> MegatronSizes:
    """Return the sizes of Megatron's parallelism for a section."""
    return MegatronSizes(
        tensor=config.tensor_parallel,
        context=config.context_parallel,
        pipeline=config.pipeline_parallel,
        experts=config.expert_parallel,
        chunks=config.pipeline_chunks,
        sequence=config.sequence_parallel,
    )
