"""The provider of models that Megatron Core divides (`Provider`)."""

from __future__ import annotations

from typing import Any

import torch

from ratchet.config.resolve import resolve
from ratchet.errors import ModelError
from ratchet.learners.config import MegatronConfig
from ratchet.learners.distributed.stage_spec import RoleSpec
from ratchet.learners.distributed.topology import megatron_sizes, topology_of
from ratchet.learners.megatron.learner import MegatronLearner
from ratchet.models.megatron.build import begin, end
from ratchet.models.megatron.policy import MegatronPolicy
from ratchet.models.model_source import Origin
from ratchet.models.parallel.megatron_sizes import Fp8
from ratchet.models.policy import PolicyModel


class MegatronModels:
    def __init__(self, config: MegatronConfig, device: torch.device, dtype: torch.dtype) -> None:
        self.config, self.device = config, device
        self.half = config.weights == "bfloat16"
        self.dtype = torch.bfloat16 if self.half else dtype
        self.topology, self.sizes = topology_of(config), megatron_sizes(config)
        begin(self.sizes)

    def load(self, origin: Origin) -> MegatronPolicy:
        """Raises ModelError for a model that Megatron's layers can't be made of."""
        shape = origin.decoder()
        if shape is None:
            raise ModelError(
                "learner.kind=megatron has no layers for this architecture: set "
                "learner.kind=dtensor"
            )
        made = self._empty(shape)
        made.fill(origin.reader())
        return made

    def copy(self, policy: PolicyModel) -> MegatronPolicy:
        assert isinstance(policy, MegatronPolicy), "another provider's"
        made = self._empty(policy.shape)
        if policy.adapter is not None:
            made.attach(policy.adapter)
        with torch.no_grad():
            theirs = dict(policy.named_parameters())
            for name, parameter in made.named_parameters():
                parameter.copy_(theirs[name])
        return made

    def learner(self, model: PolicyModel, spec: RoleSpec) -> MegatronLearner:
        assert isinstance(model, MegatronPolicy), "another provider's"
        if spec.adapter is not None and model.adapter is None:
            model.attach(spec.adapter)
        optimizer: Any = None if spec.optimizer is None else resolve("optimizer", spec.optimizer)
        return MegatronLearner(
            self.config,
            self.topology,
            model,
            device=self.device,
            optimizer=optimizer,
            total_steps=spec.total_steps,
            scalar=spec.scalar,
            autocast=self.device.type == "cuda" and not self.half,
            shared_vocab=spec.shared_vocab,
            replays=spec.replays,
        )

    def close(self) -> None:
        end()

    def _empty(self, shape: Any) -> MegatronPolicy:
        fp8 = None if self.config.fp8 is None else Fp8(self.config.fp8, self.config.fp8_recipe)
        if fp8 is not None and self.device.type == "cuda":
            fp8.check(torch.cuda.get_device_capability(self.device))
        made = MegatronPolicy(
            shape, self.sizes, dtype=self.dtype, recompute=self.config.recompute, fp8=fp8
        )
        return made.to(self.device)
