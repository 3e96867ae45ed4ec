"""What one rank of a spread learner does, whatever divides the model: columns of its micro-batches,
and optimizer steps on those of all ranks.

Every rank gets the same calls, in the same order, and as many micro-batches.
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
from ratchet.learners.compute.token_outputs import Head, Wanted, token_columns
from ratchet.learners.distributed.topology import Topology
from ratchet.learners.optim.step_policy import Pace
from ratchet.models.lora.layers import mask_seed
from ratchet.models.parallel.collectives import Group, sum_forward
from ratchet.models.parallel.sharded_policy import SpreadPolicy
from ratchet.protocols import Exported, LossTerm, Shard


class RankForward(Forward):
    """On one rank of a mesh: some of the tokens of each sequence, some of the vocabulary's
    logits."""

    @property
    def head_matrix(self) -> Tensor | None:
        """None: ranks hold parts of it, or gather it for a forward alone."""
        return None

    @property
    def language_head(self) -> Head:
        head, vocabulary = super().language_head, self.model.vocabulary
        return head if vocabulary is None else replace(head, vocabulary=vocabulary)

    def predictions(self, micro: Batch, hidden_Td: Tensor, wanted: Wanted) -> dict[str, Tensor]:
        own = self._own(micro)
        if own is None:
            return super().predictions(micro, hidden_Td, wanted)
        place_T, here_T, group = own
        # The state before a token predicts it; that of a sequence's last token predicts nothing.
        mask_T = micro.predicted_T & here_T.roll(1)
        columns = token_columns(self.language_head, hidden_Td, micro, mask_T, wanted, place_T)
        return {name: sum_forward(column, group) for name, column in columns.items()}

    def scalars(self, micro: Batch, hidden_Td: Tensor) -> Tensor:
        scalars_t = super().scalars(micro, hidden_Td)
        own = self._own(micro)
        if own is None:
            return scalars_t
        place_T, here_T, group = own
        tokens = here_T.nonzero()[:, 0]
        return sum_forward(
            scalars_t.new_zeros(micro.n_tokens).index_put((tokens,), scalars_t[place_T[tokens]]),
            group,
        )

    def _own(self, micro: Batch) -> tuple[Tensor, Tensor, Group] | None:
        """(where each token's hidden state lies, whether it is on this rank, the ranks that have
        the others)."""
        model = self.model
        division = (
            model.division(micro.lengths_S.tolist()) if isinstance(model, SpreadPolicy) else None
        )
        if division is None or not isinstance(model, SpreadPolicy) or model.spread.context is None:
            return None
        tokens = torch.from_numpy(division.tokens).to(self.device)
        place_T = torch.zeros(micro.n_tokens, dtype=torch.int64, device=self.device)
        place_T[tokens] = torch.arange(len(tokens), device=self.device)
        here_T = torch.zeros(micro.n_tokens, dtype=torch.bool, device=self.device)
        here_T[tokens] = True
        return place_T, here_T, model.spread.context


class RankLearner(ABC):
    """sums: the ranks that add up to one gradient; None: this one alone. pace: None where nothing
    is trained."""

    def __init__(
        self,
        forward: RankForward,
        topology: Topology,
        rank: int,
        sums: Group | None,
        pace: Pace | None,
    ) -> None:
        self.forward, self.topology, self.rank, self.sums, self.pace = (
            forward,
            topology,
            rank,
            sums,
            pace,
        )
        self.at = list(topology.coordinates())[rank]

    def score(
        self, micros: Sequence[Batch], wanted: Sequence[str], *, top_k: int = 0
    ) -> list[dict[str, Tensor]]:
        """Columns of each micro-batch, on the CPU; nothing on a rank that only helps."""
        found = self._score(micros, wanted, top_k)
        if not self.topology.answers(self.at):
            return []
        return [{name: columns[name].to("cpu") for name in wanted} for columns in found]

    def update(self, micros: Sequence[Batch], terms: Sequence[LossTerm]) -> Mapping[str, float]:
        """One optimizer step on the micro-batches of all ranks. None at all: a step that is
        skipped."""
        pace = self.pace
        assert pace is not None, "a frozen role was asked to update"
        metrics = pace.begin()
        if not micros:
            return {**metrics, "skipped_empty": 1.0}
        try:
            sums = self._sums(self._learn(micros, terms))
            told = self.topology.world // self.topology.pipeline  # ranks that know the loss
            norm, loss = self._gradient(sums.get("loss", 0.0) / told)
            metrics |= sums | {"grad_norm": norm}
            if not pace.sound(norm, loss):
                return {**metrics, "skipped_nonfinite": 1.0}
            most = pace.config.max_grad_norm
            self._step(metrics["lr"], 1.0 if most is None else min(1.0, most / (norm + 1e-6)))
        finally:
            self._forget()
        return metrics

    def _sums(self, found: Sequence[Mapping[str, Tensor]]) -> dict[str, float]:
        """Over micro-batches and data ranks."""
        if not found:
            return {}
        names = list(found[0])
        totals = torch.stack(
            [torch.stack([part[name] for part in found]).sum() for name in names]
        ).double()
        if self.sums is not None:
            dist.all_reduce(totals, group=self.sums)
        return dict(zip(names, (totals / self.topology.context).tolist(), strict=True))

    def _seed(self, number: int) -> int:
        """Return the seed of what adapters drop in a micro-batch of this rank, by its number among
        those of all ranks."""
        taken = 0 if self.pace is None else self.pace.taken
        return mask_seed(taken, number * self.topology.data + self.topology.data_rank(self.at))

    @abstractmethod
    def _score(
        self, micros: Sequence[Batch], wanted: Sequence[str], top_k: int
    ) -> list[Mapping[str, Tensor]]:
        """Where hidden states come out; nothing elsewhere."""

    @abstractmethod
    def _learn(
        self, micros: Sequence[Batch], terms: Sequence[LossTerm]
    ) -> list[Mapping[str, Tensor]]:
        """What the losses are of each micro-batch, where this rank computes them; adds up
        gradients."""

    @abstractmethod
    def _gradient(self, loss: float) -> tuple[float, float]:
        """Completes it. (norm of the whole gradient, sum over all ranks of `loss`), the same on
        every rank."""

    @abstractmethod
    def _step(self, lr: float, factor: float) -> None:
        """With the gradient times the factor."""

    @abstractmethod
    def _forget(self) -> None:
        """The gradient."""

    @abstractmethod
    def onload(self) -> None: ...

    @abstractmethod
    def offload(self) -> None: ...

    @abstractmethod
    def weights(self) -> Iterator[Shard]:
        """This rank's blocks; those that several ranks hold come from the first of them only."""

    @abstractmethod
    def save(self, directory: Path) -> None: ...

    @abstractmethod
    def load(self, directory: Path) -> None: ...

    @abstractmethod
    def export(
        self, directory: Path, *, averaged: bool = False, part: Exported = "all"
    ) -> None: ...
