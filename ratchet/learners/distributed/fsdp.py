"""A rank of a learner whose model is spread over several: FSDP2 (DTensor shards) around a part of a
decoder, or around any model of transformers.

Losses and gradients are sums, as everywhere. FSDP averages over its ranks, so a loss is multiplied
by their number first.
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
from ratchet.checkpoint.sharded import Blocks, save_blocks
from ratchet.config.resolve import construct
from ratchet.config.schema import OptimizerConfig
from ratchet.learners.compute.forward import logits_mib
from ratchet.learners.config import DTensorConfig
from ratchet.learners.distributed.base import RankForward, RankLearner
from ratchet.learners.distributed.frozen_fingerprint import fingerprint_of_ranks
from ratchet.learners.distributed.mesh import Mesh
from ratchet.learners.distributed.param_shards import (
    complete_gradients,
    fill_held,
    global_norm,
    held_parameters,
    local,
    scale_gradients,
)
from ratchet.learners.distributed.pipeline import Pipeline
from ratchet.learners.export import export_blocks
from ratchet.learners.offload import Residence
from ratchet.learners.optim.adamw import AdamW
from ratchet.learners.optim.step_policy import Pace
from ratchet.models.layers.moe import Experts
from ratchet.models.lora.files import check_base
from ratchet.models.lora.layers import dropping
from ratchet.models.parallel.sharded_policy import SpreadPolicy
from ratchet.models.policy import PolicyModel
from ratchet.models.scalar_head import ScalarHead
from ratchet.protocols import Exported, LossTerm, Shard


def shard_model(
    model: nn.Module,
    units: Sequence[nn.Module],
    mesh: Mesh,
    *,
    offload: bool = False,
    autocast: bool = False,
) -> None:
    """Divides matrices over the ranks that share a gradient; vectors are small, and each rank keeps
    them whole. units: whose weights are fetched one after the other.

    autocast: whether forwards run under it. Then matrices of the units travel in bfloat16, to which
    it would round them anyway; those around the units (the language head!), each rank's own share
    and sums of gradients stay as they are.
    """
    policy = CPUOffloadPolicy(pin_memory=torch.cuda.is_available()) if offload else OffloadPolicy()
    # Hidden states between the layers stay in float32, as under autocast alone.
    half = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
    precision = half if autocast else MixedPrecisionPolicy()
    apart = {parameter for parameter in model.parameters() if parameter.dim() < 2}
    if mesh.experts is not None:
        for experts in (module for module in model.modules() if isinstance(module, Experts)):
            apart.update(experts.parameters())
            if mesh.expert_fsdp is not None:
                fully_shard(
                    experts, mesh=mesh.expert_fsdp, offload_policy=policy, mp_policy=precision
                )
    if mesh.fsdp is not None:
        for unit in units:
            fully_shard(
                unit,
                mesh=mesh.fsdp,
                offload_policy=policy,
                ignored_params=apart,
                mp_policy=precision,
            )
        fully_shard(model, mesh=mesh.fsdp, offload_policy=policy, ignored_params=apart)


class DTensorLearner(RankLearner):
    """What one rank does for `Learner`. Every rank gets the same calls, in the same order, and as
    many micro-batches.

    model, head: divided by `shard_model`. device: that computes, wherever weights rest. optimizer,
    total_steps, autocast, shared_vocab, replays: as for `LocalLearner`.
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
        replays: bool = False,
    ) -> None:
        self.mesh, self.model, self.head = mesh, model, head
        model.checkpointing = config.activation_checkpointing
        mib = logits_mib(config.logprob_chunk_mib, device.type)
        forward = RankForward(
            model,
            head,
            chunk_mib=mib,
            autocast=autocast,
            shared_vocab=shared_vocab,
            device=device,
            replays=replays,
        )
        pace = (
            None
            if optimizer is None
            else Pace(optimizer, total=total_steps, max_bad=config.max_bad_steps)
        )
        super().__init__(forward, mesh.topology, mesh.rank, mesh.sums, pace)
        self.held = held_parameters(model, head, mesh)
        own = {
            id(parameter)
            for module in (model, head)
            if module is not None
            for parameter in _trained(module)
        }
        self.resting = [item for item in self.held if id(item.parameter) not in own]
        self.learned = [item for item in self.held if id(item.parameter) in own]
        self.pipeline = None
        if isinstance(model, SpreadPolicy):
            for stage in model.runs:
                stage.autocast = autocast  # a pipeline runs them where `Forward` has no say
            if mesh.pipeline is not None:
                self.pipeline = Pipeline(
                    mesh, model, device, self.forward.dtype, self.forward.routing
                )
        self.optimizer: AdamW | None = None
        if optimizer is not None:
            named = [(item.name, item.parameter) for item in self.learned]
            self.optimizer = construct(optimizer, named, local=local)
        self._residence = Residence([model, head], self.optimizer)

    def _score(
        self, micros: Sequence[Batch], wanted: Sequence[str], top_k: int
    ) -> list[Mapping[str, Tensor]]:
        forward, pipeline = self.forward, self.pipeline
        if pipeline is None:
            found = [forward.score(micro, wanted, top_k=top_k) for micro in micros]
        else:
            with torch.no_grad():
                moved = [micro.to(forward.device, forward.dtype) for micro in micros]
                hidden = pipeline.hidden(moved)
            pairs = zip(moved, hidden, strict=False)  # the last stage's alone
            found = [
                forward.score(micro, wanted, top_k=top_k, hidden_Td=states)
                for micro, states in pairs
            ]
        self._divide()
        return found

    def _gradient(self, loss: float) -> tuple[float, float]:
        complete_gradients(self.learned)
        return global_norm(self.learned, loss, self.forward.device)

    def _step(self, lr: float, factor: float) -> None:
        assert self.optimizer is not None, "a frozen role has none"
        scale_gradients(self.learned, factor)
        self.optimizer.step(lr)

    def _forget(self) -> None:
        assert self.optimizer is not None, "a frozen role has none"
        self.optimizer.zero_grad()

    def _learn(
        self, micros: Sequence[Batch], terms: Sequence[LossTerm]
    ) -> list[Mapping[str, Tensor]]:
        forward, pipeline, factor = self.forward, self.pipeline, self.mesh.topology.summands
        moved = [micro.to(forward.device, forward.dtype) for micro in micros]
        found: list[Mapping[str, Tensor]] = []
        watches = [forward.watch(terms) for _ in moved]

        def loss(number: int, hidden_Td: Tensor) -> Tensor:
            total, numbers = forward.losses(moved[number], hidden_Td, terms, watches[number])
            found.append(numbers)
            return total * factor

        if pipeline is not None:
            pipeline.learn(moved, loss)
        else:
            for number, micro in enumerate(moved):
                with dropping(self.model, self._seed(number)):
                    loss(number, forward.hidden(micro, watches[number])).backward()
        return found

    def _divide(self) -> None:
        """After a forward without backward FSDP keeps the root's weights whole, and an update would
        not be seen."""
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    # --- weights and state

    def onload(self) -> None:
        self._residence.enter()

    def offload(self) -> None:
        self._residence.leave()

    def weights(self) -> Iterator[Shard]:
        """This rank's blocks; those that several ranks hold come from the first of them only."""
        for item in self.resting:
            if item.first:
                yield from (replace(block, rests=True) for block in item.blocks(item.local))
        for item in self.learned:
            if item.first and not item.name.startswith("head."):
                yield from item.blocks(item.local)

    def blocks(self, part: Exported = "all") -> Iterator[Shard]:
        """Those and the scalar head's; or a part of them."""
        held = {"all": self.held, "base": self.resting, "adapter": self.learned}[part]
        return (block for item in held if item.first for block in item.blocks(item.local))

    def export(self, directory: Path, *, averaged: bool = False, part: Exported = "all") -> None:
        with (
            self.optimizer.averaged() if averaged and self.optimizer is not None else nullcontext()
        ):
            export_blocks(self.model, self.blocks(part), self.rank, directory, part)

    @cached_property
    def base(self) -> str:
        """Of the weights that rest, which a checkpoint leaves out. All ranks ask at the same
        time."""
        names = {piece.name for item in self.resting for piece in item.pieces}
        return fingerprint_of_ranks(self.blocks("base"), names, self.forward.device)

    def save(self, directory: Path) -> None:
        numbers: dict[str, Any] = {}
        if self.optimizer is not None and self.pace is not None:
            steps = {name: int(moments["step"]) for name, moments in self.optimizer.state.items()}
            numbers = {"taken": self.pace.taken, "bad": self.pace.bad, "steps": steps}
        if self.resting:
            numbers["base"] = self.base
        save_blocks(directory, self.mesh.rank, self._saved(), numbers)
        dist.barrier()

    def _saved(self) -> Iterator[Shard]:
        """One by one: what an optimizer keeps in another form is made for as long as it is
        written."""
        optimizer = self.optimizer
        for item in (item for item in self.learned if item.first):
            yield from item.blocks(item.local)
            if optimizer is not None and item.name in optimizer.state:
                for key, moment in optimizer.plain(item.name).items():
                    yield from (
                        renamed(block, f"{key}/{block.name}") for block in item.blocks(moment)
                    )

    def load(self, directory: Path) -> None:
        """What any number of ranks saved. Raises CheckpointError where something is missing."""
        stored = Blocks(directory)
        if self.resting:
            check_base(directory, stored.numbers.get("base"), self.base)
        fill_held(self.learned, stored.read)
        if self.optimizer is not None and self.pace is not None:
            self.pace.taken, self.pace.bad = stored.numbers["taken"], stored.numbers["bad"]
            self.optimizer.state = {}
            for item in (item for item in self.learned if item.name in stored.numbers["steps"]):
                moments = self.optimizer.begin(item.name, item.parameter)
                moments["step"].fill_(stored.numbers["steps"][item.name])
                plain = self.optimizer.plain(item.name)
                for key, moment in plain.items():
                    for block in item.blocks(moment):
                        block.tensor.copy_(
                            stored.read(f"{key}/{block.name}", block.offsets, block.tensor.shape)
                        )
                self.optimizer.keep(item.name, plain)


def _trained(module: PolicyModel | ScalarHead) -> Iterator[nn.Parameter]:
    return (
        (p for _, p in module.trained()) if isinstance(module, PolicyModel) else module.parameters()
    )


def renamed(block: Shard, name: str) -> Shard:
    return Shard(name, block.shape, block.offsets, block.tensor)
