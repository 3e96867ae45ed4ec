"""Fingerprint the frozen weights of a run whose weights are divided over ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import torch.distributed as dist

from ratchet.models.lora.files import fingerprint_weights, sum_bits
from ratchet.protocols import Shard


def fingerprint_across_ranks(blocks: Iterable[Shard]) -> str | None:
    """Return the fingerprint of the frozen weights, for checkpoints that leave them out.

    Return None if no rank has a frozen weight. All ranks must call it together.

    blocks: this rank's blocks; each block is passed by exactly one rank.
    """
    sums: Counter[str] = Counter()
    for block in blocks:
        sums[block.name] += sum_bits(block.tensor)
    # Pipeline stages and ranks of expert parallelism have different weights.
    sums_by_rank: list[Counter[str]] = [Counter()] * dist.get_world_size()
    dist.all_gather_object(sums_by_rank, sums)
    names = set().union(*sums_by_rank)
    # The sums are modulo 2^64. Shift them into the range of int64.
    totals = {
        name: (sum(rank_sums[name] for rank_sums in sums_by_rank) + 2**63) % 2**64 - 2**63
        for name in names
    }
    return fingerprint_weights(totals) if totals else None
