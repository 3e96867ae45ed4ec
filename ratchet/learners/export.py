"""From the blocks of many ranks to a Hugging Face directory, with one file's weights in memory at a time."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
import torch.distributed as dist

from ratchet.checkpoint.blocks import Blocks, save_blocks
from ratchet.learners.dtensor import DTensorLearner
from ratchet.models.heads import ScalarHead, save_head

HEAD = "head.weight"


def export_blocks(learner: DTensorLearner, directory: Path) -> None:
    """Every rank calls it; the directory is one that all of them see."""
    parts = directory / ".blocks"
    save_blocks(
        parts, learner.mesh.rank, (block for item in learner.held if item.first for block in item.blocks(item.local)), {}
    )
    dist.barrier()
    if learner.mesh.rank == 0:
        blocks = Blocks(parts)
        learner.model.save(directory, {name: blocks.whole(name) for name in blocks.stored if name != HEAD})
        if HEAD in blocks.stored:
            head = ScalarHead(learner.model.hidden_size)
            with torch.no_grad():
                head.weight.copy_(blocks.whole(HEAD).to("cpu", torch.float32, copy=True))
            save_head(head, directory)
        shutil.rmtree(parts)
    dist.barrier()
