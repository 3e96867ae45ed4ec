"""Base classes for one rank of a distributed learner, which FSDP2 and Megatron learners share.

A rank computes columns of its own micro-batches. An optimizer step uses the gradients of all ranks.
Every rank gets the same calls in the same order, and the same number of micro-batches.

T = tokens of a micro-batch, t = those of them that this rank computes, d = hidden size.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from ratchet.batch import Batch
from ratchet.learners.compute.forward import Forward
from ratchet.learners.compute.token_outputs import Head, TokenOutputSpec, compute_token_columns
from ratchet.learners.device_memory import explain_out_of_memory
from ratchet.learners.distributed.topology import Topology
from ratchet.learners.optim.step_rules import OptimizerStepRules
from ratchet.models.lora.layers import derive_mask_seed
from ratchet.models.parallel.collectives import Group, sum_forward
from ratchet.protocols import ExportedPart, LossTerm, Shard


class RankForward(Forward):
    """The forward pass on one rank of a mesh.

    The rank has some of the tokens of each sequence, and some of the vocabulary's logits.
    """

    @property
    def head_matrix(self) -> Tensor | None:
        """Return None: a rank has only a part of the matrix outside of forward passes."""
        return None

    @property
    def language_head(self) -> Head:
        head = super().language_head
        vocab_parallel = self.model.vocab_parallel
        return head if vocab_parallel is None else replace(head, vocabulary=vocab_parallel)

    def predictions(
        self, micro: Batch, hidden_Td: Tensor, spec: TokenOutputSpec
    ) -> dict[str, Tensor]:
        local_tokens = self._find_local_tokens(micro)
        if local_tokens is None:
            return super().predictions(micro, hidden_Td, spec)
        state_index_T, is_local_T, group = local_tokens
        # The state of a token predicts the next token. So this rank predicts the successors of its
        # tokens.
        mask_T = micro.predicted_T & is_local_T.roll(1)
        columns = compute_token_columns(
            self.language_head, hidden_Td, micro, mask_T, spec, state_index_T
        )
        return {name: sum_forward(column, group) for name, column in columns.items()}

    def scalars(self, micro: Batch, hidden_Td: Tensor) -> Tensor:
        scalars_t = super().scalars(micro, hidden_Td)
        local_tokens = self._find_local_tokens(micro)
        if local_tokens is None:
            return scalars_t
        state_index_T, is_local_T, group = local_tokens
        tokens = is_local_T.nonzero()[:, 0]
        return sum_forward(
            scalars_t.new_zeros(micro.n_tokens).index_put(
                (tokens,), scalars_t[state_index_T[tokens]]
            ),
            group,
        )

    def _find_local_tokens(self, micro: Batch) -> tuple[Tensor, Tensor, Group] | None:
        """Return (index of each token's state on this rank, mask of this rank's tokens, group).

        The group has the context-parallel ranks, over which the tokens are divided. Returns None if
        this rank has all tokens.
        """
        context_split = self.model.split_context(micro.lengths_S.tolist())
        group = self.model.context_group
        if context_split is None or group is None:
            return None
        tokens = torch.from_numpy(context_split.tokens).to(self.device)
        state_index_T = torch.zeros(micro.n_tokens, dtype=torch.int64, device=self.device)
        state_index_T[tokens] = torch.arange(len(tokens), device=self.device)
        is_local_T = torch.zeros(micro.n_tokens, dtype=torch.bool, device=self.device)
        is_local_T[tokens] = True
        return state_index_T, is_local_T, group


class RankLearner(ABC):
    """One rank of a distributed learner.

    Args:
        gradient_group: The ranks over which gradients are summed; None for a single rank.
        step_rules: Learning rates, and the decision to skip a step; None for a frozen role.
    """

    def __init__(
        self,
        forward: RankForward,
        topology: Topology,
        rank: int,
        gradient_group: Group | None,
        step_rules: OptimizerStepRules | None,
    ) -> None:
        self.forward = forward
        self.topology = topology
        self.rank = rank
        self.gradient_group = gradient_group
        self.step_rules = step_rules
        self.coordinates = list(topology.coordinates())[rank]

    def score(
        self, micros: Sequence[Batch], output_names: Sequence[str], *, top_k: int = 0
    ) -> list[dict[str, Tensor]]:
        """Return the columns of each micro-batch, on the CPU.

        Several ranks compute the same shard of the batch. One of them, the reporting rank, returns
        the columns. The others return an empty list.
        """
        scored = self._score(micros, output_names, top_k)
        if not self.topology.is_reporting_rank(self.coordinates):
            return []
        return [{name: columns[name].to("cpu") for name in output_names} for columns in scored]

    def update(self, micros: Sequence[Batch], terms: Sequence[LossTerm]) -> Mapping[str, float]:
        """Take one optimizer step on the micro-batches of all ranks.

        The step is skipped if there are no micro-batches.
        """
        step_rules = self.step_rules
        assert step_rules is not None, "a frozen role can't be updated"
        metrics = step_rules.begin()
        if not micros:
            return {**metrics, "skipped_empty": 1.0}
        try:
            with explain_out_of_memory(lambda: max(micro.n_tokens for micro in micros)):
                metrics_by_micro = self._learn(micros, terms)
            sums = self._sum_metrics(metrics_by_micro)
            # All ranks of the last pipeline stage have this loss. `_complete_gradient` sums it over
            # all ranks, so each adds its share.
            ranks_with_loss = self.topology.world_size // self.topology.pipeline
            norm, loss = self._complete_gradient(sums.get("loss", 0.0) / ranks_with_loss)
            metrics |= sums | {"grad_norm": norm}
            if not step_rules.accept_step(norm, loss):
                return {**metrics, "skipped_nonfinite": 1.0}
            limit = step_rules.config.max_grad_norm
            self._step(metrics["lr"], 1.0 if limit is None else min(1.0, limit / (norm + 1e-6)))
        finally:
            self._zero_gradient()
        return metrics

    def _sum_metrics(self, metrics: Sequence[Mapping[str, Tensor]]) -> dict[str, float]:
        """Return the sum of each loss and metric over micro-batches and data ranks.

        metrics: losses and metrics of each micro-batch of this rank, by name.
        """
        if not metrics:
            return {}
        names = list(metrics[0])
        totals = torch.stack(
            [
                torch.stack([micro_metrics[name] for micro_metrics in metrics]).sum()
                for name in names
            ]
        ).double()
        if self.gradient_group is not None:
            dist.all_reduce(totals, group=self.gradient_group)
        # All context-parallel ranks of a data rank have the same values.
        return dict(zip(names, (totals / self.topology.context).tolist(), strict=True))

    def _derive_seed(self, micro_index: int) -> int:
        """Return the seed of the adapter's dropout in a micro-batch.

        Args:
            micro_index: Index of the micro-batch among those of this rank.
        """
        step = 0 if self.step_rules is None else self.step_rules.steps_taken
        return derive_mask_seed(
            step, micro_index * self.topology.data_ranks + self.topology.data_rank(self.coordinates)
        )

    @abstractmethod
    def _score(
        self, micros: Sequence[Batch], output_names: Sequence[str], top_k: int
    ) -> list[Mapping[str, Tensor]]:
        """Return the columns of each micro-batch.

        Ranks without the final hidden states return an empty list.
        """

    @abstractmethod
    def _learn(
        self, micros: Sequence[Batch], terms: Sequence[LossTerm]
    ) -> list[Mapping[str, Tensor]]:
        """Accumulate gradients, and return the losses and metrics of each micro-batch.

        Ranks that don't compute the losses return an empty list.
        """

    @abstractmethod
    def _complete_gradient(self, loss: float) -> tuple[float, float]:
        """Sum the gradient over ranks, and return (its norm, the sum of `loss` over all ranks).

        Both numbers are the same on every rank.
        """

    @abstractmethod
    def _step(self, lr: float, factor: float) -> None:
        """Take the optimizer step with the gradient multiplied by `factor`."""

    @abstractmethod
    def _zero_gradient(self) -> None:
        """Clear the gradient."""

    @abstractmethod
    def count_later_bytes(self) -> int:
        """Return the bytes that updates will allocate on the device for gradients and moments."""

    @abstractmethod
    def onload(self) -> None: ...

    @abstractmethod
    def offload(self) -> None: ...

    @abstractmethod
    def weights(self) -> Iterator[Shard]:
        """Yield this rank's blocks. If several ranks hold a block, only one of them yields it."""

    @abstractmethod
    def save(self, directory: Path) -> None: ...

    @abstractmethod
    def load(self, directory: Path) -> None: ...

    @abstractmethod
    def export(
        self, directory: Path, *, averaged: bool = False, part: ExportedPart = "all"
    ) -> None: ...
