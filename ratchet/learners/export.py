"""Export the blocks of many ranks to a Hugging Face directory.

Only the weights of one file are in memory at a time.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
import torch.distributed as dist

from ratchet.checkpoint.sharded import BlockFiles, save_blocks
from ratchet.models.lora.decoder import merge_lazily
from ratchet.models.lora.files import check_base, fingerprint_weights, save_adapter, sum_bits
from ratchet.models.policy import PolicyModel
from ratchet.models.scalar_head import ScalarHead, save_head
from ratchet.models.weights.hf_weights import SavableTensor
from ratchet.models.weights.weight_layout import PEFT
from ratchet.protocols import Exported, Shard

HEAD = "head.weight"


def export_blocks(
    model: PolicyModel, blocks: Iterable[Shard], rank: int, directory: Path, part: Exported = "all"
) -> None:
    """Write the model from the blocks of all ranks.

    Every rank calls this function.

    Args:
        blocks: the blocks of this rank.
        directory: must be visible to all ranks.
        part: as in `Learner.export`.
    """
    parts = directory / ".blocks"
    save_blocks(parts, rank, blocks, {})
    dist.barrier()
    if rank == 0:
        blocks_of_all = BlockFiles(parts)
        _write(
            model,
            {name: blocks_of_all.whole(name) for name in blocks_of_all.stored},
            directory,
            part,
        )
        shutil.rmtree(parts)
    dist.barrier()


def export_saved(model: PolicyModel, checkpoint: Path, directory: Path) -> None:
    """Write the model from a checkpoint of any number of ranks, in one process.

    Args:
        model: the whole model as at the start of the stage. If it has an adapter, the frozen
            weights are taken from it.

    Raises CheckpointError if the frozen weights are not those of the checkpoint, or if a part of
    the checkpoint is missing.
    """
    saved = BlockFiles(checkpoint)
    frozen_names = model.resting()
    frozen = {
        name: weight.detach() for name, weight in model.canonical_weights() if name in frozen_names
    }
    if frozen:
        check_base(
            checkpoint,
            saved.numbers.get("base"),
            fingerprint_weights({name: sum_bits(weight) for name, weight in frozen.items()}),
        )
    # Names with a slash, such as exp_avg/..., belong to the optimizer.
    learned = {name: saved.whole(name) for name in saved.stored if "/" not in name}
    _write(model, {**frozen, **learned}, directory, "all")


def _write(
    model: PolicyModel, whole: Mapping[str, SavableTensor], directory: Path, part: Exported
) -> None:
    """Write unsharded weights as a Hugging Face model, its base model or its adapter."""
    low_rank = {name: weight for name, weight in whole.items() if name.startswith(PEFT)}
    weights = {
        name: weight for name, weight in whole.items() if name not in low_rank and name != HEAD
    }
    adapter = model.adapter
    if part == "adapter":
        assert adapter is not None, "the model has no adapter"
        save_adapter(directory, adapter, model.check_adapter(adapter.lora), low_rank)
        return
    model.save(
        directory,
        weights
        if adapter is None or part == "base"
        else merge_lazily(weights, low_rank, adapter.lora.scale),
    )
    if HEAD in whole:
        head = ScalarHead(model.hidden_size)
        with torch.no_grad():
            head.weight.copy_(whole[HEAD].to("cpu", torch.float32, copy=True))
        save_head(head, directory)
