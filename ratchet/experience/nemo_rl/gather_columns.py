"""Gather the columns of a batch that is divided by rows among the ranks of a group."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ratchet.errors import DataError
from ratchet.experience.nemo_rl.packed_tensor import PackedTensor


def gather_columns(columns: Mapping[str, Any], group: dist.ProcessGroup | None) -> dict[str, Any]:
    """Return the columns with the rows of all ranks, in the order of the ranks.

    Args:
        columns: Tensors, PackedTensors and lists of B rows each. B may differ by rank.
        group: The group; None: all ranks.

    Raises:
        DataError: The ranks' columns differ in their names, or in a tensor's dtype or other
            dimensions, or a rank's columns differ in length. It is raised on every rank.
    """
    n_ranks = dist.get_world_size(group)
    lengths = {name: _count_rows(column) for name, column in columns.items()}
    kinds = {name: _describe_column(column) for name, column in columns.items()}
    parts: list[Any] = [None] * n_ranks
    dist.all_gather_object(parts, (lengths, kinds), group=group)
    sizes = _find_row_counts([lengths for lengths, _ in parts])
    _check_equal_columns([kinds for _, kinds in parts])
    gathered: dict[str, Any] = {}
    for name in sorted(columns):  # all ranks must gather a column at the same time
        column = columns[name]
        if isinstance(column, Tensor):
            gathered[name] = _gather_tensor(column, sizes, group)
        elif isinstance(column, PackedTensor):
            gathered[name] = PackedTensor.concat(_gather_list([column], n_ranks, group))
        else:
            gathered[name] = _gather_list(column, n_ranks, group)
    return {name: gathered[name] for name in columns}


def _count_rows(column: Any) -> int | None:
    """Return the length of a column; None if it has none, as a tensor without dimensions."""
    return None if isinstance(column, Tensor) and column.ndim == 0 else len(column)


def _describe_column(column: Any) -> str:
    """Return what ranks must have in common to gather a column: all but its number of rows."""
    if isinstance(column, PackedTensor):
        return f"a PackedTensor of dim_to_pack={column.dim_to_pack}"
    if not isinstance(column, Tensor):
        return "a list"
    shape = ", ".join(map(str, ("B", *column.shape[1:])))
    return f"a tensor [{shape}] of {column.dtype}"


def _find_row_counts(lengths_by_rank: Sequence[Mapping[str, int | None]]) -> list[int]:
    """Return each rank's number of rows. Raise DataError unless its columns have one length."""
    counts: list[int] = []
    for rank, lengths in enumerate(lengths_by_rank):
        count = next(iter(lengths.values()), 0)
        if count is None or len(set(lengths.values())) > 1:
            raise DataError(f"the columns of rank {rank} must have one length, not {lengths}")
        counts.append(count)
    return counts


def _check_equal_columns(columns_by_rank: Sequence[Mapping[str, str]]) -> None:
    """Raise DataError unless all ranks have the columns of rank 0."""
    expected = columns_by_rank[0]
    for rank, columns in enumerate(columns_by_rank):
        for name in sorted({*expected, *columns}):
            if columns.get(name) != expected.get(name):
                raise DataError(
                    f"column '{name}' is {expected.get(name, 'missing')} on rank 0, and "
                    f"{columns.get(name, 'missing')} on rank {rank}. Give all ranks the same "
                    "columns, padded to the same width"
                )


def _gather_tensor(column: Tensor, sizes: Sequence[int], group: dist.ProcessGroup | None) -> Tensor:
    """Return the rows of all ranks, on the column's device.

    sizes: The number of rows of each rank.
    """
    # Collectives need equal shapes, so every rank sends as many rows as the largest.
    padded = column.new_zeros((max(sizes), *column.shape[1:]))
    padded[: len(column)] = column
    received = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(received, padded, group=group)
    return torch.cat([rows[:size] for rows, size in zip(received, sizes, strict=True)])


def _gather_list(column: Sequence[Any], n_ranks: int, group: dist.ProcessGroup | None) -> list[Any]:
    """Return the items of all ranks."""
    # Ranks of one group are processes of one run, which trust each other's pickles.
    received: list[Any] = [None] * n_ranks
    dist.all_gather_object(received, list(column), group=group)
    return [item for items in received for item in items]
