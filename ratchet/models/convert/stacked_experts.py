"""Map blocks of single experts' matrices to blocks of the tensors that transformers has.

Files of most families have a matrix of each expert: `mlp.experts.3.gate_proj.weight`. The modules
of transformers 5 stack them: `mlp.experts.gate_up_proj` is [experts, 2 x width, hidden] and
`mlp.experts.down_proj` is [experts, hidden, width]. Weight syncs use the names of the modules.
"""

from __future__ import annotations

import re
from dataclasses import replace

from ratchet.protocols import Shard

SINGLE = re.compile(r"(.+\.mlp\.experts)\.(\d+)\.(gate|up|down)_proj\.weight")


def stack_block(block: Shard, n_experts: int) -> Shard:
    """Return a block under the name that transformers' module gives it."""
    match = SINGLE.fullmatch(block.name)
    if match is None:
        return block
    parent, expert, projection = match[1], int(match[2]), match[3]
    (rows, columns), (row, column) = block.shape, block.offsets
    if projection == "down":
        name, shape = "down_proj", (n_experts, rows, columns)
    else:
        name, shape = "gate_up_proj", (n_experts, 2 * rows, columns)
    offsets = (expert, row + rows * (projection == "up"), column)
    return replace(
        block, name=f"{parent}.{name}", shape=shape, offsets=offsets, tensor=block.tensor[None]
    )
