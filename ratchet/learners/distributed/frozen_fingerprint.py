"""The weights that rest while an adapter trains, where ranks divide them."""

from __future__ import annotations

from collections.abc import Collection, Iterable

import torch
import torch.distributed as dist

from ratchet.models.lora.files import bit_sum, fingerprint
from ratchet.protocols import Shard


def fingerprint_of_ranks(
    blocks: Iterable[Shard], names: Collection[str], device: torch.device
) -> str:
    """What a checkpoint of the adapter says of them, which leaves them out; all ranks ask at the
    same time. blocks: for which this rank speaks. names: of the weights on all ranks together.
    device: that ranks exchange numbers by."""
    sums = dict.fromkeys(sorted(names), 0)
    for block in blocks:
        sums[block.name] += bit_sum(block.tensor)
    totals = torch.tensor(
        [(total + 2**63) % 2**64 - 2**63 for total in sums.values()], device=device
    )
    dist.all_reduce(totals)
    return fingerprint(dict(zip(sums, totals.tolist(), strict=True)))
