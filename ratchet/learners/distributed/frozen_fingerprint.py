"""The fingerprint of the weights that are frozen beside an adapter, if ranks divide them."""

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

    All ranks call it at the same time.

    blocks: blocks that this rank speaks for.
    names: names of the weights on all ranks.
    device: where ranks exchange numbers.
    """
    sums = dict.fromkeys(sorted(names), 0)
    for block in blocks:
        sums[block.name] += sum_bits(block.tensor)
    totals = torch.tensor(
        [(total + 2**63) % 2**64 - 2**63 for total in sums.values()], device=device
    )
    dist.all_reduce(totals)
    return fingerprint_weights(dict(zip(sums, totals.tolist(), strict=True)))
