"""A column of a batch whose rows have different numbers of images, videos or audio clips.

`PackedTensor` has the methods of NeMo RL's class (nemo_rl/data/multimodal_utils.py). A row is a
list of segments, which are tensors that are joined along one dimension. Rows of one prompt may
share the segments: they are then stored, moved and sent once.

B = rows.
"""

from __future__ import annotations

import copy
import uuid
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Self

import torch
from torch import Tensor
from torch.nn.functional import pad

from ratchet.errors import DataError


class PackedTensorError(DataError, ValueError, IndexError, RuntimeError):
    """Segments can't be packed as asked. NeMo RL raises one of the builtin errors here."""


@dataclass(frozen=True, eq=False)
class PackedSegment:
    """A tensor of a row, such as the patches of an image."""

    tensor: Tensor
    key: str = field(default_factory=lambda: uuid.uuid4().hex)
    """Identifies the content. Copies keep it, also those of other processes, so that rows which are
    brought together again share the segment."""


class PackedTensor:
    """B rows, each of which has no or several tensors (segments).

    Example: `PackedTensor([image_a, None], dim_to_pack=0)` has two rows, the second without media.

    Operations raise PackedTensorError if the arguments do not fit.

    Attributes:
        rows: The segments of each row.
        dim_to_pack: The dimension along which `as_tensor` joins the segments.
        pad_to_max_shape: Pad the other dimensions with zeros to the largest segment, instead of
            requiring that they are equal.
        deduplication_enabled: True if deep copies share the segments, and if `concat` stores
            segments with equal keys once.
    """

    def __init__(
        self,
        tensors: Tensor | Sequence[Tensor | None],
        dim_to_pack: int,
        *,
        pad_to_max_shape: bool = False,
    ) -> None:
        """Create a row of each tensor, or of None a row without segments."""
        values = [tensors] if isinstance(tensors, Tensor) else tensors
        wrong = not isinstance(values, list | tuple) or not values
        if wrong or not all(value is None or isinstance(value, Tensor) for value in values):
            raise PackedTensorError(
                f"tensors={tensors!r:.80} must be a tensor, or a non-empty list of tensors and "
                "None. For a column without rows, use PackedTensor.empty_rows_like(column, 0)"
            )
        self.rows: list[tuple[PackedSegment, ...]] = [
            () if value is None else (PackedSegment(value),) for value in values
        ]
        self.dim_to_pack = dim_to_pack
        self.pad_to_max_shape = pad_to_max_shape
        self.deduplication_enabled = False

    def _with_rows(self, rows: Iterable[tuple[PackedSegment, ...]]) -> Self:
        """Return a column with these rows and the settings of this one."""
        column = copy.copy(self)
        column.rows = list(rows)
        return column

    def __len__(self) -> int:
        return len(self.rows)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        if self.deduplication_enabled:
            return self._with_rows(self.rows)
        return self._map_segments(
            lambda segment: PackedSegment(copy.deepcopy(segment.tensor, memo))
        )

    @property
    def tensors(self) -> list[Tensor | None]:
        """The tensor of each row, or None for a row without segments.

        With deduplication: the stored tensors, each once, whatever rows have them.
        """
        if self.deduplication_enabled:
            return [segment.tensor for segment in self._list_stored().values()]
        return [
            row[0].tensor if len(row) == 1 else self._with_rows([row]).as_tensor()
            for row in self.rows
        ]

    def enable_deduplication(self) -> Self:
        """Let copies of this column share its segments, and return the column.

        Shared tensors must not be changed in place.
        """
        self.deduplication_enabled = True
        return self

    def logical_segment_counts_by_row(self) -> list[int]:
        """Return the number of segments of each row."""
        return [len(row) for row in self.rows]

    def as_tensor(self, device: str | torch.device | None = None) -> Tensor | None:
        """Return all segments in the order of the rows, joined along `dim_to_pack`.

        The result is on `device` (None: where the segments are), and None if no row has a segment.
        A shared segment occurs in each of its rows; it is moved once.
        """
        stored = {key: segment.tensor.to(device) for key, segment in self._list_stored().items()}
        tensors = [stored[segment.key] for row in self.rows for segment in row]
        if not tensors:
            return None
        dim = self._check_shapes(list(stored.values()))
        if self.pad_to_max_shape:
            sizes = [max(sizes) for sizes in zip(*(x.shape for x in stored.values()), strict=True)]
            tensors = [_pad_other_dims(tensor, sizes, dim) for tensor in tensors]
        return torch.cat(tensors, dim)

    def to(self, device: str | torch.device) -> Self:
        """Move the segments of this column to a device, and return the column."""
        moved = self._map_segments(
            lambda segment: PackedSegment(segment.tensor.to(device), segment.key)
        )
        self.rows = moved.rows
        return self

    def to_dtype(self, dtype: torch.dtype) -> Self:
        """Return a column whose floating-point segments have another dtype.

        Segments of integers, such as sizes of images, stay as they are.
        """
        return self._map_segments(
            lambda segment: (
                PackedSegment(segment.tensor.to(dtype), f"{segment.key}/{dtype}")
                if segment.tensor.is_floating_point() and segment.tensor.dtype != dtype
                else segment
            )
        )

    def slice(self, indices: Sequence[int] | Tensor) -> Self:
        """Return a column whose row i is row indices[i] of this one. Negative ones count back."""
        rows = [int(i) for i in (indices.tolist() if isinstance(indices, Tensor) else indices)]
        outside = next((i for i in rows if not -len(self) <= i < len(self)), None)
        if outside is not None:
            raise PackedTensorError(f"row {outside} is not in a PackedTensor of {len(self)} rows")
        return self._with_rows(self.rows[i] for i in rows)

    @staticmethod
    def empty_like(other: PackedTensor) -> PackedTensor:
        """Return a column with as many rows as `other`, and no segments."""
        return PackedTensor.empty_rows_like(other, len(other))

    @staticmethod
    def empty_rows_like(other: PackedTensor, num_rows: int) -> PackedTensor:
        """Return a column of `num_rows` rows without segments, with the settings of `other`."""
        if num_rows < 0:
            raise PackedTensorError(f"num_rows={num_rows} must be at least 0")
        return other._with_rows([()] * num_rows)

    @staticmethod
    def concat(from_packed_tensors: Sequence[PackedTensor]) -> PackedTensor:
        """Return a column with the rows of all columns.

        If any of them has deduplication enabled, the result has, and stores segments with equal
        keys once.
        """
        return _concatenate(from_packed_tensors, merge_rows=False)

    @staticmethod
    def flattened_concat(from_packed_tensors: Sequence[PackedTensor]) -> PackedTensor:
        """Return a column with one row for each column, which has all segments of its rows."""
        return _concatenate(from_packed_tensors, merge_rows=True)

    @staticmethod
    def merge_segments(from_packed_tensors: Sequence[PackedTensor]) -> PackedTensor:
        """Return a column of one row with the segments of all rows, such as a log's messages."""
        return PackedTensor.flattened_concat([PackedTensor.concat(from_packed_tensors)])

    def _list_stored(self) -> dict[str, PackedSegment]:
        """Return the segments by their keys, in the order of their first use."""
        stored: dict[str, PackedSegment] = {}
        for segment in chain.from_iterable(self.rows):
            stored.setdefault(segment.key, segment)
        return stored

    def _map_segments(self, change: Callable[[PackedSegment], PackedSegment]) -> Self:
        """Return a column with changed segments. A segment of several rows is changed once."""
        changed = {key: change(segment) for key, segment in self._list_stored().items()}
        return self._with_rows(tuple(changed[s.key] for s in row) for row in self.rows)

    def _check_shapes(self, tensors: Sequence[Tensor]) -> int:
        """Return `dim_to_pack` counted from 0, or raise PackedTensorError."""
        shapes = [tuple(tensor.shape) for tensor in tensors]
        rank = len(shapes[0])
        if any(len(shape) != rank for shape in shapes):
            raise PackedTensorError(
                f"segments must have the same rank to be packed: their shapes are {shapes}"
            )
        if not -rank <= self.dim_to_pack < rank:
            raise PackedTensorError(
                f"dim_to_pack={self.dim_to_pack} is invalid for segments of shape {shapes[0]}. "
                f"Set dim_to_pack to {-rank} to {rank - 1}"
            )
        dim = self.dim_to_pack % rank
        if self.pad_to_max_shape:
            return dim
        unlike = next((s for s in shapes if _drop(s, dim) != _drop(shapes[0], dim)), None)
        if unlike is not None:
            raise PackedTensorError(
                f"segments of shapes {shapes[0]} and {unlike} can't be joined along dim_to_pack="
                f"{self.dim_to_pack}. Set pad_to_max_shape=True"
            )
        return dim


def _concatenate(columns: Sequence[PackedTensor], *, merge_rows: bool) -> PackedTensor:
    settings = {(column.dim_to_pack, column.pad_to_max_shape) for column in columns}
    if len(settings) != 1:
        raise PackedTensorError(
            "columns to concatenate must be at least one, with equal (dim_to_pack, "
            f"pad_to_max_shape): they have {sorted(settings)}"
        )
    rows: list[tuple[PackedSegment, ...]] = []
    for column in columns:
        rows += [tuple(chain.from_iterable(column.rows))] if merge_rows else column.rows
    result = columns[0]._with_rows(rows)
    result.deduplication_enabled = any(column.deduplication_enabled for column in columns)
    # Rows from several processes have equal segments as several objects: all become the first.
    return result._map_segments(lambda segment: segment)


def _drop(shape: Sequence[int], dim: int) -> tuple[int, ...]:
    return (*shape[:dim], *shape[dim + 1 :])


def _pad_other_dims(tensor: Tensor, sizes: Sequence[int], dim: int) -> Tensor:
    """Pad all dimensions but `dim` at their ends with zeros to `sizes`."""
    missing = [0 if i == dim else sizes[i] - n for i, n in enumerate(tensor.shape)]
    return pad(tensor, [n for size in reversed(missing) for n in (0, size)])
