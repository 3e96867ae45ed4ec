"""Export a sharded model to a Hugging Face directory.

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
from ratchet.models.weights.weight_layout import PEFT_PREFIX
from ratchet.protocols import ExportedPart, Shard

HEAD = "head.weight"  # name of the scalar head's weight


def export_blocks(
    model: PolicyModel,
    blocks: Iterable[Shard],
    rank: int,
    directory: Path,
    part: ExportedPart = "all",
) -> None:
    """Write the model from the weight blocks of all ranks.

    Every rank calls this function.

    Args:
        blocks: The blocks of this rank.
        directory: A directory that all ranks share.
        part: As in `Learner.export`.
    """
    block_directory = directory / ".blocks"
    save_blocks(block_directory, rank, blocks, {})
    dist.barrier()
    if rank == 0:
        block_files = BlockFiles(block_directory)
        _write_model(
            model,
            {name: block_files.get_lazy_tensor(name) for name in block_files.blocks_by_name},
            directory,
            part,
        )
        shutil.rmtree(block_directory)
    dist.barrier()


def export_saved(model: PolicyModel, checkpoint: Path, directory: Path) -> None:
    """Write the model from a checkpoint of any number of ranks, in one process.

    Args:
        model: The whole model as at the start of the stage. If it has an adapter, its frozen
            weights are exported too, because checkpoints leave them out.

    Raises CheckpointError if the checkpoint belongs to other frozen weights, or lacks a block of a
    weight.
    """
    checkpoint_blocks = BlockFiles(checkpoint)
    frozen_names = model.frozen_names()
    frozen = {
        name: weight.detach() for name, weight in model.canonical_weights() if name in frozen_names
    }
    if frozen:
        check_base(
            checkpoint,
            checkpoint_blocks.metadata.get("base"),
            fingerprint_weights({name: sum_bits(weight) for name, weight in frozen.items()}),
        )
    # Names with a slash, such as exp_avg/..., belong to the optimizer.
    trained = {
        name: checkpoint_blocks.get_lazy_tensor(name)
        for name in checkpoint_blocks.blocks_by_name
        if "/" not in name
    }
    _write_model(model, {**frozen, **trained}, directory, "all")


def _write_model(
    model: PolicyModel, weights: Mapping[str, SavableTensor], directory: Path, part: ExportedPart
) -> None:
    """Write unsharded weights in Hugging Face format.

    part: "all" (adapter merged into the weights), "base" (without the adapter) or "adapter" (the
        adapter alone).
    """
    adapter_weights = {
        name: weight for name, weight in weights.items() if name.startswith(PEFT_PREFIX)
    }
    model_weights = {
        name: weight
        for name, weight in weights.items()
        if name not in adapter_weights and name != HEAD
    }
    adapter = model.adapter
    if part == "adapter":
        assert adapter is not None, "the model has no adapter"
        save_adapter(
            directory, adapter, model.resolve_adapter_layers(adapter.lora), adapter_weights
        )
        return
    model.save(
        directory,
        model_weights
        if adapter is None or part == "base"
        else merge_lazily(
            model_weights,
            adapter_weights,
            adapter.lora.scale,
            model.resolve_expert_factors(adapter.lora),
        ),
    )
    if HEAD in weights:
        head = ScalarHead(model.hidden_size)
        with torch.no_grad():
            head.weight.copy_(weights[HEAD].to("cpu", torch.float32, copy=True))
        save_head(head, directory)
