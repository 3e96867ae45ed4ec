"""A batch as a dictionary of columns: lists, PackedTensors, or tensors [B, ...].

B = rows of the batch.
"""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import accumulate, pairwise
from typing import Any, Generic, Self, TypeVar, overload

import torch
import torch.distributed as dist
from torch import Tensor

from ratchet.errors import DataError
from ratchet.experience.nemo_rl.batch_columns import (
    MissingBatchColumn,
    Rows,
    add_missing_media,
    concatenate_columns,
    count_rows,
    normalise_indices,
    repeat_rows,
    select_rows,
    slice_rows,
)
from ratchet.experience.nemo_rl.gather_columns import gather_columns
from ratchet.experience.nemo_rl.micro_batches import (
    DynamicBatchingArgs,
    SequencePackingArgs,
    ShardMicroBatch,
    get_lengths,
    plan_dynamic_batches,
    plan_packed_batches,
)
from ratchet.experience.nemo_rl.packed_media import select_media
from ratchet.experience.nemo_rl.packed_tensor import PackedTensor

Row = TypeVar("Row")


class BatchedDataDict(UserDict[str, Any], Generic[Row]):
    """A batch of rows, as a dictionary of columns.

    Example: `BatchedDataDict[DatumSpec]({"idx": [0, 1], "length": torch.tensor([3, 5])})`. The type
    parameter names the fields of a row. Operations raise DataError if columns differ in length or
    an argument does not fit the batch.
    """

    micro_batch_indices: Sequence[Sequence[Sequence[int]]] | None = None
    """Of a shard that was divided by lengths, for each chunk: the first row of each micro-batch and
    the row after its last, counted from the chunk's first. None for other batches."""
    micro_batch_lengths: Sequence[Sequence[int]] = ()
    """For each chunk: the length of each micro-batch in tokens, rounded up."""
    elem_counts_per_gb: Sequence[int] = ()
    """The number of rows of each chunk."""

    @classmethod
    def from_batches(
        cls,
        batches: Sequence[Mapping[str, Any]],
        pad_value_dict: Mapping[str, float] | None = None,
        *,
        allow_missing_packed_tensors: bool = False,
    ) -> Self:
        """Concatenate batches.

        Tensors of two or more dimensions are padded at the end of the second dimension to the
        widest batch. The padding is the column's value in `pad_value_dict`, or 0. Batches without
        rows may lack columns. All others must have the same columns; with
        `allow_missing_packed_tensors` they may lack PackedTensors, whose rows are then without
        segments.

        Raises MissingBatchColumn if a batch with rows lacks a column.
        """
        nonempty = [batch for batch in batches if count_rows(batch)]
        if not nonempty:
            return cls(batches[0]) if batches else cls()
        if allow_missing_packed_tensors:
            nonempty = add_missing_media(nonempty)
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
                name: concatenate_columns(
                    name, [batch[name] for batch in nonempty], fill_values.get(name, 0)
                )
                for name in names
            }
        )

    @property
    def size(self) -> int:
        """The number of rows B."""
        return count_rows(self.data)

    def slice(self, start: int, end: int) -> Self:
        """Return rows [start, end)."""
        if not 0 <= start <= end <= self.size:
            raise DataError(f"rows {start} to {end} are not in a batch of {self.size}")
        return type(self)(
            {name: slice_rows(column, start, end) for name, column in self.data.items()}
        )

    def select_indices(self, indices: Rows) -> Self:
        """Return a batch whose row i is row indices[i] of this one.

        A row may be selected several times; its items in list columns are then shared.
        """
        rows = normalise_indices(indices, self.size)
        return type(self)({name: select_rows(column, rows) for name, column in self.data.items()})

    def repeat_interleave(self, num_repeats: int, *, share_immutable_media: bool = False) -> Self:
        """Return a batch with `num_repeats` consecutive copies of each row.

        Items of list columns are deep copies, so that each repetition extends its own log. With
        `share_immutable_media` the copies share their media: PackedTensors in the items, values of
        columns such as `vllm_images`, and content parts with an image, video or audio clip. This
        enables deduplication of the PackedTensors, those of this batch too.
        """
        share = share_immutable_media
        return type(self)(
            {
                name: repeat_rows(name, column, num_repeats, share_media=share)
                for name, column in self.data.items()
            }
        )

    def reorder_data(self, new_positions: Rows) -> Self:
        """Move row i to position new_positions[i] in this batch, and return the batch.

        This undoes `select_indices(new_positions)`.
        """
        targets = normalise_indices(new_positions, self.size)
        if sorted(targets) != list(range(self.size)):
            raise DataError(f"new_positions={targets} must name each of the {self.size} rows once")
        inverse = sorted(range(len(targets)), key=targets.__getitem__)
        self.data = {name: select_rows(column, inverse) for name, column in self.data.items()}
        self.micro_batch_indices = None  # they name rows of the old order
        return self

    @overload
    def shard_by_batch_size(
        self, shards: int, batch_size: int | None = None, allow_uneven_shards: bool = False
    ) -> list[Self]: ...
    @overload
    def shard_by_batch_size(
        self,
        shards: int,
        batch_size: int | None = None,
        *,
        dynamic_batching_args: DynamicBatchingArgs,
    ) -> tuple[list[Self], list[int]]: ...
    @overload
    def shard_by_batch_size(
        self,
        shards: int,
        batch_size: int | None = None,
        *,
        sequence_packing_args: SequencePackingArgs,
    ) -> tuple[list[Self], list[int]]: ...
    def shard_by_batch_size(
        self,
        shards: int,
        batch_size: int | None = None,
        allow_uneven_shards: bool = False,
        dynamic_batching_args: DynamicBatchingArgs | None = None,
        sequence_packing_args: SequencePackingArgs | None = None,
    ) -> list[Self] | tuple[list[Self], list[int]]:
        """Split the batch into `shards` shards.

        The batch is cut into chunks of `batch_size` rows (None: one chunk), and each chunk into
        `shards` slices. Shard s consists of slice s of every chunk. With shards=2 and batch_size=4,
        [A A B B C C D D] becomes [A A C C] and [B B D D].

        With `allow_uneven_shards`, which requires batch_size=None, the last shards may be smaller
        or empty.

        With `dynamic_batching_args` or `sequence_packing_args`, each chunk is divided by the
        lengths of its rows instead, and the shards have micro-batches: see `get_batch` and the
        iterators. The result is then the shards, and the row in this batch of each of their rows:
        `from_batches(shards).reorder_data(rows)` is this batch.
        """
        chunk = self.size if batch_size is None else batch_size
        if allow_uneven_shards and batch_size is not None:
            raise DataError("allow_uneven_shards excludes batch_size. Remove one")
        if dynamic_batching_args is not None and sequence_packing_args is not None:
            raise DataError("dynamic_batching_args excludes sequence_packing_args. Remove one")
        may_be_uneven = allow_uneven_shards or sequence_packing_args is not None
        if shards < 1 or (chunk and self.size % chunk) or (chunk % shards and not may_be_uneven):
            raise DataError(
                f"{self.size} rows can't be cut into chunks of {chunk} rows, and each chunk into "
                f"{shards} equal slices"
            )
        starts = range(0, self.size, chunk) if chunk else range(0)
        if dynamic_batching_args is not None:
            lengths = get_lengths(self, dynamic_batching_args)
            width = self[dynamic_batching_args["input_key"]].shape[1]
            plan = partial(
                plan_dynamic_batches, shards=shards, args=dynamic_batching_args, width=width
            )
            return self._shard_by_length(shards, starts, plan, lengths)
        if sequence_packing_args is not None:
            lengths = get_lengths(self, sequence_packing_args)
            plan = partial(plan_packed_batches, shards=shards, args=sequence_packing_args)
            return self._shard_by_length(shards, starts, plan, lengths)
        width = -(-chunk // shards)
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

    def _shard_by_length(
        self,
        shards: int,
        starts: range,
        plan: Callable[[Sequence[int]], list[list[ShardMicroBatch]]],
        lengths: Sequence[int],
    ) -> tuple[list[Self], list[int]]:
        """Return the shards and the rows of this batch that they have, in their order.

        Args:
            starts: The first row of each chunk, one chunk apart.
            plan: Returns the micro-batches of each shard for the lengths of a chunk's rows.
        """
        chunks = [(start, plan(lengths[start : start + starts.step])) for start in starts]
        results: list[Self] = []
        all_rows: list[int] = []
        for shard in range(shards):
            planned = [(start, by_shard[shard]) for start, by_shard in chunks]
            rows = [
                start + row for start, micros in planned for micro in micros for row in micro.rows
            ]
            all_rows += rows
            result = self.select_indices(rows)
            result.micro_batch_indices = [_list_bounds(micros) for _, micros in planned]
            result.micro_batch_lengths = [
                [micro.length for micro in micros] for _, micros in planned
            ]
            result.elem_counts_per_gb = [
                sum(len(micro.rows) for micro in micros) for _, micros in planned
            ]
            results.append(result)
        return results, all_rows

    def chunk(self, rank: int, chunks: int) -> Self:
        """Return part `rank` of the batch cut into `chunks` equal parts of consecutive rows."""
        if chunks < 1 or self.size % chunks or not 0 <= rank < chunks:
            raise DataError(f"{self.size} rows have no part {rank} of {chunks} equal parts")
        rows = self.size // chunks
        return self.slice(rank * rows, (rank + 1) * rows)

    def get_batch(self, batch_idx: int, batch_size: int | None = None) -> Self:
        """Return rows [batch_idx * batch_size, (batch_idx + 1) * batch_size).

        If the batch is a shard with micro-batches, it returns the rows of chunk `batch_idx` with
        their micro-batches; `batch_size` is not needed then.
        """
        if self.micro_batch_indices is None:
            if batch_size is None:
                raise DataError("a batch without micro-batches needs batch_size. Pass it")
            return self.slice(batch_idx * batch_size, (batch_idx + 1) * batch_size)
        start = sum(self.elem_counts_per_gb[:batch_idx])
        batch = self.slice(start, start + self.elem_counts_per_gb[batch_idx])
        batch.micro_batch_indices = [self.micro_batch_indices[batch_idx]]
        batch.micro_batch_lengths = [self.micro_batch_lengths[batch_idx]]
        batch.elem_counts_per_gb = [self.elem_counts_per_gb[batch_idx]]
        return batch

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

    def make_microbatch_iterator_with_dynamic_shapes(self, sequence_dim: int = 1) -> Iterator[Self]:
        """Iterate over the micro-batches of dynamic batching.

        Tensors are cut in dimension `sequence_dim` to the micro-batch's length, rounded up.
        """
        for (start, end), length in self._list_microbatches():
            micro_batch = self.slice(start, end)
            micro_batch.truncate_tensors(sequence_dim, length)
            yield micro_batch

    def make_microbatch_iterator_for_packable_sequences(self) -> Iterator[Self]:
        """Iterate over the micro-batches of sequence packing. Their rows are not yet packed."""
        for (start, end), _ in self._list_microbatches():
            yield self.slice(start, end)

    def get_microbatch_iterator_dynamic_shapes_len(self) -> int:
        """Return the number of micro-batches of dynamic batching."""
        return len(self._list_microbatches())

    def get_microbatch_iterator_for_packable_sequences_len(self) -> tuple[int, int]:
        """Return the number of micro-batches, and the length of the longest one when packed."""
        lengths = [length for _, length in self._list_microbatches()]
        return len(lengths), max(lengths)

    def _list_microbatches(self) -> list[tuple[Sequence[int], int]]:
        """Return ([first row, row after the last], length) of each micro-batch of the chunk."""
        if self.micro_batch_indices is None or len(self.micro_batch_indices) != 1:
            raise DataError(
                "this batch does not have the micro-batches of one chunk. Shard it with "
                "dynamic_batching_args or sequence_packing_args, and take a chunk by `get_batch`"
            )
        return list(zip(self.micro_batch_indices[0], self.micro_batch_lengths[0], strict=True))

    def all_gather(self, group: dist.ProcessGroup | None = None) -> Self:
        """Return the rows of all ranks of a group, in the order of the ranks.

        Every rank calls it with the same columns. Ranks may have different numbers of rows. The
        dtype and the other dimensions of a tensor must be equal.

        Raises DataError on every rank if the columns differ in anything else.
        """
        return type(self)(gather_columns(self.data, group))

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

    def get_multimodal_dict(
        self,
        as_tensors: bool = False,
        device: str | torch.device | None = None,
        pixel_dtype: torch.dtype | None = None,
    ) -> dict[str, Any]:
        """Return the columns of media: what a model's forward takes beside the tokens.

        These are the PackedTensors, `token_type_ids` and `mm_token_type_ids`, and the inputs of the
        media in the column `media` (see `GenerationDatumSpec`), by name.

        Args:
            as_tensors: Return the segments of each PackedTensor as one tensor, or None if there are
                none. False returns the PackedTensors, on whatever device they are.
            device: The device of the tensors; None leaves them where they are.
            pixel_dtype: The dtype of `pixel_values` and `pixel_values_videos`; None keeps theirs.

        Raises:
            PackedTensorError: Segments can't be joined; or with deduplication a row's pixels and
                sizes (`image_grid_thw`, ...) have different numbers of segments.
        """
        return select_media(
            self.data, as_tensors=as_tensors, device=device, pixel_dtype=pixel_dtype
        )

    def to(self, device: str | torch.device) -> Self:
        """Move the tensors and PackedTensors of this batch to a device, and return the batch."""
        self.data = {
            name: column.to(device) if isinstance(column, Tensor | PackedTensor) else column
            for name, column in self.data.items()
        }
        return self


def _list_bounds(micro_batches: Sequence[ShardMicroBatch]) -> list[list[int]]:
    """Return the first row of each micro-batch and the row after its last."""
    ends = accumulate(len(micro.rows) for micro in micro_batches)
    return [[begin, end] for begin, end in pairwise([0, *ends])]
