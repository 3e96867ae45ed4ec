"""Fingerprint the frozen weights of a run whose weights are divided over ranks."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from itertools import chain

import torch
import torch.distributed as dist

from ratchet.models.lora.files import fingerprint_weights, sum_bits
from ratchet.protocols import Shard


def fingerprint_across_ranks(
    blocks: Iterable[Shard], names: Collection[str], device: torch.device
) -> str | None:
    """Return the fingerprint of the frozen weights, for checkpoints that leave them out.

    Return None if no rank has a frozen weight. All ranks must call it together.

    blocks: this rank's blocks; each block is passed by exactly one rank.
    names: names of the weights of which this rank has a part.
    device: the device on which the ranks add up their sums.
    """
    # Pipeline stages and ranks of expert parallelism have different weights.
    names_by_rank: list[Collection[str]] = [()] * dist.get_world_size()
    dist.all_gather_object(names_by_rank, sorted(names))
    sums = dict.fromkeys(sorted(set(chain.from_iterable(names_by_rank))), 0)
    if not sums:
        return None
    for block in blocks:
        sums[block.name] += sum_bits(block.tensor)
    # The sums are modulo 2^64. Shift them into the range of int64.
    totals = torch.tensor(
        [(total + 2**63) % 2**64 - 2**63 for total in sums.values()], device=device
    )
    dist.all_reduce(totals)
    return fingerprint_weights(dict(zip(sums, totals.tolist(), strict=True)))
