"""Load and copy models that FSDP2 shards."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch.distributed.tensor import DTensor

from ratchet.config.resolve import resolve
from ratchet.learners.config import DTensorConfig
from ratchet.learners.distributed.fsdp import DTensorLearner, shard_model
from ratchet.learners.distributed.mesh import Mesh
from ratchet.learners.distributed.param_shards import collect_param_shards, fill_param_shards
from ratchet.learners.distributed.role_spec import RoleSpec
from ratchet.learners.distributed.topology import build_topology
from ratchet.models.load import load_transformers_policy
from ratchet.models.model_source import ModelSource
from ratchet.models.parallel.sharded_policy import DistributedPolicy, DistributedShard
from ratchet.models.parallel.sharding import list_stage_indices
from ratchet.models.parallel.stages import ModelStage
from ratchet.models.policy import PolicyModel
from ratchet.models.scalar_head import ScalarHead

if TYPE_CHECKING:
    from ratchet.models.transformers.policy import TransformersPolicy


def make_shard(config: DTensorConfig, mesh: Mesh) -> DistributedShard:
    """Return this rank's shard of a model."""
    pipeline = mesh.model_shard.pipeline
    return DistributedShard(
        mesh.model_shard,
        mesh.tensor,
        mesh.context,
        mesh.experts,
        sequence=config.sequence_parallel,
        stages=list_stage_indices(pipeline, config.pipeline_chunks, config.stage_layers),
    )


class DTensorModels:
    """A `ModelProvider` that loads and copies models sharded by FSDP2."""

    def __init__(self, config: DTensorConfig, device: torch.device, dtype: torch.dtype) -> None:
        self.config = config
        self.device = device
        self.dtype = dtype
        self.autocast = device.type == "cuda"
        self.mesh = Mesh(build_topology(config), device.type)
        # The source of each loaded model that transformers runs.
        self._origins: WeakKeyDictionary[PolicyModel, ModelSource] = WeakKeyDictionary()

    def load(self, origin: ModelSource) -> PolicyModel:
        """Return this rank's shard of a model, with its weights."""
        shape = origin.read_decoder_shape()
        if shape is None:
            model = self._load_transformers(origin)
            self._origins[model] = origin
            return model
        model = self._allocate(shape)
        fill_param_shards(collect_param_shards(model, None, self.mesh), origin.reader())
        model.freeze(origin.freeze)
        return model

    def copy(self, policy: PolicyModel) -> PolicyModel:
        """Return a copy of the policy with its current weights."""
        if isinstance(policy, DistributedPolicy):
            model = self._allocate(policy.decoder.config)
        else:
            model = self._load_transformers(self._origins[policy])
        model.frozen_parameters = policy.frozen_parameters
        if policy.adapter is not None:
            model.attach(policy.adapter)
            self._move_unsharded(model)
        sources = collect_param_shards(policy, None, self.mesh)
        with torch.no_grad():
            for source, target in zip(
                sources, collect_param_shards(model, None, self.mesh), strict=True
            ):
                target.local.copy_(source.local)
        return model

    def learner(self, model: PolicyModel, spec: RoleSpec) -> DTensorLearner:
        """Return the learner of a role. Attach the role's adapter if the model has no adapter."""
        if spec.adapter is not None and model.adapter is None:
            model.attach(spec.adapter)
            self._move_unsharded(model)
        optimizer: Any = None if spec.optimizer is None else resolve("optimizer", spec.optimizer)
        head = (
            ScalarHead(model.hidden_size).to(self.device, self.dtype)
            if spec.has_scalar_head
            else None
        )
        if head is not None:
            shard_model(head, [], self.mesh)
        return DTensorLearner(
            self.config,
            self.mesh,
            model,
            device=self.device,
            optimizer=optimizer,
            total_steps=spec.total_steps,
            head=head,
            autocast=self.autocast,
            shared_vocab=spec.shared_vocab,
            replays_routes=spec.replays_routes,
        )

    def close(self) -> None: ...

    def _allocate(self, shape: Any) -> PolicyModel:
        """Return this rank's shard of a model, with uninitialised weights."""
        shard = make_shard(self.config, self.mesh)
        model = DistributedPolicy(shape, shard, device="meta", dtype=self.dtype)
        self._shard_weights(model.local_stages)
        model.to_empty(device="cpu" if self.config.cpu_offload else self.device)
        return self._move_unsharded(model)

    def _shard_weights(self, modules: Sequence[ModelStage | TransformersPolicy]) -> None:
        """Shard the weights of modules over the FSDP ranks."""
        for module in modules:
            shard_model(
                module,
                module.layers(),
                self.mesh,
                offload=self.config.cpu_offload,
                autocast=self.autocast,
            )

    def _move_unsharded(self, model: PolicyModel) -> PolicyModel:
        """Move the tensors that FSDP does not shard to the device, and return the model."""
        for tensor in (*model.parameters(), *model.buffers()):
            if not isinstance(tensor, DTensor):
                tensor.data = tensor.data.to(self.device)
        return model

    def _load_transformers(self, origin: ModelSource) -> PolicyModel:
        """Return this rank's shard of a model that transformers runs."""
        # Every rank loads the whole model into host memory. Only its shard goes to the device.
        model = load_transformers_policy(
            origin.directory(),
            dtype=self.dtype,
            trust_remote_code=origin.trust_remote_code,
            train_encoders=origin.train_encoders,
            hf=origin.read_config() if origin.overrides else None,
        )
        # This import takes seconds unless such a model is loaded.
        from ratchet.models.transformers.division import divide

        divide(model, make_shard(self.config, self.mesh), self.device)
        # After the division, which compares gradients of all weights.
        model.freeze(origin.freeze)
        self._shard_weights(model.local_stages or [model])
        return self._move_unsharded(model)
