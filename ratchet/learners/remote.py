"""Drive a distributed learner, whose ranks are other processes.

The driver plans micro-batches, distributes them over the ranks, and combines the results.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ratchet.batch import Batch, Level
from ratchet.checkpoint.serialization import are_writes_deferred, write_or_defer
from ratchet.learners.compute.microbatch_dispatch import (
    MicroBatch,
    distribute_microbatches,
    gather_columns,
    strip_media,
)
from ratchet.learners.compute.microbatching import (
    plan_microbatches,
    resolve_micro_batch_tokens,
    select_weighted_rows,
)
from ratchet.learners.config import DistributedConfig
from ratchet.learners.distributed.topology import build_topology
from ratchet.protocols import ExportedPart, Learner, LossTerm, Shard
from ratchet.worker_protocols import Workers

# Time between two questions whether ranks still write. Ranks answer between two calls of training.
WRITE_POLL_S = 0.1


class RemoteLearner(Learner):
    """The driver's side of a distributed learner.

    It calls the `LearnerRank` of each rank.

    role: the role whose learner is called.
    device: the kind of device on which the ranks compute.
    unit: the unit that micro-batches never split.
    vocab_size: rows of the model's embedding.
    shares_prefixes: True if the model computes a shared prefix once. It is ignored if `config`
      does not allow it.
    """

    can_offload = True

    def __init__(
        self,
        ranks: Workers,
        config: DistributedConfig,
        role: str,
        *,
        device: str,
        vocab_size: int,
        unit: Level,
        shares_prefixes: bool,
    ) -> None:
        self.ranks = ranks
        self.role = role
        self.vocab_size = vocab_size
        self.unit: Level = unit
        self.topology = build_topology(config)
        self.max_tokens = resolve_micro_batch_tokens(config.micro_batch_tokens, device)
        self.shares_prefixes = shares_prefixes and config.can_share_prefixes

    async def score(
        self, batch: Batch, output_names: Sequence[str], *, top_k: int = 0
    ) -> Mapping[str, Tensor]:
        return await self._score("score", batch, output_names, top_k)

    async def score_base(
        self, batch: Batch, output_names: Sequence[str], *, top_k: int = 0
    ) -> Mapping[str, Tensor]:
        """Score like `score`, without the model's adapter."""
        return await self._score("score_base", batch, output_names, top_k)

    async def _score(
        self, method: str, batch: Batch, output_names: Sequence[str], top_k: int
    ) -> Mapping[str, Tensor]:
        if not batch.n_sequences:
            return {name: self._empty_column(name, top_k) for name in output_names}
        micros = self._distribute(batch)
        results = await self._call_ranks(method, micros, (list(output_names), top_k))
        plan = [micro.rows for rank_micros in micros for micro in rank_micros]
        by_data_rank = {
            self.topology.data_rank(coordinates): columns for coordinates, columns in results
        }
        micro_columns = [columns for rank in range(len(micros)) for columns in by_data_rank[rank]]
        return gather_columns(batch, plan, micro_columns)

    async def update(self, mini: Batch, terms: Sequence[LossTerm]) -> Mapping[str, float]:
        rows = select_weighted_rows(mini, terms)
        weighted = mini if len(rows) == mini.n_sequences else mini.take(rows)
        micros = (
            self._distribute(weighted) if rows else [[] for _ in range(self.topology.data_ranks)]
        )
        results = await self._call_ranks("update", micros, ([term.name for term in terms],))
        _, metrics = results[0]  # sums over all data ranks, the same on each
        return metrics

    def _distribute(self, batch: Batch) -> list[list[MicroBatch]]:
        """Return the micro-batches of each data rank."""
        ranks = self.topology.data_ranks
        plan = plan_microbatches(
            batch,
            max_tokens=self.max_tokens,
            unit=self.unit,
            shares_prefixes=self.shares_prefixes,
            workers=ranks,
        )
        return distribute_microbatches(batch, plan, ranks, multiple=self.topology.pipeline)

    async def _call_ranks(
        self, method: str, micros: Sequence[Sequence[MicroBatch]], arguments: tuple[Any, ...]
    ) -> list[tuple[Any, Any]]:
        """Call a method on all ranks, and return (coordinates, result) of each reporting rank.

        There is one reporting rank per data rank. A rank receives only its own rows.

        micros: the micro-batches of each data rank.
        arguments: further arguments of the method.
        """
        all_coordinates = list(self.topology.coordinates())
        # Ranks of the same data rank get the same object, which is serialised once.
        messages = [
            (self.role, strip_media([micro.batch for micro in rank_micros]), *arguments)
            for rank_micros in micros
        ]
        results = await self.ranks.each(
            method,
            [messages[self.topology.data_rank(coordinates)] for coordinates in all_coordinates],
        )
        return [
            (coordinates, result)
            for coordinates, result in zip(all_coordinates, results, strict=True)
            if self.topology.is_reporting_rank(coordinates)
        ]

    def _empty_column(self, name: str, top_k: int) -> Tensor:
        """Return a column of an empty batch, with the right width and dtype."""
        width = {
            "topk_ids": top_k or self.vocab_size,
            "topk_logprobs": top_k + 1 if top_k else self.vocab_size,
        }.get(name)
        dtype = torch.int64 if name == "topk_ids" else torch.float32
        return torch.zeros((0,) if width is None else (0, width), dtype=dtype)

    def weights(self) -> Iterator[Shard]:
        """Yield the blocks of all ranks through this process, one rank after another."""
        for blocks in self.ranks.call_now("weights", self.role):
            yield from blocks

    def count_later_bytes(self) -> int:
        return max(self.ranks.call_now("count_later_bytes", self.role))

    async def onload(self) -> None:
        await self.ranks.call("onload", self.role)

    async def offload(self) -> None:
        await self.ranks.call("offload", self.role)

    def save(self, directory: Path) -> None:
        if not are_writes_deferred():
            self.ranks.call_now("save", self.role, str(directory))
            return
        self.ranks.call_now("copy_state", self.role, str(directory))
        write_or_defer(self._write_copies)

    def _write_copies(self, root: Path) -> None:
        """Let every rank write its copied state, and wait for them. Other threads may train.

        Raises CheckpointError, once no rank writes any more, if a rank could not write.
        """
        self.ranks.call_now("begin_write", self.role, str(root))
        while any(self.ranks.call_now("is_writing")):
            time.sleep(WRITE_POLL_S)
        self.ranks.call_now("finish_write")

    def load(self, directory: Path) -> None:
        self.ranks.call_now("load", self.role, str(directory))

    def export(
        self, directory: Path, *, averaged: bool = False, part: ExportedPart = "all"
    ) -> None:
        self.ranks.call_now("export", self.role, str(directory), averaged, part)
