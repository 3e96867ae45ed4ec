"""The functions that each rank of a learner runs for a weight sync.

Their first arguments are the rank's weights, its rank and the number of ranks. The weight sync
calls them by name, on all ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ratchet.config.resolve import import_object
from ratchet.protocols import Shard
from ratchet.weight_sync import delta
from ratchet.weight_sync.checksums import checksum
from ratchet.weight_sync.weight_blocks import (
    SentPart,
    WeightBlock,
    describe_block,
    list_whole_blocks,
    torch_dtype,
)


def describe(
    weights: Iterator[Shard], rank: int, world_size: int, *, dtype: str | None, skip_frozen: bool
) -> list[WeightBlock]:
    """Return the descriptions of the blocks that the rank would send.

    skip_frozen: True leaves out frozen weights.
    """
    return [describe_block(shard, dtype) for shard in _drop_frozen(weights, skip_frozen)]


def _drop_frozen(weights: Iterator[Shard], skip_frozen: bool) -> Iterator[Shard]:
    return (shard for shard in weights if not (skip_frozen and shard.is_frozen))


def send(
    weights: Iterator[Shard],
    rank: int,
    world_size: int,
    *,
    dtype: str | None,
    writer: str,
    options: Mapping[str, Any],
    delta_args: Mapping[str, Any] | None = None,
    skip_frozen: bool,
) -> list[SentPart]:
    """Send the rank's blocks.

    writer: the transport's function, called with the outgoing parts, the rank and the options.
    delta_args: arguments of `delta.iterate_changes`; None sends whole weights.
    skip_frozen: see `describe`.
    """
    weights = _drop_frozen(weights, skip_frozen)
    outgoing = (
        list_whole_blocks(weights, dtype)
        if delta_args is None
        else delta.iterate_changes(weights, dtype, **delta_args)
    )
    return import_object(writer)(outgoing, rank, **options)


def compute_checksums(
    weights: Iterator[Shard], rank: int, world_size: int, *, dtype: str | None
) -> list[tuple[WeightBlock, str]]:
    """Return the descriptions of the rank's blocks, each with the checksum of the bytes to send."""
    blocks = []
    for shard in weights:
        block = describe_block(shard, dtype)
        tensor = shard.tensor.detach().to(torch_dtype(block.dtype)).contiguous()
        blocks.append((block, checksum(tensor)))
    return blocks


def forget(
    weights: Iterator[Shard], rank: int, world_size: int, *, function: str, session: str
) -> None:
    """Release everything that the rank keeps for a session.

    function: the transport's release function, called with the session; "" for none.
    """
    delta.forget(session)
    if function:
        import_object(function)(session)
