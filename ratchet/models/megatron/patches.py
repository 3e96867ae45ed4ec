"""Prepare the import of `megatron.core`, and patch bugs of version 0.16.1."""

from __future__ import annotations

import importlib
from typing import Any

import torch

from ratchet.models.parallel.megatron_sizes import require_megatron


def prepare_import() -> None:
    """Make `megatron.core` importable and patch it.

    Raises MissingDependency if megatron-core is not installed.
    """
    require_megatron()
    if not torch.cuda.is_available():
        from ratchet.models.megatron.cpu_patches import install

        install()
    _patch_routers(importlib.import_module("megatron.core.transformer.moe.moe_utils"))
    latent = importlib.import_module("megatron.core.transformer.multi_latent_attention")
    _patch_latent_attention(latent)
    distributed = importlib.import_module("megatron.core.optimizer.distrib_optimizer")
    _patch_optimizer(distributed)
    _patch_buckets(distributed)


# --- patches of version 0.16.1; the first three are needed only without Transformer Engine


def _patch_routers(moe_utils: Any) -> None:
    """Define a name that `moe_utils` uses, but imports only if Transformer Engine is installed."""
    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None


def _patch_latent_attention(attention: Any) -> None:
    """Let `MLASelfAttention` be built without Transformer Engine.

    It asks whether a layer is Transformer Engine's whenever Megatron's wrapper of that package can
    be imported, which it can without the package too. The class of such layers is then None.
    """
    attention.HAVE_TE = isinstance(attention.TELinear, type)


def _patch_optimizer(distributed: Any) -> None:
    """Let the optimizer load a checkpoint without Transformer Engine.

    Megatron copies a checkpoint tensor into each entry of a parameter's state. The state of torch's
    optimizers also has the entry `step`, for which the checkpoint has no tensor. The patch adds the
    current step.
    """
    optimizer_class: Any = distributed.DistributedOptimizer
    set_states = optimizer_class._set_main_param_and_optimizer_states

    def set_states_with_step(self: Any, parameter: Any, tensors: dict[str, Any]) -> None:
        group, index = self.model_param_group_index_map[parameter]
        state = self.optimizer.state[self.optimizer.param_groups[group]["params"][index]]
        step = {"step": state["step"]} if "step" in state else {}
        set_states(self, parameter, {**step, **tensors})

    optimizer_class._set_main_param_and_optimizer_states = set_states_with_step


def _patch_buckets(distributed: Any) -> None:
    """Keep the padding of buckets in optimizer checkpoints.

    Megatron concatenates the buckets of a buffer without their padding, but cuts weights out of it
    at offsets that include the padding. So with several buckets, all weights after the first bucket
    are wrong, and the last are zeros. The last pipeline stage has two buckets if the embedding is
    tied.
    """
    optimizer_class: Any = distributed.DistributedOptimizer
    gather = optimizer_class.get_parameter_state_dp_zero

    def gather_padded(self: Any, *args: Any, **named: Any) -> Any:
        for buffer in self.buffers:
            buffer.numel_unpadded = buffer.numel
            for bucket in buffer.buckets:
                bucket.numel_unpadded = bucket.grad_data.numel()
        return gather(self, *args, **named)

    optimizer_class.get_parameter_state_dp_zero = gather_padded
