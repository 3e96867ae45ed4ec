"""The scoring passes, which fill the columns that an algorithm names.

T = tokens, S = sequences (rows).
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ratchet.algorithms.base import Algorithm, Pass
from ratchet.batch import Batch
from ratchet.errors import DataError
from ratchet.protocols import Learner


async def fill_columns(batch: Batch, algo: Algorithm, roles: Mapping[str, Learner]) -> Batch:
    """Run the scoring passes in order and fill their columns.

    Consecutive passes of the same role, tag, top_k and temperature are computed in one call.

    Raises DataError if a task has a tag for which no pass fills a column: rows with this tag would
    have no teacher.
    """
    _require_every_tag(batch, algo)
    for (role, tag, top_k, temperature), consecutive in itertools.groupby(
        algo.passes,
        key=lambda scoring_pass: (
            scoring_pass.role,
            scoring_pass.tag,
            scoring_pass.top_k,
            scoring_pass.temperature,
        ),
    ):
        passes = list(consecutive)
        rows = None if tag is None else _find_rows_with_tag(batch, tag)
        # An empty batch (every attempt of the step failed) is scored too, to get its columns.
        if rows == [] and batch.n_sequences:
            continue
        scored_rows = batch if rows is None else batch.take(rows)
        if temperature != 1:
            # Rows that were sampled greedily (temperature 0) are scored under temperature 1.
            row_temperature_S = scored_rows.temperature_S
            row_temperature_S = torch.where(row_temperature_S > 0, row_temperature_S, 1.0)
            scored_rows = replace(scored_rows, temperature_S=row_temperature_S * temperature)
        outputs = [scoring_pass.output for scoring_pass in passes]
        columns = await roles[role].score(scored_rows, outputs, top_k=top_k)
        for scoring_pass in passes:
            batch = _fill_rows(batch, scoring_pass, columns[scoring_pass.output], rows)
    return batch


def _require_every_tag(batch: Batch, algo: Algorithm) -> None:
    """Raise DataError if a column has passes for some tags, but not for the tag of every task."""
    tags_by_column: dict[str, set[str | None]] = {}
    for scoring_pass in algo.passes:
        tags_by_column.setdefault(scoring_pass.produces, set()).add(scoring_pass.tag)
    for column, tags in tags_by_column.items():
        missing = (
            set() if None in tags else {batch.tags[index] for index in batch.tag_S.tolist()} - tags
        )
        if missing:
            tag_list = ", ".join(sorted(str(tag) for tag in tags))
            raise DataError(
                f"a task has the tag '{min(missing)}', but {column} is only filled for {tag_list}. "
                "Add a teacher for this tag."
            )


def _find_rows_with_tag(batch: Batch, tag: str) -> list[int]:
    return [row for row, index in enumerate(batch.tag_S.tolist()) if batch.tags[index] == tag]


def _fill_rows(
    batch: Batch, scoring_pass: Pass, column: Tensor, rows: Sequence[int] | None
) -> Batch:
    """Return the batch with a column filled in `rows`, or in all rows if `rows` is None.

    Rows that earlier passes have filled keep their values.
    """
    fill_level = batch.fill_tokens if scoring_pass.level == "token" else batch.fill_sequences
    if rows is None:
        return fill_level(**{scoring_pass.produces: column})
    size = batch.n_tokens if scoring_pass.level == "token" else batch.n_sequences
    full_column = (
        batch.need(scoring_pass.produces).clone()
        if batch.has(scoring_pass.produces)
        else column.new_zeros(size, *column.shape[1:])
    )
    is_scored = torch.zeros(batch.n_sequences, dtype=torch.bool)
    is_scored[list(rows)] = True
    filled_entries = is_scored[batch.sequence_T] if scoring_pass.level == "token" else is_scored
    full_column[filled_entries] = column
    return fill_level(**{scoring_pass.produces: full_column})
