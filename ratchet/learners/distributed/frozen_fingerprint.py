"""Fingerprint the frozen weights of a LoRA run whose weights are divided over ranks."""

from __future__ import annotations

from collections.abc import Collection, Iterable

import torch
import torch.distributed as dist

from ratchet.models.lora.files import fingerprint_weights, sum_bits
from ratchet.protocols import Shard


def fingerprint_across_ranks(
    blocks: Iterable[Shard], names: Collection[str], device: torch.device
) -> str:
    """Return the fingerprint of the frozen weights, for checkpoints that leave them out.

    All ranks must call it together.

    blocks: this rank's blocks; each block is passed by exactly one rank.
    names: names of the weights on all ranks.
    device: the device on which the ranks add up their sums.
    """
    sums = dict.fromkeys(sorted(names), 0)
    for block in blocks:
        sums[block.name] += sum_bits(block.tensor)
    # The sums are modulo 2^64. Shift them into the range of int64.
    totals = torch.tensor(
        [(total + 2**63) % 2**64 - 2**63 for total in sums.values()], device=device
    )
    dist.all_reduce(totals)
    return fingerprint_weights(dict(zip(sums, totals.tolist(), strict=True)))
