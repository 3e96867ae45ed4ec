"""The shard of a decoder that a process holds, and the communication between shards.

With tensor parallelism (arXiv:1909.08053) each rank has some heads, some columns of each MLP and
some rows of the embedding. With pipeline parallelism each rank has some layers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch.nn.functional as F
from torch import Tensor

from ratchet.config.model_shape.decoder_config import DecoderConfig
from ratchet.errors import ModelError


@dataclass(frozen=True)
class ShardIndex:
    """The index of one of `count` parts of about equal size."""

    index: int = 0
    count: int = 1

    def range(self, total: int) -> range:
        """Return the indices of this part among `total` items."""
        return range(total * self.index // self.count, total * (self.index + 1) // self.count)


@dataclass(frozen=True)
class StageIndex(ShardIndex):
    """The index of a pipeline stage, whose number of layers may differ from the others'.

    layers: number of layers of each stage; (): about as many in each.
    """

    layers: tuple[int, ...] = ()

    def count_layers(self, total: int) -> Sequence[int]:
        """Return the number of layers of each stage of a model with `total` layers."""
        shares = (ShardIndex(i, self.count) for i in range(self.count))
        return self.layers or [len(share.range(total)) for share in shares]

    def range(self, total: int) -> range:
        sizes = self.count_layers(total)
        start = sum(sizes[: self.index])
        return range(start, start + sizes[self.index])

    def check(self, total: int) -> None:
        """Raise ModelError if a model's layers can't be divided into such stages."""
        if self.layers and sum(self.layers) != total:
            raise ModelError(
                f"learner.stage_layers={list(self.layers)} has {sum(self.layers)} layers, but the "
                f"model has {total}. Set numbers that add up to {total}."
            )
        if self.count > total:
            raise ModelError(
                f"{self.count} pipeline stages are more than {total} layers: set "
                f"learner.pipeline_parallel x pipeline_chunks to at most {total}"
            )


def list_stage_indices(
    rank: ShardIndex, chunks: int, layers: Sequence[int] = ()
) -> list[StageIndex]:
    """Return the pipeline stages of a pipeline rank: one, or several if they are interleaved.

    chunks: number of stages of a rank.
    layers: see `StageIndex`.
    """
    return [
        StageIndex(rank.index + rank.count * i, rank.count * chunks, tuple(layers))
        for i in range(chunks)
    ]


@dataclass(frozen=True)
class ModelShard:
    """The shard of a decoder that a rank holds."""

    tensor: ShardIndex = ShardIndex()  # the rank's part of the heads, MLPs and vocabulary
    # The rank's part of the layers. The first part also has the embedding. The last part also has
    # the final norm and the language head.
    pipeline: StageIndex = StageIndex()
    experts: ShardIndex = ShardIndex()  # the rank's part of each layer's experts

    @property
    def is_first(self) -> bool:
        """True if the shard has the first layers and the embedding."""
        return self.pipeline.index == 0

    @property
    def is_last(self) -> bool:
        """True if the shard has the last layers and the language head."""
        return self.pipeline.index == self.pipeline.count - 1

    def local_config(self, config: DecoderConfig) -> DecoderConfig:
        """Return the shape of this rank's layers: `config` divided by tensor parallelism."""
        n = self.tensor.count
        return replace(
            config,
            n_heads=config.n_heads // n,
            n_kv_heads=config.n_kv_heads // n,
            intermediate_size=config.intermediate_size // n,
            expert_intermediate_size=config.expert_intermediate_size // n,
        )

    def check(self, config: DecoderConfig) -> None:
        """Raise ModelError if a decoder can't be divided into such shards."""
        n = self.tensor.count
        check_even(
            n,
            {
                "query heads": config.n_heads,
                "KV heads": config.n_kv_heads,
                "columns of an MLP": config.intermediate_size,
                "columns of an expert": config.expert_intermediate_size,
            },
        )
        if n > 1 and (config.out_bias or config.mlp_bias):
            raise ModelError(
                "tensor parallelism does not support biases in the attention's output projection "
                "or in MLPs: set learner.tensor_parallel=1"
            )
        check_even_experts(self.experts.count, config.n_experts)
        self.pipeline.check(config.n_layers)


def check_even(n: int, totals: Mapping[str, int]) -> None:
    """Raise ModelError if the number of tensor-parallel ranks doesn't divide each total.

    Args:
        n: The number of tensor-parallel ranks.
        totals: The number of items, by their name in the message, such as "query heads".
    """
    for name, total in totals.items():
        if total % n:
            fix = f"set it to {find_nearest_divisor(total, n)}"
            raise ModelError(
                f"learner.tensor_parallel={n} doesn't divide the model's {total} {name}: {fix}"
            )


def check_even_experts(n: int, total: int) -> None:
    """Raise ModelError if a model has no experts, or `n` ranks above one don't divide them."""
    if n > 1 and (not total or total % n):
        fix = find_nearest_divisor(total, n) if total else 1
        raise ModelError(
            f"learner.expert_parallel={n} doesn't divide the model's {total} experts: set it to "
            f"{fix}"
        )


def find_nearest_divisor(total: int, n: int) -> int:
    """Return the largest number below n that divides `total`."""
    return max(i for i in range(1, n) if total % i == 0)


WHOLE = ModelShard()


class TPComm(Protocol):
    """The communication of hidden states within a tensor-parallel group."""

    def begin(self, tokens: int) -> None:
        """Start a forward pass of this many tokens."""
        ...

    def embed(self, tokens_T: Tensor, weight_Vd: Tensor) -> Tensor:
        """Return the embeddings of tokens; `weight_Vd` has this rank's rows of the matrix."""
        ...

    def enter(self, x: Tensor) -> Tensor:
        """Prepare the input of column-parallel layers, whose outputs are divided over ranks."""
        ...

    def leave(self, x: Tensor) -> Tensor:
        """Sum the outputs of row-parallel layers, whose inputs are divided over ranks."""
        ...

    def finish(self, x: Tensor) -> Tensor:
        """Return the final hidden states, the same on every rank."""
        ...


class NoTPComm:
    """The `TPComm` of a single rank, which communicates nothing."""

    def begin(self, tokens: int) -> None: ...

    def embed(self, tokens_T: Tensor, weight_Vd: Tensor) -> Tensor:
        return F.embedding(tokens_T, weight_Vd)

    def enter(self, x: Tensor) -> Tensor:
        return x

    leave = finish = enter


NO_TP_COMM: TPComm = NoTPComm()
