"""The scoring passes, which fill the columns that an algorithm names.

T = tokens, S = sequences (rows).
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ratchet.algorithms.base import Algorithm, Pass
from ratchet.batch import Batch
from ratchet.errors import DataError
from ratchet.protocols import Learner


async def fill_columns(batch: Batch, algo: Algorithm, roles: Mapping[str, Learner]) -> Batch:
    """Run the scoring passes in order and fill their columns.

    Consecutive passes of the same role, tag and top_k are computed in one call. Raises DataError if
    no pass fills a column for some task's tag: its rows would have no teacher.
    """
    _require_every_tag(batch, algo)
    for (role, tag, top_k), items in itertools.groupby(
        algo.passes, key=lambda item: (item.role, item.tag, item.top_k)
    ):
        passes = list(items)
        rows = None if tag is None else _rows_with_tag(batch, tag)
        # A batch is empty if every attempt of a step failed. It needs its columns too.
        if rows == [] and batch.n_sequences:
            continue
        part = batch if rows is None else batch.take(rows)
        columns = await roles[role].score(part, [item.output for item in passes], top_k=top_k)
        for item in passes:
            batch = _fill_rows(batch, item, columns[item.output], rows)
    return batch


def _require_every_tag(batch: Batch, algo: Algorithm) -> None:
    """Raise DataError if a column has passes for some tags, but not for the tag of every task."""
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
                f"a task has the tag '{min(missing)}', and {column} is only filled for {named}. "
                "Add a teacher for it."
            )


def _rows_with_tag(batch: Batch, tag: str) -> list[int]:
    return [row for row, index in enumerate(batch.tag_S.tolist()) if batch.tags[index] == tag]


def _fill_rows(batch: Batch, item: Pass, column: Tensor, rows: Sequence[int] | None) -> Batch:
    """Fill a column for `rows` (None: all), and keep rows that earlier passes have filled."""
    fill_level = batch.fill_tokens if item.level == "token" else batch.fill_sequences
    if rows is None:
        return fill_level(**{item.produces: column})
    size = batch.n_tokens if item.level == "token" else batch.n_sequences
    full_column = (
        batch.need(item.produces).clone()
        if batch.has(item.produces)
        else column.new_zeros(size, *column.shape[1:])
    )
    is_scored = torch.zeros(batch.n_sequences, dtype=torch.bool)
    is_scored[list(rows)] = True
    full_column[is_scored[batch.sequence_T] if item.level == "token" else is_scored] = column
    return fill_level(**{item.produces: full_column})
