"""A learner whose ranks are other processes, as the driver sees it: it plans micro-batches, deals
them out, and puts together what comes back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ratchet.batch import Batch, Level
from ratchet.learners.compute.microbatch_dispatch import Micro, deal, gather_columns, light
from ratchet.learners.compute.microbatching import most_tokens, plan_microbatches, weighing_rows
from ratchet.learners.config import SpreadConfig
from ratchet.learners.distributed.topology import topology_of
from ratchet.protocols import Exported, LossTerm, Shard, Workers


class RemoteLearner:
    """Implements `Learner` and `Placeable` on ranks whose components are `LearnerRank`s. role:
    which of their learners it is. device: the kind that they compute on. unit: what a micro-batch
    never splits."""

    def __init__(
        self,
        ranks: Workers,
        config: SpreadConfig,
        role: str,
        *,
        device: str,
        vocab_size: int,
        unit: Level,
        shares_prefixes: bool,
    ) -> None:
        self.ranks, self.role, self.vocab_size = ranks, role, vocab_size
        self.unit: Level = unit
        self.topology = topology_of(config)
        self.max_tokens = most_tokens(config.micro_batch_tokens, device)
        self.shares_prefixes = shares_prefixes and self.topology.context == 1

    async def score(
        self, batch: Batch, wanted: Sequence[str], *, top_k: int = 0
    ) -> Mapping[str, Tensor]:
        return await self._score("score", batch, wanted, top_k)

    async def score_base(
        self, batch: Batch, wanted: Sequence[str], *, top_k: int = 0
    ) -> Mapping[str, Tensor]:
        """As `score`, without the model's adapter."""
        return await self._score("score_base", batch, wanted, top_k)

    async def _score(
        self, method: str, batch: Batch, wanted: Sequence[str], top_k: int
    ) -> Mapping[str, Tensor]:
        if not batch.n_sequences:
            return {name: self._nothing(name, top_k) for name in wanted}
        dealt = self._deal(batch)
        answers = await self._each(method, dealt, (list(wanted), top_k))
        plan = [micro.rows for own in dealt for micro in own]
        by_data_rank = {self.topology.data_rank(at): found for at, found in answers}
        return gather_columns(
            batch, plan, [found for rank in range(len(dealt)) for found in by_data_rank[rank]]
        )

    async def update(self, mini: Batch, terms: Sequence[LossTerm]) -> Mapping[str, float]:
        active = weighing_rows(mini, terms)
        part = mini if len(active) == mini.n_sequences else mini.take(active)
        dealt = self._deal(part) if active else [[] for _ in range(self.topology.data)]
        answers = await self._each("update", dealt, ([term.name for term in terms],))
        return answers[0][1]

    def _deal(self, batch: Batch) -> list[list[Micro]]:
        ranks = self.topology.data
        plan = plan_microbatches(
            batch,
            max_tokens=self.max_tokens,
            unit=self.unit,
            shares=self.shares_prefixes,
            hands=ranks,
        )
        return deal(batch, plan, ranks, multiple=self.topology.pipeline)

    async def _each(
        self, method: str, dealt: Sequence[Sequence[Micro]], more: tuple[Any, ...]
    ) -> list[tuple[Any, Any]]:
        """(coordinates, answer) of the ranks that speak for their data rank. A rank receives its
        rows, not the batch."""
        places = list(self.topology.coordinates())
        # One for those that share a data rank: what is the same object is packed once.
        messages = [(self.role, light([micro.batch for micro in own]), *more) for own in dealt]
        found = await self.ranks.each(
            method, [messages[self.topology.data_rank(at)] for at in places]
        )
        return [
            (at, answer)
            for at, answer in zip(places, found, strict=True)
            if self.topology.answers(at)
        ]

    def _nothing(self, name: str, top_k: int) -> Tensor:
        width = {
            "topk_ids": top_k or self.vocab_size,
            "topk_logprobs": top_k + 1 if top_k else self.vocab_size,
        }.get(name)
        dtype = torch.int64 if name == "topk_ids" else torch.float32
        return torch.zeros((0,) if width is None else (0, width), dtype=dtype)

    def weights(self) -> Iterator[Shard]:
        """Through this process, a rank after the other."""
        for blocks in self.ranks.call_now("weights", self.role):
            yield from blocks

    async def onload(self) -> None:
        await self.ranks.call("onload", self.role)

    async def offload(self) -> None:
        await self.ranks.call("offload", self.role)

    def save(self, directory: Path) -> None:
        self.ranks.call_now("save", self.role, str(directory))

    def load(self, directory: Path) -> None:
        self.ranks.call_now("load", self.role, str(directory))

    def export(self, directory: Path, *, averaged: bool = False, part: Exported = "all") -> None:
        self.ranks.call_now("export", self.role, str(directory), averaged, part)
