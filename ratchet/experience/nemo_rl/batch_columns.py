"""Select, repeat and concatenate the rows of a batch's columns: tensors, lists or PackedTensors."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from ratchet.errors import DataError
from ratchet.experience.nemo_rl.packed_media import list_shared_media
from ratchet.experience.nemo_rl.packed_tensor import PackedTensor

Rows = Sequence[int] | Tensor


class MissingBatchColumn(DataError, KeyError):
    """A batch lacks a column that the others have. NeMo RL raises KeyError here."""

    __str__ = DataError.__str__  # KeyError's would put the text in quotes


class UnequalColumns(DataError, ValueError):
    """The columns of a batch differ in their number of rows. NeMo RL raises ValueError here."""


def count_rows(batch: Mapping[str, Any]) -> int:
    """Return the number of rows. Raises UnequalColumns if columns differ in it."""
    counts = {name: len(column) for name, column in batch.items()}
    if len(set(counts.values())) > 1:
        raise UnequalColumns(f"the columns of a batch differ in length: {counts}")
    return next(iter(counts.values()), 0)


def normalise_indices(indices: Rows, size: int) -> list[int]:
    """Return row numbers as a list of non-negative ints, or raise DataError."""
    rows = [int(i) for i in (indices.tolist() if isinstance(indices, Tensor) else indices)]
    outside = next((i for i in rows if not -size <= i < size), None)
    if outside is not None:
        raise DataError(f"row {outside} is not in a batch of {size}")
    return [i % size for i in rows]


def slice_rows(column: Any, start: int, end: int) -> Any:
    """Return rows [start, end) of a column."""
    if isinstance(column, PackedTensor):
        return column.slice(range(start, end))
    return column[start:end]


def select_rows(column: Any, rows: list[int]) -> Any:
    """Return a column with these rows."""
    if isinstance(column, PackedTensor):
        return column.slice(rows)
    if isinstance(column, Tensor):
        return column[torch.tensor(rows, dtype=torch.int64, device=column.device)]
    return [column[i] for i in rows]


def repeat_rows(name: str, column: Any, times: int, *, share_media: bool) -> Any:
    """Return a column with each row `times` times. Items of a list are deep copies.

    With `share_media` the copies share images, videos and audio clips. A PackedTensor's rows always
    share their segments.
    """
    if isinstance(column, PackedTensor):
        return column.slice([i for i in range(len(column)) for _ in range(times)])
    if isinstance(column, Tensor):
        return column.repeat_interleave(times, dim=0)
    repeated: list[Any] = []
    for item in column:
        shared = list_shared_media(name, item) if share_media else []
        # An object that is in the memo is its own copy.
        memo = {id(medium): medium for medium in shared}
        repeated += [copy.deepcopy(item, dict(memo)) for _ in range(times)]
    return repeated


def concatenate_columns(name: str, columns: Sequence[Any], fill: float) -> Any:
    """Return the rows of all batches. Tensors are padded to the widest with `fill`."""
    kinds = {_describe_kind(column) for column in columns}
    if len(kinds) > 1:
        raise DataError(
            f"column '{name}' is {' in one batch and '.join(sorted(kinds, reverse=True))} in "
            "another: make them alike"
        )
    if isinstance(columns[0], PackedTensor):
        return PackedTensor.concat(columns)
    if not isinstance(columns[0], Tensor):
        return [item for column in columns for item in column]
    if columns[0].ndim < 2:
        return torch.cat(list(columns))
    width = max(column.shape[1] for column in columns)
    return torch.cat(
        [
            pad(column, (0, 0) * (column.ndim - 2) + (0, width - column.shape[1]), value=fill)
            for column in columns
        ]
    )


def add_missing_media(batches: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the batches with each PackedTensor that another one has, without segments."""
    templates = {
        name: column
        for batch in batches
        for name, column in batch.items()
        if isinstance(column, PackedTensor)
    }
    return [
        {
            **{
                name: PackedTensor.empty_rows_like(template, count_rows(batch))
                for name, template in templates.items()
            },
            **batch,
        }
        for batch in batches
    ]


def _describe_kind(column: Any) -> str:
    if isinstance(column, PackedTensor):
        return "a PackedTensor"
    return "a tensor" if isinstance(column, Tensor) else "a list"
