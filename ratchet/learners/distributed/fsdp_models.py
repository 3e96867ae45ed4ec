"""The provider of models that FSDP2 divides (`Provider`)."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor

from ratchet.config.resolve import resolve
from ratchet.learners.config import DTensorConfig
from ratchet.learners.distributed.fsdp import DTensorLearner, shard_model
from ratchet.learners.distributed.mesh import Mesh
from ratchet.learners.distributed.param_shards import fill_held, held_parameters
from ratchet.learners.distributed.stage_spec import RoleSpec
from ratchet.learners.distributed.topology import topology_of
from ratchet.models.load import of_transformers
from ratchet.models.model_source import Origin
from ratchet.models.parallel.sharded_policy import Spread, SpreadPolicy
from ratchet.models.policy import PolicyModel
from ratchet.models.scalar_head import ScalarHead


class DTensorModels:
    def __init__(self, config: DTensorConfig, device: torch.device, dtype: torch.dtype) -> None:
        self.config, self.device, self.dtype = config, device, dtype
        self.autocast = device.type == "cuda"
        self.mesh = Mesh(topology_of(config), device.type)

    def load(self, origin: Origin) -> PolicyModel:
        shape = origin.decoder()
        if shape is None:
            return self._transformers(origin)
        model = self._part(shape)
        fill_held(held_parameters(model, None, self.mesh), origin.reader())
        return model

    def copy(self, policy: PolicyModel) -> PolicyModel:
        assert isinstance(policy, SpreadPolicy), "the driver refuses copies of a transformers model"
        made = self._part(policy.decoder.config)
        if policy.adapter is not None:
            made.attach(policy.adapter)
            self._settled(made)
        theirs = held_parameters(policy, None, self.mesh)
        with torch.no_grad():
            for source, target in zip(theirs, held_parameters(made, None, self.mesh), strict=True):
                target.local.copy_(source.local)
        return made

    def learner(self, model: PolicyModel, spec: RoleSpec) -> DTensorLearner:
        if spec.adapter is not None and model.adapter is None:
            model.attach(spec.adapter)
            self._settled(model)
        optimizer: Any = None if spec.optimizer is None else resolve("optimizer", spec.optimizer)
        head = ScalarHead(model.hidden_size).to(self.device, self.dtype) if spec.scalar else None
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
            replays=spec.replays,
        )

    def close(self) -> None: ...

    def _part(self, shape: Any) -> PolicyModel:
        """Divided, its weights uninitialised."""
        mesh = self.mesh
        spread = Spread(
            mesh.part,
            mesh.tensor,
            mesh.context,
            mesh.experts,
            sequence=self.config.sequence_parallel,
        )
        chunks = self.config.pipeline_chunks if mesh.topology.pipeline > 1 else 1
        model = SpreadPolicy(shape, spread, device="meta", dtype=self.dtype, chunks=chunks)
        for stage in model.runs:
            layers = list(stage.decoder.layers.values())
            shard_model(
                stage, layers, mesh, offload=self.config.cpu_offload, autocast=self.autocast
            )
        model.to_empty(device="cpu" if self.config.cpu_offload else self.device)
        return self._settled(model)

    def _settled(self, model: PolicyModel) -> PolicyModel:
        """What FSDP leaves alone is on the device, wherever the rest lies between uses."""
        for tensor in (*model.parameters(), *model.buffers()):
            if not isinstance(tensor, DTensor):
                tensor.data = tensor.data.to(self.device)
        return model

    def _transformers(self, origin: Origin) -> PolicyModel:
        # Whole in main memory first, where every rank reads it: the device gets a rank's part
        # alone.
        model = of_transformers(
            origin.directory(),
            dtype=self.dtype,
            trust_remote_code=origin.trust_remote_code,
            towers=origin.towers,
        )
        if self.mesh.tensor is not None:
            model.divide(self.mesh.tensor, self.device)
        shard_model(
            model,
            model.layers(),
            self.mesh,
            offload=self.config.cpu_offload,
            autocast=self.autocast,
        )
        return self._settled(model)
