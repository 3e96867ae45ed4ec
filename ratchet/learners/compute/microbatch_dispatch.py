"""Distribute micro-batches over data-parallel ranks.

Every rank gets the same number of micro-batches, because every layer runs collectives that need all
ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ratchet.batch import Batch
from ratchet.types import Medium


@dataclass(frozen=True)
class MicroBatch:
    """A micro-batch for one rank.

    rows: indices of its rows in the batch; () for a filler, which repeats a row with loss weights
      of 0.
    """

    rows: Sequence[int]
    batch: Batch


def distribute_microbatches(
    batch: Batch, plan: Sequence[Sequence[int]], ranks: int, *, multiple: int = 1
) -> list[list[MicroBatch]]:
    """Return the micro-batches of each data rank.

    Neighbours in the plan have about the same size. They go to different ranks, which compute them
    at the same time.

    plan: the rows of each micro-batch.
    multiple: the number of micro-batches of a rank is a multiple of this (a pipeline needs several
      at a time).
    """
    micros = [MicroBatch(rows, micro) for rows, micro in zip(plan, batch.split(plan), strict=True)]
    if micros:
        micros += [_make_filler(batch)] * (-len(micros) % (ranks * multiple))
    return [micros[rank::ranks] for rank in range(ranks)]


def _make_filler(batch: Batch) -> MicroBatch:
    """Return a micro-batch of the batch's shortest row, with loss weights of 0."""
    shortest = int(batch.lengths_S.argmin())
    row = batch.take([shortest])
    zero_weights = {
        name: weight._replace(values=torch.zeros_like(weight.values))
        for name, weight in row.weights.items()
    }
    return MicroBatch((), replace(row, weights=zero_weights))


def strip_media(batches: Sequence[Batch]) -> list[Batch]:
    """Return the batches with smaller media, to send to a rank.

    Equal media become one object. The bytes of their source files are left out.
    """
    stripped: dict[str, Medium] = {}

    def strip(medium: Medium) -> Medium:
        return stripped.setdefault(medium.key, replace(medium, source=b""))

    return [
        replace(
            batch,
            media_S=tuple(
                tuple(placed._replace(medium=strip(placed.medium)) for placed in row)
                for row in batch.media_S
            ),
        )
        for batch in batches
    ]


def gather_columns(
    batch: Batch, plan: Sequence[Sequence[int]], micro_columns: Sequence[Mapping[str, Tensor]]
) -> dict[str, Tensor]:
    """Merge the columns of micro-batches into columns of the batch.

    "scores" has one entry per sequence. All other columns have one entry per token.

    plan: the rows of each micro-batch.
    """
    columns: dict[str, Tensor] = {}
    starts = batch.starts_S.tolist()
    lengths = batch.lengths_S.tolist()
    for rows, columns_by_name in zip(plan, micro_columns, strict=True):
        row_tokens = [torch.arange(starts[row], starts[row] + lengths[row]) for row in rows]
        tokens = torch.cat(row_tokens) if row_tokens else torch.zeros(0, dtype=torch.int64)
        for name, values in columns_by_name.items():
            if name not in columns:
                size = batch.n_sequences if name == "scores" else batch.n_tokens
                columns[name] = values.new_zeros(size, *values.shape[1:])
            if rows:
                columns[name][list(rows) if name == "scores" else tokens] = values
    return columns
