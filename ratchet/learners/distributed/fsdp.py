"""One rank of a learner that FSDP2 shards (DTensor).

The model is this rank's part of the built-in decoder, or of a model of transformers. Losses and
gradients are sums, as in all learners. FSDP averages gradients over its ranks, so losses are
multiplied by the number of ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)

from ratchet.batch import Batch
from ratchet.checkpoint.shapes import check_shapes
from ratchet.checkpoint.sharded import BlockFiles, save_blocks
from ratchet.config.resolve import build
from ratchet.config.schema import OptimizerConfig
from ratchet.learners.compute.forward import resolve_chunk_mib
from ratchet.learners.config import DTensorConfig
from ratchet.learners.distributed.base import RankForward, RankLearner
from ratchet.learners.distributed.frozen_fingerprint import fingerprint_across_ranks
from ratchet.learners.distributed.mesh import Mesh
from ratchet.learners.distributed.param_shards import (
    collect_param_shards,
    complete_gradients,
    compute_global_norm,
    fill_param_shards,
    get_local_tensor,
    scale_gradients,
)
from ratchet.learners.distributed.pipeline import Pipeline
from ratchet.learners.distributed.whole_matrices import WholeMatrices, select_matrices
from ratchet.learners.export import export_blocks
from ratchet.learners.offload import Offloader
from ratchet.learners.optim.adamw import AdamW
from ratchet.learners.optim.step_rules import OptimizerStepRules
from ratchet.models.layers.varlen import choose_varlen
from ratchet.models.lora.files import check_base
from ratchet.models.lora.layers import seed_dropout
from ratchet.models.parallel.stages import ModelStage
from ratchet.models.policy import PolicyModel
from ratchet.models.scalar_head import ScalarHead
from ratchet.protocols import ExportedPart, LossTerm, Shard


def shard_model(
    model: nn.Module,
    units: Sequence[nn.Module],
    mesh: Mesh,
    *,
    offload: bool = False,
    autocast: bool = False,
) -> None:
    """Shard a model's matrices over the FSDP ranks. Each rank keeps vectors (norms, biases) whole.

    units: modules, such as layers. FSDP gathers the weights of one unit at a time.
    offload: True to keep shards in host memory.
    autocast: True if forwards run under autocast. Matrices of the units are then gathered in
      bfloat16, to which autocast would round them anyway. Matrices outside the units (such as the
      language head), the shards themselves and gradient sums keep their dtype.
    """
    offload_policy = (
        CPUOffloadPolicy(pin_memory=torch.cuda.is_available()) if offload else OffloadPolicy()
    )
    # Hidden states between the layers stay in float32, as under autocast without FSDP.
    bfloat16_policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
    precision = bfloat16_policy if autocast else MixedPrecisionPolicy()
    unsharded = {parameter for parameter in model.parameters() if parameter.dim() < 2}
    if mesh.experts is not None:
        for experts in _list_experts(model):
            unsharded.update(experts.parameters())
            if mesh.expert_fsdp is not None:
                fully_shard(
                    experts,
                    mesh=mesh.expert_fsdp,
                    offload_policy=offload_policy,
                    mp_policy=precision,
                )
    if mesh.fsdp is not None:
        for unit in units:
            fully_shard(
                unit,
                mesh=mesh.fsdp,
                offload_policy=offload_policy,
                ignored_params=unsharded,
                mp_policy=precision,
            )
        fully_shard(model, mesh=mesh.fsdp, offload_policy=offload_policy, ignored_params=unsharded)


def _list_experts(model: nn.Module) -> Sequence[nn.Module]:
    """Return the modules that hold this rank's experts."""
    if isinstance(model, ModelStage):
        return model.experts()
    division = model.expert_division if isinstance(model, PolicyModel) else None
    return () if division is None else division.modules


class DTensorLearner(RankLearner):
    """One rank of a `Learner` that FSDP2 shards.

    model, head: must have been sharded by `shard_model`.
    device: the device that computes; weights may be stored on another.

    optimizer, total_steps, autocast, shared_vocab and replays_routes are as in `LocalLearner`.
    """

    def __init__(
        self,
        config: DTensorConfig,
        mesh: Mesh,
        model: PolicyModel,
        *,
        device: torch.device,
        optimizer: OptimizerConfig | None = None,
        total_steps: int = 1,
        head: ScalarHead | None = None,
        autocast: bool = False,
        shared_vocab: int | None = None,
        replays_routes: bool = False,
    ) -> None:
        self.mesh = mesh
        self.model = model
        self.head = head
        model.checkpointing = config.activation_checkpointing
        model.uses_varlen = choose_varlen(config.attention, device)
        model.forward_group = mesh.gradient_group
        forward = RankForward(
            model,
            head,
            chunk_mib=resolve_chunk_mib(config.logprob_chunk_mib, device.type),
            autocast=autocast,
            shared_vocab=shared_vocab,
            device=device,
            replays_routes=replays_routes,
        )
        step_rules = (
            None
            if optimizer is None
            else OptimizerStepRules(
                optimizer, total_steps=total_steps, max_bad_steps=config.max_bad_steps
            )
        )
        super().__init__(forward, mesh.topology, mesh.rank, mesh.gradient_group, step_rules)
        self.param_shards = collect_param_shards(model, head, mesh)
        trained_ids = {
            id(parameter)
            for module in (model, head)
            if module is not None
            for parameter in _trained_parameters(module)
        }
        self.frozen = [
            shard for shard in self.param_shards if id(shard.parameter) not in trained_ids
        ]
        self.trained = [shard for shard in self.param_shards if id(shard.parameter) in trained_ids]
        self.pipeline = None
        for stage in model.local_stages:
            # A pipeline runs the stages outside of `Forward`, so each enters autocast itself.
            stage.autocast = autocast
        if mesh.pipeline is not None:
            self.pipeline = Pipeline(mesh, forward)
        self.optimizer: AdamW | None = None
        if optimizer is not None:
            self.optimizer = self._make_optimizer(optimizer)
        self._offloader = Offloader([model, head], self.optimizer)

    def _make_optimizer(self, config: OptimizerConfig) -> AdamW:
        named_parameters = [(shard.name, shard.parameter) for shard in self.trained]
        if not config.needs_whole_matrices:
            return build(config, named_parameters, to_local=get_local_tensor)
        shards = select_matrices(self.trained, self.model)
        wholes = WholeMatrices(shards, self.mesh.stage_group, self.forward.device)
        return build(
            config,
            named_parameters,
            matrices={shard.name: [len(piece.rows) for piece in shard.pieces] for shard in shards},
            to_local=get_local_tensor,
            map_matrices=wholes.map,
        )

    def _score(
        self, micros: Sequence[Batch], output_names: Sequence[str], top_k: int
    ) -> list[Mapping[str, Tensor]]:
        forward = self.forward
        pipeline = self.pipeline
        if pipeline is None:
            columns = [forward.score(micro, output_names, top_k=top_k) for micro in micros]
        else:
            with torch.no_grad():
                device_micros = [micro.to(forward.device, forward.dtype) for micro in micros]
                hidden = pipeline.hidden(device_micros)
            # `hidden` is empty except on the last stage.
            columns = [
                forward.score(micro, output_names, top_k=top_k, hidden_Td=states)
                for micro, states in zip(device_micros, hidden, strict=False)
            ]
        self._reshard()
        return columns

    def _complete_gradient(self, loss: float) -> tuple[float, float]:
        complete_gradients(self.trained)
        return compute_global_norm(self.trained, loss, self.forward.device)

    def _step(self, lr: float, factor: float) -> None:
        assert self.optimizer is not None, "a frozen role has no optimizer"
        scale_gradients(self.trained, factor)
        self.optimizer.step(lr)

    def _zero_gradient(self) -> None:
        assert self.optimizer is not None, "a frozen role has no optimizer"
        self.optimizer.zero_grad()

    def _learn(
        self, micros: Sequence[Batch], terms: Sequence[LossTerm]
    ) -> list[Mapping[str, Tensor]]:
        forward = self.forward
        pipeline = self.pipeline
        # FSDP divides gradients by this number.
        factor = self.mesh.topology.gradient_ranks
        device_micros = [micro.to(forward.device, forward.dtype) for micro in micros]
        all_metrics: list[Mapping[str, Tensor]] = []
        monitors = [forward.make_monitor(terms) for _ in device_micros]

        def loss(number: int, hidden_Td: Tensor) -> Tensor:
            total, micro_metrics = forward.losses(
                device_micros[number], hidden_Td, terms, monitors[number]
            )
            all_metrics.append(micro_metrics)
            return total * factor

        seeds = [self._derive_seed(number) for number in range(len(device_micros))]
        if pipeline is not None:
            pipeline.forward_backward(device_micros, loss, seeds)
        else:
            for number, micro in enumerate(device_micros):
                with seed_dropout(self.model, seeds[number]):
                    loss(number, forward.hidden(micro, monitors[number])).backward()
        return all_metrics

    def _reshard(self) -> None:
        """Reshard all FSDP modules after a forward without backward.

        Otherwise the root's weights would stay gathered, and the forward after an update would read
        the old ones.
        """
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    # --- weights and state

    def count_later_bytes(self) -> int:
        return 0 if self.optimizer is None else self.optimizer.count_later_bytes()

    def onload(self) -> None:
        self._offloader.onload()

    def offload(self) -> None:
        self._offloader.offload()

    def weights(self) -> Iterator[Shard]:
        """Yield this rank's blocks for the weight sync. Each block comes from exactly one rank."""
        for shard in self.frozen:
            if shard.is_owner:
                yield from (replace(block, is_frozen=True) for block in shard.blocks(shard.local))
        for shard in self.trained:
            if shard.is_owner and not shard.name.startswith("head."):
                yield from shard.blocks(shard.local)

    def blocks(self, part: ExportedPart = "all") -> Iterator[Shard]:
        """Yield this rank's blocks of a part of the model; "all" includes the scalar head."""
        shards = {"all": self.param_shards, "base": self.frozen, "adapter": self.trained}[part]
        return (block for shard in shards if shard.is_owner for block in shard.blocks(shard.local))

    def export(
        self, directory: Path, *, averaged: bool = False, part: ExportedPart = "all"
    ) -> None:
        with (
            self.optimizer.use_averages()
            if averaged and self.optimizer is not None
            else nullcontext()
        ):
            export_blocks(self.model, self.blocks(part), self.rank, directory, part)

    @cached_property
    def base_fingerprint(self) -> str | None:
        """The fingerprint of the frozen weights, which checkpoints hold in place of the weights.

        None if no rank has a frozen weight.

        Its first use is a collective operation, so all ranks must use it at the same time.
        """
        return fingerprint_across_ranks(self.blocks("base"))

    def save(self, directory: Path) -> None:
        numbers: dict[str, Any] = {}
        if self.optimizer is not None and self.step_rules is not None:
            steps = {
                name: int(moments.get("step", 0))
                # Sorted, so that a resumed run writes the same bytes.
                for name, moments in sorted(self.optimizer.state.items())
            }
            numbers = {
                "taken": self.step_rules.steps_taken,
                "bad": self.step_rules.bad_steps,
                "steps": steps,
            }
        if self.base_fingerprint is not None:
            numbers["base"] = self.base_fingerprint
        save_blocks(directory, self.mesh.rank, self._state_blocks(), numbers)
        dist.barrier()

    def _state_blocks(self) -> Iterator[Shard]:
        """Yield the weights and moments of a checkpoint one by one.

        A dequantised copy of moments then exists only while it is written.
        """
        optimizer = self.optimizer
        for shard in (shard for shard in self.trained if shard.is_owner):
            yield from shard.blocks(shard.local)
            if optimizer is not None and shard.name in optimizer.state:
                for key, moment in optimizer.get_moments(shard.name).items():
                    yield from (
                        rename_block(block, f"{key}/{block.name}") for block in shard.blocks(moment)
                    )

    def load(self, directory: Path) -> None:
        """Load a checkpoint that any number of ranks saved.

        Raises CheckpointError if the checkpoint lacks a block, or belongs to a model of another
        shape or with other frozen weights.
        """
        block_files = BlockFiles(directory)
        if self.base_fingerprint is not None:
            check_base(directory, block_files.metadata.get("base"), self.base_fingerprint)
        shapes = {
            block.name: block.shape for shard in self.trained for block in shard.blocks(shard.local)
        }
        # Of the stored tensors, those of this rank. `read` reports the ones that are missing.
        stored_shapes = {
            name: block_files.shapes.get(name, shape) for name, shape in shapes.items()
        }
        check_shapes(directory, stored_shapes, shapes)
        fill_param_shards(self.trained, block_files.read)
        if self.optimizer is not None and self.step_rules is not None:
            self.step_rules.steps_taken = block_files.metadata["taken"]
            self.step_rules.bad_steps = block_files.metadata["bad"]
            self.optimizer.state = {}
            for shard in (
                shard for shard in self.trained if shard.name in block_files.metadata["steps"]
            ):
                moments = self.optimizer.init_state(shard.name, shard.parameter)
                if "step" in moments:
                    moments["step"].fill_(block_files.metadata["steps"][shard.name])
                stored_moments = self.optimizer.get_moments(shard.name)
                for key, moment in stored_moments.items():
                    for block in shard.blocks(moment):
                        block.tensor.copy_(
                            block_files.read(
                                f"{key}/{block.name}", block.offsets, block.tensor.shape
                            )
                        )
                self.optimizer.store(shard.name, stored_moments)


def _trained_parameters(module: PolicyModel | ScalarHead) -> Iterator[nn.Parameter]:
    """Return the parameters that a model or a scalar head trains."""
    return (
        (p for _, p in module.trained_parameters())
        if isinstance(module, PolicyModel)
        else module.parameters()
    )


def rename_block(block: Shard, name: str) -> Shard:
    """Return the block under another name."""
    return Shard(name, block.shape, block.offsets, block.tensor)
