"""Divide rows of different lengths over shards, in micro-batches with a limit on their tokens.

Dynamic batching pads the rows of a micro-batch to its longest; sequence packing lays them end to
end. Lengths are rounded up to a multiple, which parallel forms of a model need.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NotRequired, TypedDict

from ratchet.errors import DataError


class DynamicBatchingArgs(TypedDict):
    """Settings of dynamic batching.

    Fields:
        max_tokens_per_microbatch: Limit on rows times the longest row, rounded up.
        sequence_length_round: Multiple to which the length of a micro-batch is rounded up, but not
            beyond the width of `input_key`.
        input_key: Name of the column of tokens, [B, S].
        input_lengths_key: Name of the column of the rows' lengths, int [B].
    """

    max_tokens_per_microbatch: int
    sequence_length_round: int
    input_key: str
    input_lengths_key: str


class SequencePackingArgs(TypedDict):
    """Settings of sequence packing.

    Fields:
        max_tokens_per_microbatch: Limit on the sum of the rows' lengths, each rounded up.
        sequence_length_pad_multiple: Multiple to which each row's length is rounded up.
        input_key: Name of the column of tokens, [B, S].
        input_lengths_key: Name of the column of the rows' lengths, int [B].
        algorithm: "concatenative" fills micro-batches in the order of the rows. "first_fit_shuffle"
            and the other names of upstream are first-fit decreasing here.
        microbatch_order: "largest_first" puts a shard's longest micro-batches first.
    """

    max_tokens_per_microbatch: int
    sequence_length_pad_multiple: int
    input_key: str
    input_lengths_key: str
    algorithm: str
    microbatch_order: NotRequired[Literal["packer", "largest_first"]]


class ShardingError(DataError, ValueError):
    """Rows can't be divided as the settings say. NeMo RL raises ValueError here."""


@dataclass(frozen=True)
class ShardMicroBatch:
    """A micro-batch: the numbers of its rows, and its length in tokens, rounded up.

    `length` is that of the padded rows with dynamic batching, and of all rows with packing.
    """

    rows: Sequence[int]
    length: int


def plan_dynamic_batches(
    lengths: Sequence[int], shards: int, args: DynamicBatchingArgs, *, width: int
) -> list[list[ShardMicroBatch]]:
    """Return the micro-batches of each shard, which have the same sizes and lengths in all shards.

    The rows are sorted by length, and dealt to the shards in turns.

    Args:
        lengths: The rows' lengths. Their number is a multiple of `shards`.
        width: The width of the column of tokens, which limits lengths.
    """
    order = sorted(range(len(lengths)), key=lengths.__getitem__)
    limit = args["max_tokens_per_microbatch"]
    planned: list[tuple[range, int]] = []  # places in the order of a shard, length
    for place in range(len(lengths) // shards):
        longest = max(lengths[order[place * shards + shard]] for shard in range(shards))
        length = min(_round_up(longest, args["sequence_length_round"]), width)
        _check_length(length, limit)
        # Lengths only grow in this order, so the newest is the longest.
        places = planned[-1][0] if planned else range(0)
        if planned and (len(places) + 1) * length <= limit:
            planned[-1] = (range(places.start, place + 1), length)
        else:
            planned.append((range(place, place + 1), length))
    return [
        [
            ShardMicroBatch([order[place * shards + shard] for place in places], length)
            for places, length in planned
        ]
        for shard in range(shards)
    ]


def plan_packed_batches(
    lengths: Sequence[int], shards: int, args: SequencePackingArgs
) -> list[list[ShardMicroBatch]]:
    """Return the micro-batches of each shard, as many in each.

    Raises ShardingError if a row is longer than a micro-batch, if there are fewer rows than
    micro-batches, or if `microbatch_order` is unknown.
    """
    order = args.get("microbatch_order", "packer")
    if order not in ("packer", "largest_first"):
        raise ShardingError(f"microbatch_order={order!r} must be 'packer' or 'largest_first'")
    limit = args["max_tokens_per_microbatch"]
    padded = [_round_up(length, args["sequence_length_pad_multiple"]) for length in lengths]
    _check_length(max(padded, default=0), limit)
    if args["algorithm"] == "concatenative":
        bins = _pack_in_order(padded, limit)
    else:
        bins = _pack_first_fit(padded, limit)
    _fill_up(bins, _round_up(max(len(bins), shards), shards))
    micro_batches = [ShardMicroBatch(rows, sum(padded[row] for row in rows)) for rows in bins]
    by_shard = [micro_batches[shard::shards] for shard in range(shards)]
    if order == "largest_first":
        return [sorted(shard, key=lambda micro: -micro.length) for shard in by_shard]
    return by_shard


def _pack_in_order(lengths: Sequence[int], limit: int) -> list[list[int]]:
    bins: list[list[int]] = []
    room = 0
    for row, length in enumerate(lengths):
        if not bins or length > room:
            bins.append([])
            room = limit
        bins[-1].append(row)
        room -= length
    return bins


def _pack_first_fit(lengths: Sequence[int], limit: int) -> list[list[int]]:
    """Put each row, the longest first, into the first bin with room for it."""
    bins: list[list[int]] = []
    rooms: list[int] = []
    for row in sorted(range(len(lengths)), key=lambda row: -lengths[row]):
        length = lengths[row]
        place = next((i for i, room in enumerate(rooms) if room >= length), len(bins))
        if place == len(bins):
            bins.append([])
            rooms.append(limit)
        bins[place].append(row)
        rooms[place] -= length
    return bins


def _fill_up(bins: list[list[int]], count: int) -> None:
    """Move rows of the bins with most rows into new ones, until there are `count` bins."""
    n_rows = sum(map(len, bins))
    if n_rows < count:
        raise ShardingError(
            f"{n_rows} rows can't fill {count} micro-batches, as many in each shard. Lower the "
            "number of shards, or pass more rows"
        )
    while len(bins) < count:
        bins.append([max(bins, key=len).pop()])


def _check_length(length: int, limit: int) -> None:
    if length > limit:
        raise ShardingError(
            f"a row of {length} tokens, rounded up, exceeds max_tokens_per_microbatch={limit}. "
            "Raise it, or shorten the row"
        )


def _round_up(length: int, multiple: int) -> int:
    if multiple < 1:
        raise ShardingError(
            f"lengths can't be rounded up to multiples of {multiple}: give 1 or more"
        )
    return -(-length // multiple) * multiple


def get_lengths(
    batch: Mapping[str, Any], args: DynamicBatchingArgs | SequencePackingArgs
) -> list[int]:
    """Return the lengths of a batch's rows, from the column that the settings name."""
    for key in ("input_key", "input_lengths_key"):
        if args[key] not in batch:
            raise ShardingError(f"{key}={args[key]} is not a column of the batch. Mend it")
    return [int(length) for length in batch[args["input_lengths_key"]]]
