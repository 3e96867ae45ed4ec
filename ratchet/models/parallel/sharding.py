"""Which part of a decoder a process holds, where it is spread over several, and the seams at which
they exchange numbers.

Tensor parallelism (arXiv:1909.08053): each rank has some heads, some columns of each MLP and some
rows of the vocabulary. Pipeline parallelism: each has some of the layers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Protocol

import torch.nn.functional as F
from torch import Tensor

from ratchet.errors import ModelError
from ratchet.models.config import DecoderConfig


@dataclass(frozen=True)
class Share:
    """Number `index` of `of` parts of about one size."""

    index: int = 0
    of: int = 1

    def range(self, total: int) -> range:
        """Which of `total` things it is."""
        return range(total * self.index // self.of, total * (self.index + 1) // self.of)


@dataclass(frozen=True)
class Part:
    """tensor: of the heads, the MLPs and the vocabulary. pipeline: of the layers; the first part
    has the embedding, the last the final norm and the language head. experts: of the experts of
    each layer that has some."""

    tensor: Share = Share()
    pipeline: Share = Share()
    experts: Share = Share()

    @property
    def first(self) -> bool:
        return self.pipeline.index == 0

    @property
    def last(self) -> bool:
        return self.pipeline.index == self.pipeline.of - 1

    def local(self, config: DecoderConfig) -> DecoderConfig:
        """The shape of a rank's own layers."""
        n = self.tensor.of
        return replace(
            config,
            n_heads=config.n_heads // n,
            n_kv_heads=config.n_kv_heads // n,
            intermediate_size=config.intermediate_size // n,
            expert_intermediate_size=config.expert_intermediate_size // n,
        )

    def check(self, config: DecoderConfig) -> None:
        """Raises ModelError where a decoder can't be divided so, with the nearest number that
        divides it."""
        n = self.tensor.of
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
                "biases behind the heads or in the MLPs can't be divided: set "
                "learner.tensor_parallel=1"
            )
        if self.experts.of > 1 and (not config.n_experts or config.n_experts % self.experts.of):
            raise ModelError(
                f"learner.expert_parallel={self.experts.of} doesn't divide the model's "
                f"{config.n_experts} experts: set it to "
                + (str(nearest(config.n_experts, self.experts.of)) if config.n_experts else "1")
            )
        if self.pipeline.of > config.n_layers:
            raise ModelError(
                f"{self.pipeline.of} pipeline stages for {config.n_layers} layers: set "
                "learner.pipeline_parallel x "
                f"pipeline_chunks to at most {config.n_layers}"
            )


def check_even(n: int, totals: Mapping[str, int]) -> None:
    """totals: how many there are, by what they are. Raises ModelError where n tensor-parallel ranks
    can't have equally many."""
    for what, total in totals.items():
        if total % n:
            fix = f"set it to {nearest(total, n)}"
            raise ModelError(
                f"learner.tensor_parallel={n} doesn't divide the model's {total} {what}: {fix}"
            )


def nearest(total: int, n: int) -> int:
    """The largest number below n that divides it."""
    return max(i for i in range(1, n) if total % i == 0)


WHOLE = Part()


class Seams(Protocol):
    """Where the hidden states of a decoder pass from rank to rank of a tensor-parallel group."""

    def begin(self, tokens: int) -> None:
        """A forward of so many tokens."""
        ...

    def embed(self, tokens_T: Tensor, weight_Vd: Tensor) -> Tensor:
        """Rows of the embedding, of which this rank has some."""
        ...

    def enter(self, x: Tensor) -> Tensor:
        """Before products whose outputs are divided."""
        ...

    def leave(self, x: Tensor) -> Tensor:
        """Behind products whose inputs were divided: each rank has a summand."""
        ...

    def finish(self, x: Tensor) -> Tensor:
        """Behind the last layer: the same on every rank."""
        ...


class Undivided:
    """One rank has everything."""

    def begin(self, tokens: int) -> None: ...

    def embed(self, tokens_T: Tensor, weight_Vd: Tensor) -> Tensor:
        return F.embedding(tokens_T, weight_Vd)

    def enter(self, x: Tensor) -> Tensor:
        return x

    leave = finish = enter


UNDIVIDED: Seams = Undivided()
