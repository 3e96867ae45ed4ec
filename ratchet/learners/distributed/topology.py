"""How the ranks of a learner share their work: pure arithmetic, which the driver does too.

Ranks are counted with the tensor-parallel ones next to each other, as these exchange most, then
context, data and pipeline.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from math import prod

from ratchet.errors import ConfigError
from ratchet.learners.config import MegatronConfig, SpreadConfig
from ratchet.models.parallel.megatron_sizes import Sizes
from ratchet.models.parallel.sharding import Part, Share


@dataclass(frozen=True)
class Coordinates:
    pipeline: int
    replica: int
    shard: int
    context: int
    tensor: int


@dataclass(frozen=True)
class Topology:
    """replicas x shards: data parallelism; weights are divided over the shards (FSDP) and repeated
    in each replica (HSDP). context, tensor, pipeline: see `ratchet.models`. experts: how many ranks
    share out the experts of a layer, among those of one replica."""

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
        return self.pipeline * self.replicas * self.shards * self.context * self.tensor

    @property
    def data(self) -> int:
        """Ranks with rows of their own."""
        return self.replicas * self.shards

    @property
    def summands(self) -> int:
        """Over how many ranks a gradient is averaged where it should be summed."""
        return self.data * self.context

    def coordinates(self) -> Iterator[Coordinates]:
        """Of each rank, in order."""
        sizes = (self.pipeline, self.replicas, self.shards, self.context, self.tensor)
        return (Coordinates(*at) for at in product(*map(range, sizes)))

    def data_rank(self, at: Coordinates) -> int:
        """Which of the batch's shards a rank computes."""
        return at.replica * self.shards + at.shard

    def answers(self, at: Coordinates) -> bool:
        """Whether this rank's results are the ones of its data rank."""
        return at.pipeline == self.pipeline - 1 and at.context == 0 and at.tensor == 0


def topology_of(config: SpreadConfig) -> Topology:
    """Raises ConfigError where the numbers don't go together."""
    *replicas, shards = (getattr(config, key) for key in config.rows)
    return Topology(
        replicas=prod(replicas),
        shards=shards,
        context=config.context_parallel,
        tensor=config.tensor_parallel,
        pipeline=config.pipeline_parallel,
        experts=config.expert_parallel,
    )


def parts(config: SpreadConfig) -> Part:
    """The first rank's, for a check of whether a model can be divided so."""
    stages = config.pipeline_parallel * config.pipeline_chunks
    return Part(
        Share(0, config.tensor_parallel), Share(0, stages), Share(0, config.expert_parallel)
    )


def megatron_sizes(config: MegatronConfig) -> Sizes:
    return Sizes(
        tensor=config.tensor_parallel,
        context=config.context_parallel,
        pipeline=config.pipeline_parallel,
        experts=config.expert_parallel,
        chunks=config.pipeline_chunks,
        sequence=config.sequence_parallel,
    )
