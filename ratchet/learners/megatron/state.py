"""Checkpoints of a learner by Megatron Core, in the format of its `dist_checkpointing`: read by any
number of ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    TorchDistSaveShardedStrategy,
    _replace_state_dict_keys_with_sharded_keys,  # pyright: ignore[reportPrivateUsage]
    mcore_to_pyt_state_dict,
)
from torch.distributed import checkpoint

from ratchet.checkpoint.manifest import MEGATRON
from ratchet.errors import CheckpointError
from ratchet.learners.optim.step_policy import Pace
from ratchet.models.lora.files import check_base
from ratchet.models.megatron.blocks import of_model
from ratchet.models.megatron.policy import MegatronPolicy

# what the optimizer keeps comes in the shapes of the weights, whichever ranks shared it out
KIND = "fully_reshardable"
METADATA = {"distrib_optim_sharding_type": KIND, "chained_optim_avoid_prefix": True}


class InPlace(TorchDistSaveShardedStrategy):
    """The same files, written by this process. Megatron's strategy forks others for it, which a
    process with threads had better not, and a daemon may not."""

    def __init__(self) -> None:
        super().__init__("torch_dist", 1)

    def save(self, sharded_state_dict: ShardedStateDict, checkpoint_dir: str | Path) -> None:
        keyed, _, _ = _replace_state_dict_keys_with_sharded_keys(
            sharded_state_dict, self.keep_only_main_replica
        )
        checkpoint.save(
            mcore_to_pyt_state_dict(keyed, False),
            storage_writer=checkpoint.FileSystemWriter(checkpoint_dir),
            planner=MCoreSavePlanner(
                dedup_replicated_tensors=not self.keep_only_main_replica, flatten_state_dict=False
            ),
        )


def save_state(
    directory: Path, model: MegatronPolicy, optimizer: Any, pace: Pace | None, base: str | None
) -> None:
    """Every rank calls it; all of them see the directory. base: see `MegatronLearner.base`."""
    folder = directory / MEGATRON
    folder.mkdir(parents=True, exist_ok=True)
    dist.barrier()
    state = _state(model, optimizer, loading=False)
    if pace is not None:
        state["pace"] = {"taken": pace.taken, "bad": pace.bad}
    if base is not None:
        state["base"] = base
    dist_checkpointing.save(state, str(folder), InPlace())
    dist.barrier()


def load_state(
    directory: Path, model: MegatronPolicy, optimizer: Any, pace: Pace | None, base: str | None
) -> None:
    """Raises CheckpointError where there is nothing of the kind, or it is of another model or
    base."""
    folder = directory / MEGATRON
    if not folder.is_dir():
        raise CheckpointError(
            f"{directory} holds nothing of Megatron's: it was saved by a learner of another kind"
        )
    if base is not None:
        check_base(
            directory, dist_checkpointing.load_common_state_dict(str(folder)).get("base"), base
        )
    with torch.no_grad():
        for adam in _torch_adams(optimizer):
            _begin(adam)
        try:
            found: Any = dist_checkpointing.load(
                _state(model, optimizer, loading=True), str(folder)
            )
        except (CheckpointingException, KeyError, RuntimeError) as error:
            raise CheckpointError(f"{folder} can't be read: {error}") from error
        for number, chunk in enumerate(model.chunks):
            chunk.load_state_dict(found[f"model{number}"], strict=False)
        if optimizer is not None and pace is not None:
            optimizer.load_state_dict(found["optimizer"])
            for adam in _torch_adams(optimizer):
                for moments in adam.state.values():
                    # Megatron gives all of them one tensor
                    moments["step"] = moments["step"].clone()
            pace.taken, pace.bad = found["pace"]["taken"], found["pace"]["bad"]


def _torch_adams(optimizer: Any) -> list[torch.optim.Optimizer]:
    """Where neither Transformer Engine nor apex brings another: these count steps by parameter."""
    inner = (
        [] if optimizer is None else [chained.optimizer for chained in optimizer.chained_optimizers]
    )
    return [made for made in inner if isinstance(made, torch.optim.Adam)]


def _begin(adam: torch.optim.Optimizer) -> None:
    """What a first step would: Megatron reads into what is there."""
    for group in adam.param_groups:
        for p in group["params"]:
            if not adam.state[p]:
                adam.state[p] = {
                    "step": torch.zeros(()),
                    "exp_avg": torch.zeros_like(p),
                    "exp_avg_sq": torch.zeros_like(p),
                }


def _state(model: MegatronPolicy, optimizer: Any, *, loading: bool) -> dict[str, Any]:
    metadata = {
        **METADATA,
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
    }
    state: dict[str, Any] = {
        f"model{number}": {
            name: entry
            for name, entry in chunk.sharded_state_dict(metadata=metadata).items()
            if model.adapter is None or not of_model(name)
        }
        for number, chunk in enumerate(model.chunks)
    }
    if optimizer is not None:
        given = state["model0"] if len(state) == 1 else dict(state)
        state["optimizer"] = optimizer.sharded_state_dict(
            given, is_loading=loading, metadata=metadata
        )
    return state
