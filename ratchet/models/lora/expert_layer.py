"""Run fused experts with peft's adapters of their parameters.

Importing this file imports peft, which takes seconds.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from peft.tuners.lora.layer import ParamWrapper
from torch import Tensor

from ratchet.models.lora.experts import ExpertFactors


class ExpertLoRA(ParamWrapper):
    """peft's layer of an adapted parameter, with a forward that changes no module.

    peft's own forward replaces the parameter inside the module while it runs, and caches it for all
    threads: threads that compute micro-batches, each with a copy of the model, would get each
    other's tensors.
    """

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        experts: Any = self.get_base_layer()
        if self.disable_adapters:
            return experts(x, *args, **kwargs)
        parameters = dict(experts._parameters)
        layer: Any = self
        while layer is not experts:  # one layer wraps another for each adapted parameter
            parameters[layer.parameter_name] = layer.add_to(parameters[layer.parameter_name])
            layer = layer.base_layer
        # A shallow copy shares everything but the dictionary of its parameters.
        adapted = copy.copy(experts)
        adapted._parameters = parameters
        return adapted(x, *args, **kwargs)

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
