"""What has to be done before `megatron.core` is imported."""

from __future__ import annotations

import importlib
from typing import Any

import torch

from ratchet.models.parallel.megatron_sizes import require_megatron


def make_ready() -> None:
    """Raises MissingDependency where megatron-core is not installed."""
    require_megatron()
    if not torch.cuda.is_available():
        from ratchet.models.megatron.cpu_patches import install

        install()
    _mend_routers(importlib.import_module("megatron.core.transformer.moe.moe_utils"))
    distributed = importlib.import_module("megatron.core.optimizer.distrib_optimizer")
    _mend_optimizer(distributed)
    _mend_buckets(distributed)


# --- what version 0.16.1 forgets: the first two where there is no Transformer Engine


def _mend_routers(moe_utils: Any) -> None:
    """A name that is imported with it is asked for without."""
    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None


def _mend_optimizer(distributed: Any) -> None:
    """A checkpoint's tensors are copied into all that the optimizer keeps, and of torch's own that
    is the step too."""
    made: Any = distributed.DistributedOptimizer
    copy = made._set_main_param_and_optimizer_states

    def copy_but_step(self: Any, parameter: Any, tensors: dict[str, Any]) -> None:
        group, place = self.model_param_group_index_map[parameter]
        kept = self.optimizer.state[self.optimizer.param_groups[group]["params"][place]]
        copy(self, parameter, {**({"step": kept["step"]} if "step" in kept else {}), **tensors})

    made._set_main_param_and_optimizer_states = copy_but_step


def _mend_buckets(distributed: Any) -> None:
    """For a checkpoint it lays the buckets of a buffer end to end without their padding, and looks
    for weights in them by places that count it: where there are several (the last stage of a
    pipeline has one for the tied embedding), all behind the first are cut from the wrong place, and
    the end is zeros. So the padding stays in."""
    made: Any = distributed.DistributedOptimizer
    gather = made.get_parameter_state_dp_zero

    def gather_padded(self: Any, *args: Any, **named: Any) -> Any:
        for buffer in self.buffers:
            buffer.numel_unpadded = buffer.numel
            for bucket in buffer.buckets:
                bucket.numel_unpadded = bucket.grad_data.numel()
        return gather(self, *args, **named)

    made.get_parameter_state_dp_zero = gather_padded
