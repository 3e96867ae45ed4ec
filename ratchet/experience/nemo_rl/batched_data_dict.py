"""A batch as a dictionary of columns: lists or tensors whose first dimension is the batch.

B = rows of the batch.
"""

from __future__ import annotations

import copy
from collections import UserDict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Generic, Self, TypeVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from ratchet.errors import DataError

Row = TypeVar("Row")
Rows = Sequence[int] | Tensor


class MissingBatchColumn(DataError, KeyError):
    """A batch lacks a column that the others have. NeMo RL raises KeyError here."""

    __str__ = DataError.__str__  # KeyError's would put the text in quotes


class BatchedDataDict(UserDict[str, Any], Generic[Row]):
    """A batch of rows, as a dictionary of columns.

    Example: `BatchedDataDict[DatumSpec]({"idx": [0, 1], "length": torch.tensor([3, 5])})`. The type
    parameter names the fields of a row. Operations raise DataError if columns differ in length or
    an argument does not fit the batch.
    """

    @classmethod
    def from_batches(
        cls, batches: Sequence[Mapping[str, Any]], pad_value_dict: Mapping[str, float] | None = None
    ) -> Self:
        """Concatenate batches.

        Tensors of two or more dimensions are padded at the end of the second dimension to the
        widest batch. The padding is the column's value in `pad_value_dict`, or 0. Batches without
        rows may lack columns. All others must have the same columns.

        Raises MissingBatchColumn if a batch with rows lacks a column.
        """
        nonempty = [batch for batch in batches if _count_rows(batch)]
        if not nonempty:
            return cls(batches[0]) if batches else cls()
        fill_values = pad_value_dict or {}
        names = dict.fromkeys(name for batch in nonempty for name in batch)
        for name in names:
            lacking = [i for i, batch in enumerate(nonempty) if name not in batch]
            if lacking:
                raise MissingBatchColumn(
                    f"column '{name}' is missing from batch {lacking[0]}. Add it to all "
                    "non-empty batches, or remove it from all"
                )
        return cls(
            {
                name: _concatenate(
                    name, [batch[name] for batch in nonempty], fill_values.get(name, 0)
                )
                for name in names
            }
        )

    @property
    def size(self) -> int:
        """The number of rows B."""
        return _count_rows(self.data)

    def slice(self, start: int, end: int) -> Self:
        """Return rows [start, end)."""
        if not 0 <= start <= end <= self.size:
            raise DataError(f"rows {start} to {end} are not in a batch of {self.size}")
        return type(self)({name: column[start:end] for name, column in self.data.items()})

    def select_indices(self, indices: Rows) -> Self:
        """Return a batch whose row i is row indices[i] of this one.

        A row may be selected several times; its items in list columns are then shared.
        """
        rows = _normalise_indices(indices, self.size)
        return type(self)({name: _select_rows(column, rows) for name, column in self.data.items()})

    def repeat_interleave(self, num_repeats: int) -> Self:
        """Return a batch with `num_repeats` consecutive copies of each row.

        Items of list columns are deep copies, so that each repetition extends its own log.
        """
        return type(self)(
            {name: _repeat_rows(column, num_repeats) for name, column in self.data.items()}
        )

    def reorder_data(self, new_positions: Rows) -> Self:
        """Move row i to position new_positions[i] in this batch, and return the batch.

        This undoes `select_indices(new_positions)`.
        """
        targets = _normalise_indices(new_positions, self.size)
        if sorted(targets) != list(range(self.size)):
            raise DataError(f"new_positions={targets} must name each of the {self.size} rows once")
        inverse = sorted(range(len(targets)), key=targets.__getitem__)
        self.data = {name: _select_rows(column, inverse) for name, column in self.data.items()}
        return self

    def shard_by_batch_size(
        self, shards: int, batch_size: int | None = None, allow_uneven_shards: bool = False
    ) -> list[Self]:
        """Split the batch into `shards` shards.

        The batch is cut into chunks of `batch_size` rows (None: one chunk), and each chunk into
        `shards` slices. Shard s consists of slice s of every chunk. With shards=2 and batch_size=4,
        [A A B B C C D D] becomes [A A C C] and [B B D D].

        With `allow_uneven_shards`, which requires batch_size=None, the last shards may be smaller
        or empty.
        """
        chunk = self.size if batch_size is None else batch_size
        if allow_uneven_shards and batch_size is not None:
            raise DataError("allow_uneven_shards excludes batch_size. Remove one")
        if (
            shards < 1
            or (chunk and self.size % chunk)
            or (chunk % shards and not allow_uneven_shards)
        ):
            raise DataError(
                f"{self.size} rows can't be cut into chunks of {chunk} rows, and each chunk into "
                f"{shards} equal slices"
            )
        width = -(-chunk // shards)
        starts = range(0, self.size, chunk) if chunk else range(0)
        return [
            self.select_indices(
                [
                    row
                    for start in starts
                    for row in range(
                        start + shard * width, min(start + (shard + 1) * width, start + chunk)
                    )
                ]
            )
            for shard in range(shards)
        ]

    def chunk(self, rank: int, chunks: int) -> Self:
        """Return part `rank` of the batch cut into `chunks` equal parts of consecutive rows."""
        if chunks < 1 or self.size % chunks or not 0 <= rank < chunks:
            raise DataError(f"{self.size} rows have no part {rank} of {chunks} equal parts")
        rows = self.size // chunks
        return self.slice(rank * rows, (rank + 1) * rows)

    def get_batch(self, batch_idx: int, batch_size: int) -> Self:
        """Return rows [batch_idx * batch_size, (batch_idx + 1) * batch_size)."""
        return self.slice(batch_idx * batch_size, (batch_idx + 1) * batch_size)

    def make_microbatch_iterator(self, microbatch_size: int) -> Iterator[Self]:
        """Iterate over the batch in slices of `microbatch_size` consecutive rows."""
        if microbatch_size < 1 or self.size % microbatch_size:
            raise DataError(
                f"{self.size} rows can't be cut into micro-batches of {microbatch_size}"
            )
        return (
            self.slice(start, start + microbatch_size)
            for start in range(0, self.size, microbatch_size)
        )

    def truncate_tensors(self, dim: int, truncated_len: int) -> None:
        """Keep the first `truncated_len` entries of dimension `dim` of every tensor column.

        Columns without that dimension stay as they are.
        """
        for name, column in self.data.items():
            if isinstance(column, Tensor) and column.ndim > dim:
                if truncated_len > column.shape[dim]:
                    raise DataError(
                        f"column '{name}' has {column.shape[dim]} entries in dimension {dim}, "
                        f"fewer than truncated_len={truncated_len}"
                    )
                self.data[name] = column.narrow(dim, 0, truncated_len)

    def get_dict(self) -> dict[str, Any]:
        """Return the columns as a plain dictionary, which is not a copy."""
        return self.data

    def to(self, device: str | torch.device) -> Self:
        """Move the tensor columns of this batch to a device, and return the batch."""
        self.data = {
            name: column.to(device) if isinstance(column, Tensor) else column
            for name, column in self.data.items()
        }
        return self


def _count_rows(batch: Mapping[str, Any]) -> int:
    counts = {name: len(column) for name, column in batch.items()}
    if len(set(counts.values())) > 1:
        raise DataError(f"the columns of a batch differ in length: {counts}")
    return next(iter(counts.values()), 0)


def _normalise_indices(indices: Rows, size: int) -> list[int]:
    """Return row numbers as a list of non-negative ints, or raise DataError."""
    rows = [int(i) for i in (indices.tolist() if isinstance(indices, Tensor) else indices)]
    outside = next((i for i in rows if not -size <= i < size), None)
    if outside is not None:
        raise DataError(f"row {outside} is not in a batch of {size}")
    return [i % size for i in rows]


def _select_rows(column: Any, rows: list[int]) -> Any:
    if isinstance(column, Tensor):
        return column[torch.tensor(rows, dtype=torch.int64, device=column.device)]
    return [column[i] for i in rows]


def _repeat_rows(column: Any, times: int) -> Any:
    if isinstance(column, Tensor):
        return column.repeat_interleave(times, dim=0)
    return [copy.deepcopy(item) for item in column for _ in range(times)]


def _concatenate(name: str, columns: Sequence[Any], fill: float) -> Any:
    if not all(isinstance(column, Tensor) for column in columns):
        if any(isinstance(column, Tensor) for column in columns):
            raise DataError(
                f"column '{name}' is a tensor in one batch and a list in another: make them alike"
            )
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
