"""The model provider of the Megatron Core learner."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from ratchet.config.model_shape.decoder_config import DecoderConfig
from ratchet.config.model_shape.megatron_decoder import MegatronDecoderConfig
from ratchet.config.resolve import resolve
from ratchet.errors import ModelError
from ratchet.learners.config import MegatronConfig
from ratchet.learners.distributed.role_spec import RoleSpec
from ratchet.learners.distributed.topology import build_megatron_sizes, build_topology
from ratchet.learners.megatron.learner import MegatronLearner
from ratchet.models.convert.dimensions import find_mtp_layers
from ratchet.models.megatron.build import destroy_process_groups, init_process_groups
from ratchet.models.megatron.policy import MegatronPolicy
from ratchet.models.model_source import ModelSource
from ratchet.models.parallel.megatron_sizes import Fp8Format
from ratchet.models.policy import PolicyModel
from ratchet.models.weights.hf_weights import WeightFiles


class MegatronModels:
    """A `ModelProvider` of models that Megatron Core divides among ranks."""

    def __init__(self, config: MegatronConfig, device: torch.device, dtype: torch.dtype) -> None:
        self.config = config
        self.device = device
        self.is_bfloat16 = config.weights == "bfloat16"
        self.dtype = torch.bfloat16 if self.is_bfloat16 else dtype
        self.topology = build_topology(config)
        self.sizes = build_megatron_sizes(config)
        init_process_groups(self.sizes)

    def load(self, origin: ModelSource) -> MegatronPolicy:
        """Return the rank's part of a model.

        Raises ModelError if Megatron has no layers for its architecture, or if ranks on CPUs can't
        divide its experts so.
        """
        shape = origin.read_megatron_shape()
        if shape is None:
            raise ModelError(
                "learner.kind=megatron has no layers for this architecture. Set "
                "learner.kind=dtensor."
            )
        sizes = self.sizes
        if self.device.type == "cpu" and shape.n_experts and min(sizes.tensor, sizes.experts) > 1:
            raise ModelError(
                f"learner.tensor_parallel={sizes.tensor} with learner.expert_parallel="
                f"{sizes.experts} needs accelerators, because ranks on CPUs (gloo) can't gather "
                "unequal numbers of tokens. Set learner.tensor_parallel=1."
            )
        model = self._allocate(self._add_mtp_layers(shape, origin))
        model.fill(origin.reader())
        return model

    def _add_mtp_layers(self, shape: DecoderConfig, origin: ModelSource) -> DecoderConfig:
        """Return the shape with the MTP layers of the model's files, if they are to be trained."""
        is_wanted = self.config.mtp_loss_scaling_factor and origin.path is not None
        if not is_wanted or not isinstance(shape, MegatronDecoderConfig):
            return shape
        names = WeightFiles.find(origin.directory()).files
        return replace(shape, mtp_layers=find_mtp_layers(shape.hf, names))

    def copy(self, policy: PolicyModel) -> MegatronPolicy:
        """Return a copy of the policy with its current weights."""
        assert isinstance(policy, MegatronPolicy), "the policy is another provider's"
        model = self._allocate(policy.shape)
        if policy.adapter is not None:
            model.attach(policy.adapter)
        with torch.no_grad():
            sources = dict(policy.named_parameters())
            for name, parameter in model.named_parameters():
                parameter.copy_(sources[name])
            for copied, original in zip(model.buffers(), policy.buffers(), strict=True):
                copied.copy_(original)
        return model

    def learner(self, model: PolicyModel, spec: RoleSpec) -> MegatronLearner:
        """Return the learner of a role."""
        assert isinstance(model, MegatronPolicy), "the model is another provider's"
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
            has_scalar_head=spec.has_scalar_head,
            autocast=self.device.type == "cuda" and not self.is_bfloat16,
            shared_vocab=spec.shared_vocab,
            replays_routes=spec.replays_routes,
        )

    def close(self) -> None:
        destroy_process_groups()

    def _allocate(self, shape: Any) -> MegatronPolicy:
        """Return the rank's part of a model with uninitialised weights."""
        fp8 = (
            None if self.config.fp8 is None else Fp8Format(self.config.fp8, self.config.fp8_recipe)
        )
        if fp8 is not None and self.device.type == "cuda":
            fp8.check(torch.cuda.get_device_capability(self.device))
        model = MegatronPolicy(
            shape, self.sizes, dtype=self.dtype, recompute=self.config.recompute, fp8=fp8
        )
        return model.to(self.device)
