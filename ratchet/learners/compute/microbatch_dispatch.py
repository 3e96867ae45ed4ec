"""Which micro-batches each data rank computes: as many on every rank, since all of them meet in
every layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ratchet.batch import Batch
from ratchet.types import Medium


@dataclass(frozen=True)
class Micro:
    """rows: of the batch; none in a filler, which computes a row of the batch again, with weights
    of 0."""

    rows: Sequence[int]
    batch: Batch


def deal(
    batch: Batch, plan: Sequence[Sequence[int]], ranks: int, *, multiple: int = 1
) -> list[list[Micro]]:
    """By data rank. Neighbours in the plan, which are of about one size, are computed at the same
    time.

    multiple: how many micro-batches a rank takes at a time (a pipeline is filled with several).
    """
    made = [Micro(rows, part) for rows, part in zip(plan, batch.cut(plan), strict=True)]
    if made:
        made += [_filler(batch)] * (-len(made) % (ranks * multiple))
    return [made[rank::ranks] for rank in range(ranks)]


def _filler(batch: Batch) -> Micro:
    shortest = int(batch.lengths_S.argmin())
    row = batch.take([shortest])
    nothing = {
        name: weight._replace(values=torch.zeros_like(weight.values))
        for name, weight in row.weights.items()
    }
    return Micro((), replace(row, weights=nothing))


def light(batches: Sequence[Batch]) -> list[Batch]:
    """What a rank needs of them: each of their media once, whatever objects they are, without the
    file it was made from."""
    known: dict[str, Medium] = {}

    def one(medium: Medium) -> Medium:
        return known.setdefault(medium.key, replace(medium, source=b""))

    return [
        replace(
            batch,
            media_S=tuple(
                tuple(at._replace(medium=one(at.medium)) for at in row) for row in batch.media_S
            ),
        )
        for batch in batches
    ]


def gather_columns(
    batch: Batch, plan: Sequence[Sequence[int]], found: Sequence[Mapping[str, Tensor]]
) -> dict[str, Tensor]:
    """The columns of the batch, from those of each micro-batch's rows. "scores" are of sequences,
    all others of tokens."""
    columns: dict[str, Tensor] = {}
    starts, lengths = batch.starts_S.tolist(), batch.lengths_S.tolist()
    for rows, parts in zip(plan, found, strict=True):
        spans = [torch.arange(starts[row], starts[row] + lengths[row]) for row in rows]
        tokens = torch.cat(spans) if spans else torch.zeros(0, dtype=torch.int64)
        for name, part in parts.items():
            if name not in columns:
                size = batch.n_sequences if name == "scores" else batch.n_tokens
                columns[name] = part.new_zeros(size, *part.shape[1:])
            if rows:
                columns[name][list(rows) if name == "scores" else tokens] = part
    return columns
