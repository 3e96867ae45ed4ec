"""Filling the columns that an algorithm's passes name. T = tokens, K = columns of a teacher's
likeliest tokens."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ratchet.algorithms.base import Algorithm, Pass
from ratchet.batch import Batch
from ratchet.errors import DataError
from ratchet.protocols import Learner


async def fill(batch: Batch, algo: Algorithm, roles: Mapping[str, Learner]) -> Batch:
    """Runs the passes in order. What follows one another of the same role, rows and width is
    computed in one go. Raises DataError for a task whose tag no pass of a column is for: its rows
    would stay without a teacher."""
    _require_every_tag(batch, algo)
    for (role, tag, top_k), items in itertools.groupby(
        algo.passes, key=lambda item: (item.role, item.tag, item.top_k)
    ):
        passes = list(items)
        rows = None if tag is None else _tagged(batch, tag)
        # an empty batch, after a step whose every attempt failed, has its columns too
        if rows == [] and batch.n_sequences:
            continue
        part = batch if rows is None else batch.take(rows)
        columns = await roles[role].score(part, [item.wanted for item in passes], top_k=top_k)
        for item in passes:
            batch = _placed(batch, item, columns[item.wanted], rows)
    return batch


def _require_every_tag(batch: Batch, algo: Algorithm) -> None:
    served: dict[str, set[str | None]] = {}
    for item in algo.passes:
        served.setdefault(item.produces, set()).add(item.tag)
    for column, tags in served.items():
        missing = (
            set() if None in tags else {batch.tags[index] for index in batch.tag_S.tolist()} - tags
        )
        if missing:
            named = ", ".join(sorted(str(tag) for tag in tags))
            raise DataError(
                f"a task has the tag '{min(missing)}', and {column} is only filled for {named}: "
                "add a teacher for it"
            )


def _tagged(batch: Batch, tag: str) -> list[int]:
    return [row for row, index in enumerate(batch.tag_S.tolist()) if batch.tags[index] == tag]


def _placed(batch: Batch, item: Pass, column: Tensor, rows: Sequence[int] | None) -> Batch:
    """The column of some rows, beside what other passes have already put into it."""
    fill = batch.fill_tokens if item.level == "token" else batch.fill_sequences
    if rows is None:
        return fill(**{item.produces: column})
    size = batch.n_tokens if item.level == "token" else batch.n_sequences
    whole = (
        batch.need(item.produces).clone()
        if batch.has(item.produces)
        else column.new_zeros(size, *column.shape[1:])
    )
    chosen = torch.zeros(batch.n_sequences, dtype=torch.bool)
    chosen[list(rows)] = True
    whole[chosen[batch.sequence_T] if item.level == "token" else chosen] = column
    return fill(**{item.produces: whole})
