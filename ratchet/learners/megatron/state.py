"""Write and read checkpoints of a Megatron Core learner, in Megatron's `dist_checkpointing` format.

Any number of ranks can read a checkpoint, whatever number wrote it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.dict_utils import extract_matching_values, merge
from megatron.core.dist_checkpointing.mapping import (
    LocalNonpersistentObject,
    ShardedBase,
    ShardedStateDict,
)
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    TorchDistSaveShardedStrategy,
    _replace_state_dict_keys_with_sharded_keys,  # pyright: ignore[reportPrivateUsage]
    mcore_to_pyt_state_dict,
)
from megatron.core.optimizer.optimizer import ChainedOptimizer
from torch.distributed import checkpoint

from ratchet.checkpoint.manifest import MEGATRON_FOLDER
from ratchet.errors import CheckpointError
from ratchet.learners.megatron.offload import list_real_optimizers
from ratchet.learners.optim.step_rules import OptimizerStepRules
from ratchet.models.lora.files import check_base
from ratchet.models.megatron.blocks import is_model_weight
from ratchet.models.megatron.policy import MegatronPolicy

# Optimizer states are stored in the shapes of the whole weights, so any number of ranks can load
# them.
OPTIMIZER_SHARDING = "fully_reshardable"
METADATA = {"distrib_optim_sharding_type": OPTIMIZER_SHARDING, "chained_optim_avoid_prefix": True}


class InProcessSaveStrategy(TorchDistSaveShardedStrategy):
    """A save strategy that writes Megatron's files in this process.

    Megatron's own strategy forks processes to write, which is unsafe in a process with threads, and
    forbidden in a daemon.
    """

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
    directory: Path,
    model: MegatronPolicy,
    optimizer: Any,
    step_rules: OptimizerStepRules | None,
    base_fingerprint: str | None,
) -> None:
    """Write a checkpoint. All ranks must call it and share the directory.

    base_fingerprint: see `MegatronLearner.base_fingerprint`.
    """
    folder = directory / MEGATRON_FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    dist.barrier()
    state = _make_sharded_state(model, optimizer, is_loading=False)
    if step_rules is not None:
        state["pace"] = {"taken": step_rules.steps_taken, "bad": step_rules.bad_steps}
    if base_fingerprint is not None:
        state["base"] = base_fingerprint
    dist_checkpointing.save(state, str(folder), InProcessSaveStrategy())
    dist.barrier()


def load_state(
    directory: Path,
    model: MegatronPolicy,
    optimizer: Any,
    step_rules: OptimizerStepRules | None,
    base_fingerprint: str | None,
) -> None:
    """Read a checkpoint.

    Raises CheckpointError if the directory has no Megatron checkpoint, or one of another model or
    of other frozen weights.
    """
    folder = directory / MEGATRON_FOLDER
    if not folder.is_dir():
        raise CheckpointError(
            f"{directory} holds no Megatron checkpoint: a learner of another kind saved it. Resume "
            "with that learner.kind."
        )
    try:
        common = dist_checkpointing.load_common_state_dict(str(folder))
    except (CheckpointingException, OSError, RuntimeError) as error:
        raise CheckpointError(f"{folder} can't be read: {error}") from error
    if base_fingerprint is not None:
        check_base(directory, common.get("base"), base_fingerprint)
    step = _find_step(common.get("optimizer", {}))
    with torch.no_grad():
        for adam in _find_torch_adams(optimizer):
            _init_state(adam, step)
        sharded = _make_sharded_state(model, optimizer, is_loading=True)
        # Under another name than the saved one, so that of the optimizer only tensors are read,
        # which Megatron finds by their own names. The rest depends on the division: with expert
        # parallelism the experts' weights have an optimizer of their own.
        wanted = sharded.pop("optimizer", {})
        settings, _ = extract_matching_values(wanted, _is_not_read)
        try:
            state: Any = dist_checkpointing.load({**sharded, "tensors": wanted}, str(folder))
        except (CheckpointingException, KeyError, RuntimeError) as error:
            raise CheckpointError(f"{folder} can't be read: {error}") from error
        for number, chunk in enumerate(model.chunks):
            chunk.load_state_dict(state[f"model{number}"], strict=False)
        if optimizer is not None and step_rules is not None:
            real_optimizer = ChainedOptimizer(list_real_optimizers(optimizer))
            real_optimizer.load_state_dict(merge(settings, state["tensors"]))
            _set_step(optimizer, step)
            step_rules.steps_taken = state["pace"]["taken"]
            step_rules.bad_steps = state["pace"]["bad"]


def _is_not_read(value: Any) -> bool:
    return not isinstance(value, (ShardedBase, LocalNonpersistentObject))


def _find_step(saved: Any) -> int:
    """Return the number of steps of a saved optimizer, which is the same for all parameters."""
    items = saved.items() if isinstance(saved, dict) else enumerate(saved)
    for name, value in items:
        if name in ("step", "common_step") and value is not None:
            return int(value)
        if isinstance(value, (dict, list)) and (step := _find_step(value)):
            return step
    return 0


def _set_step(optimizer: Any, step: int) -> None:
    """Set the number of steps of all parameters."""
    for chained in list_real_optimizers(optimizer):
        for group in chained.optimizer.param_groups:
            if "step" in group:
                group["step"] = step
    for adam in _find_torch_adams(optimizer):
        for moments in adam.state.values():
            moments["step"] = torch.tensor(float(step))  # each parameter counts in its own


def _find_torch_adams(optimizer: Any) -> list[torch.optim.Optimizer]:
    """Return the optimizers that are torch's Adam, which counts steps per parameter.

    Megatron uses it if neither Transformer Engine nor apex provides one.
    """
    inner = (chained.optimizer for chained in list_real_optimizers(optimizer))
    return [adam for adam in inner if isinstance(adam, torch.optim.Adam)]


def _init_state(adam: torch.optim.Optimizer, step: int) -> None:
    """Create the optimizer state that steps create, because Megatron loads into it."""
    for group in adam.param_groups:
        for p in group["params"]:
            if not adam.state[p]:
                adam.state[p] = {
                    "step": torch.tensor(float(step)),
                    "exp_avg": torch.zeros_like(p),
                    "exp_avg_sq": torch.zeros_like(p),
                }


def _make_sharded_state(
    model: MegatronPolicy, optimizer: Any, *, is_loading: bool
) -> dict[str, Any]:
    """Return the sharded state of model and optimizer."""
    metadata = {
        **METADATA,
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
    }
    state: dict[str, Any] = {
        f"model{number}": {
            name: entry
            for name, entry in chunk.sharded_state_dict(metadata=metadata).items()
            if model.adapter is None or not is_model_weight(name)
        }
        for number, chunk in enumerate(model.chunks)
    }
    if optimizer is not None:
        model_states = state["model0"] if len(state) == 1 else dict(state)
        real_optimizer = ChainedOptimizer(list_real_optimizers(optimizer))
        state["optimizer"] = real_optimizer.sharded_state_dict(
            model_states, is_loading=is_loading, metadata=metadata
        )
    return state
