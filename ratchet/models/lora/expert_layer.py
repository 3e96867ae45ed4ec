"""Run fused experts with peft's adapters of their parameters.

Importing this file imports peft, which takes seconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from peft.tuners.lora.layer import ParamWrapper
from torch import Tensor, nn

from ratchet.models.lora.experts import ExpertFactors
from ratchet.models.transformers.expert_parallel import LocalExperts


class ExpertLoRA(ParamWrapper):
    """peft's layer of an adapted parameter, with a forward that changes no module.

    peft's own forward replaces the parameter inside the module while it runs, and caches it for all
    threads: threads that compute micro-batches, each with a copy of the model, would get each
    other's tensors.
    """

    is_applied_inside = False  # True if the experts' own forward calls `adapt`

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        experts: Any = self.get_base_layer()
        adapted = experts if self.is_applied_inside else self.adapt(experts)
        return adapted(x, *args, **kwargs)

    def adapt(self, experts: nn.Module) -> nn.Module:
        """Return the module of the experts with the adapters added to its parameters."""
        if self.disable_adapters:
            return experts
        parameters: dict[str, Any] = dict(experts._parameters)
        layer: Any = self
        while layer is not experts:  # one layer wraps another for each adapted parameter
            parameters[layer.parameter_name] = layer.add_to(parameters[layer.parameter_name])
            layer = layer.base_layer
        # A shallow copy shares everything but the dictionary of its parameters. `copy.copy` fails
        # on a module that FSDP divides.
        adapted = object.__new__(type(experts))
        adapted.__dict__ = {**vars(experts), "_parameters": parameters}
        return adapted

    def add_to(self, weight: Tensor) -> Tensor:
        """Return the weight with the adapter added, in the dtype of the weight."""
        (name,) = self.active_adapters
        factors = ExpertFactors("", self.num_experts, not self._did_swap_in_out_features)
        a: Any = self.lora_A[name]
        b: Any = self.lora_B[name]
        first, second = factors.split(a.weight, b.weight)
        # Autocast would round the sum.
        with torch.autocast(weight.device.type, enabled=False):
            return torch.baddbmm(
                weight, first.to(weight.dtype), second.to(weight.dtype), alpha=self.scaling[name]
            )


def apply_inside(model: nn.Module, divided: Sequence[LocalExperts]) -> None:
    """Let divided experts add their adapters themselves, when FSDP has gathered their weights."""
    layers: dict[nn.Module, ExpertLoRA] = {}
    for module in model.modules():
        if isinstance(module, ExpertLoRA):
            layers.setdefault(module.get_base_layer(), module)  # the outermost one
    for experts in divided:
        if (layer := layers.get(experts.module)) is not None:
            layer.is_applied_inside = True
            experts.adapt = layer.adapt
