"""From the blocks of many ranks to a Hugging Face directory, with one file's weights in memory at a
time."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
import torch.distributed as dist

from ratchet.checkpoint.sharded import Blocks, save_blocks
from ratchet.models.lora.decoder import merged
from ratchet.models.lora.files import bit_sum, check_base, fingerprint, save_adapter
from ratchet.models.policy import PolicyModel
from ratchet.models.scalar_head import ScalarHead, save_head
from ratchet.models.weights.hf_weights import Savable
from ratchet.models.weights.weight_layout import PEFT
from ratchet.protocols import Exported, Shard

HEAD = "head.weight"


def export_blocks(
    model: PolicyModel, blocks: Iterable[Shard], rank: int, directory: Path, part: Exported = "all"
) -> None:
    """Every rank calls it, with blocks of its own; the directory is one that all of them see. part:
    see `Learner.export`."""
    parts = directory / ".blocks"
    save_blocks(parts, rank, blocks, {})
    dist.barrier()
    if rank == 0:
        blocks_of_all = Blocks(parts)
        _write(
            model,
            {name: blocks_of_all.whole(name) for name in blocks_of_all.stored},
            directory,
            part,
        )
        shutil.rmtree(parts)
    dist.barrier()


def export_saved(model: PolicyModel, checkpoint: Path, directory: Path) -> None:
    """From what any number of ranks saved, by one process. model: whole, as the stage began with
    it: the weights that rest beside an adapter are its own. Raises CheckpointError where these are
    others, or something is missing."""
    saved, resting = Blocks(checkpoint), model.resting()
    rest = {name: weight.detach() for name, weight in model.canonical_weights() if name in resting}
    if rest:
        check_base(
            checkpoint,
            saved.numbers.get("base"),
            fingerprint({name: bit_sum(weight) for name, weight in rest.items()}),
        )
    # others are an optimizer's: exp_avg/...
    learned = {name: saved.whole(name) for name in saved.stored if "/" not in name}
    _write(model, {**rest, **learned}, directory, "all")


def _write(
    model: PolicyModel, whole: Mapping[str, Savable], directory: Path, part: Exported
) -> None:
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
        else merged(weights, low_rank, adapter.lora.scale),
    )
    if HEAD in whole:
        head = ScalarHead(model.hidden_size)
        with torch.no_grad():
            head.weight.copy_(whole[HEAD].to("cpu", torch.float32, copy=True))
        save_head(head, directory)
