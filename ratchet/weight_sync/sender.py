"""What a rank of a learner does for a link: functions of (its weights, its rank, how many there
are), named by the link."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ratchet.config.resolve import imported
from ratchet.protocols import Shard
from ratchet.weight_sync import delta
from ratchet.weight_sync.checksums import checksum
from ratchet.weight_sync.weight_blocks import Block, Part, block_of, sends, torch_dtype


def describe(
    weights: Iterator[Shard], rank: int, world: int, *, dtype: str | None, moving: bool
) -> list[Block]:
    """What the rank has, as it would be sent. moving: without what rests."""
    return [block_of(shard, dtype) for shard in _sent(weights, moving)]


def _sent(weights: Iterator[Shard], moving: bool) -> Iterator[Shard]:
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
) -> list[Part]:
    """writer: the transport's function, called with what goes out, the rank and the options. since:
    send changes only. moving: see `describe`."""
    weights = _sent(weights, moving)
    outgoing = sends(weights, dtype) if since is None else delta.changes(weights, dtype, **since)
    return imported(writer)(outgoing, rank, **options)


def sums(
    weights: Iterator[Shard], rank: int, world: int, *, dtype: str | None
) -> list[tuple[Block, str]]:
    """The blocks with their checksums, as they would be sent."""
    found = []
    for shard in weights:
        block = block_of(shard, dtype)
        found.append(
            (block, checksum(shard.tensor.detach().to(torch_dtype(block.dtype)).contiguous()))
        )
    return found


def forget(weights: Iterator[Shard], rank: int, world: int, *, function: str, session: str) -> None:
    """Lets go of what was kept for a link."""
    delta.forget(session)
    if function:
        imported(function)(session)
