"""The functions that each rank of a learner runs for a weight sync.

Each takes the rank's weights, its rank and the number of ranks. The weight sync calls it by name.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ratchet.config.resolve import imported
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
    weights: Iterator[Shard], rank: int, world: int, *, dtype: str | None, moving: bool
) -> list[WeightBlock]:
    """Return the rank's blocks, as they would be sent.

    moving: True leaves out frozen weights.
    """
    return [describe_block(shard, dtype) for shard in _select(weights, moving)]


def _select(weights: Iterator[Shard], moving: bool) -> Iterator[Shard]:
    return (shard for shard in weights if not (moving and shard.rests))


def send(
    weights: Iterator[Shard],
    rank: int,
    world: int,
    *,
    dtype: str | None,
    writer: str,
    options: Mapping[str, Any],
    since: Mapping[str, Any] | None = None,
    moving: bool,
) -> list[SentPart]:
    """Send the rank's blocks.

    writer: the transport's function, called with the outgoing blocks, the rank and the options.
    since: arguments of `delta.changes`, to send only changes; None sends whole weights.
    moving: see `describe`.
    """
    weights = _select(weights, moving)
    outgoing = (
        list_whole_blocks(weights, dtype)
        if since is None
        else delta.changes(weights, dtype, **since)
    )
    return imported(writer)(outgoing, rank, **options)


def sums(
    weights: Iterator[Shard], rank: int, world: int, *, dtype: str | None
) -> list[tuple[WeightBlock, str]]:
    """Return the rank's blocks, as they would be sent, each with its checksum."""
    blocks = []
    for shard in weights:
        block = describe_block(shard, dtype)
        tensor = shard.tensor.detach().to(torch_dtype(block.dtype)).contiguous()
        blocks.append((block, checksum(tensor)))
    return blocks


def forget(weights: Iterator[Shard], rank: int, world: int, *, function: str, session: str) -> None:
    """Release everything that the rank keeps for a session.

    function: the transport's release function, called with the session; "" for none.
    """
    delta.forget(session)
    if function:
        imported(function)(session)
