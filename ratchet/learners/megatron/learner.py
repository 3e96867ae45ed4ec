"""A rank of a learner by Megatron Core: its layers, pipeline schedules and optimizer, with
Ratchet's attention and losses.

Losses and gradients are sums, as everywhere: what Megatron would divide by tokens, micro-batches or
ranks it leaves alone here (`calculate_per_token_loss`, with the tokens never told).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer import get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor, nn

from ratchet.batch import Batch
from ratchet.config.schema import OptimizerConfig
from ratchet.learners.compute.forward import logits_mib
from ratchet.learners.config import MegatronConfig
from ratchet.learners.distributed.base import RankForward, RankLearner
from ratchet.learners.distributed.frozen_fingerprint import fingerprint_of_ranks
from ratchet.learners.distributed.topology import Topology
from ratchet.learners.export import HEAD, export_blocks
from ratchet.learners.megatron.state import load_state, save_state
from ratchet.learners.optim.step_policy import Pace
from ratchet.models.convert.dimensions import Dimensions
from ratchet.models.convert.megatron import Place, megatron_layout
from ratchet.models.layers.expert_routing import Watch
from ratchet.models.layers.packed_inputs import Feed
from ratchet.models.megatron.blocks import of_model
from ratchet.models.megatron.policy import MegatronPolicy
from ratchet.models.scalar_head import ScalarHead
from ratchet.models.weights.weight_layout import shards
from ratchet.protocols import Exported, LossTerm, Shard

# (micro-batch, its hidden states [T, d]) -> what the schedule wants of the last stage
Ending = Callable[[int, Tensor], Any]


class MegatronLearner(RankLearner):
    """model: with its weights; Megatron's buffers take them over. optimizer, total_steps, autocast,
    shared_vocab, replays: as for `LocalLearner`. scalar: whether it has a scalar head, of zeros."""

    def __init__(
        self,
        config: MegatronConfig,
        topology: Topology,
        model: MegatronPolicy,
        *,
        device: torch.device,
        optimizer: OptimizerConfig | None = None,
        total_steps: int = 1,
        scalar: bool = False,
        autocast: bool = False,
        shared_vocab: int | None = None,
        replays: bool = False,
    ) -> None:
        _renew(model)
        head = _head(model, device) if scalar else None
        forward = RankForward(
            model,
            head,
            chunk_mib=logits_mib(config.logprob_chunk_mib, device.type),
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
        sums: Any = (
            parallel_state.get_data_parallel_group(with_context_parallel=True)
            if topology.summands > 1
            else None
        )
        super().__init__(forward, topology, dist.get_rank(), sums, pace)
        self.model, self.autocast = model, autocast
        self.owned = list(model.owned())
        self.chunks: list[Any] = list(model.chunks)
        self.optimizer: Any = None
        if optimizer is not None:
            self.chunks = [_summing(chunk, config) for chunk in model.chunks]
            if config.overlap_gradients:
                each = [chunk.no_sync for chunk in self.chunks]
                settings: Any = model.chunks[0].config  # the chunks share it
                settings.no_sync_func = each if len(each) > 1 else each[0]
            self.optimizer = _optimizer(self.chunks, optimizer, config)

    # --- computing

    def _score(
        self, micros: Sequence[Batch], wanted: Sequence[str], top_k: int
    ) -> list[Mapping[str, Tensor]]:
        moved = [micro.to(self.forward.device, self.forward.dtype) for micro in micros]

        def columns(number: int, hidden_Td: Tensor) -> Mapping[str, Tensor]:
            return self.forward.score(moved[number], wanted, top_k=top_k, hidden_Td=hidden_Td)

        with torch.no_grad():
            return self._run(moved, [None] * len(moved), columns, forward_only=True)

    def _learn(
        self, micros: Sequence[Batch], terms: Sequence[LossTerm]
    ) -> list[Mapping[str, Tensor]]:
        moved = [micro.to(self.forward.device, self.forward.dtype) for micro in micros]
        watches = [self.forward.watch(terms) for _ in moved]
        untold = torch.zeros((), dtype=torch.int, device=self.forward.device)

        def loss(number: int, hidden_Td: Tensor) -> tuple[Tensor, Tensor, Mapping[str, Tensor]]:
            total, numbers = self.forward.losses(moved[number], hidden_Td, terms, watches[number])
            return total, untold, numbers

        return self._run(moved, watches, loss, forward_only=False)

    def _run(
        self,
        moved: Sequence[Batch],
        watches: Sequence[Watch | None],
        ending: Callable[[int, Tensor], Any],
        *,
        forward_only: bool,
    ) -> list[Mapping[str, Tensor]]:
        """What Megatron's schedule collects of the last stage: nothing elsewhere."""
        feeds = [self._feed(micro, watch) for micro, watch in zip(moved, watches, strict=True)]
        if not forward_only:
            feeds = [replace(feed, seed=self._seed(number)) for number, feed in enumerate(feeds)]
        longest = max(len(feed.tokens_U) for feed in feeds) if self.topology.pipeline > 1 else 0
        fitted = [self.model.fitted(feed, longest) for feed in feeds]

        def step(numbers: Iterator[int], chunk: nn.Module) -> tuple[Tensor, Any]:
            number = next(numbers)
            with torch.autocast(self.forward.device.type, torch.bfloat16, enabled=self.autocast):
                out = chunk(fitted[number])
            return out, partial(end, number)

        def end(number: int, out: Tensor, non_loss_data: bool = False) -> Any:
            return ending(number, self.model.unpadded(feeds[number], out))

        found = get_forward_backward_func()(
            forward_step_func=step,
            data_iterator=[iter(range(len(feeds))) for _ in self.chunks],
            model=self.chunks,
            num_microbatches=len(feeds),
            seq_length=len(fitted[0].tokens_U) * self.topology.context,
            micro_batch_size=1,
            forward_only=forward_only,
            collect_non_loss_data=forward_only,
        )
        return list(found)

    def _feed(self, micro: Batch, watch: Watch | None) -> Feed:
        routing = self.forward.routing(micro, watch)
        return self.model.feed(micro.tokens_T, micro.positions_T, micro.lengths_S.tolist(), routing)

    def _gradient(self, loss: float) -> tuple[float, float]:
        """Megatron's schedule has completed it already."""
        self.optimizer.prepare_grads()
        total = torch.tensor(loss, dtype=torch.float64, device=self.forward.device)
        dist.all_reduce(total)
        return float(self.optimizer.get_grad_norm()), float(total)

    def _step(self, lr: float, factor: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = lr
            for parameter in group["params"]:
                if parameter.grad is not None and factor != 1.0:
                    parameter.grad.mul_(factor)
        self.optimizer.step_with_ready_grads()

    def _forget(self) -> None:
        self.optimizer.zero_grad()
        for chunk in self.chunks:
            chunk.zero_grad_buffer()

    # --- weights and state

    def onload(self) -> None: ...

    def offload(self) -> None:
        """The configuration refuses learners that give their accelerator away: Megatron's buffers
        stay where they are."""

    def weights(self) -> Iterator[Shard]:
        rests = self.model.adapter is not None
        yield from (replace(block, rests=rests) for block in self.blocks("base"))
        yield from (block for block in self.blocks("adapter") if block.name != HEAD)

    def blocks(self, part: Exported = "all") -> Iterator[Shard]:
        """Those and the scalar head's, which comes with the adapter, as views."""
        for item in self.owned:
            if item.first and part in ("all", "base" if of_model(item.name) else "adapter"):
                yield from shards(item.pieces, item.parameter.detach())

    def export(self, directory: Path, *, averaged: bool = False, part: Exported = "all") -> None:
        assert not averaged, "the configuration refuses averages"
        export_blocks(self.model, self.blocks(part), self.rank, directory, part)

    @cached_property
    def base(self) -> str | None:
        """Of the weights that rest, which a checkpoint leaves out; None: none do. All ranks ask at
        the same time."""
        if self.model.adapter is None:
            return None
        whole = megatron_layout(Dimensions.from_config(self.model.shape), Place())
        names = {piece.name for pieces in whole.values() for piece in pieces}
        return fingerprint_of_ranks(self.blocks("base"), names, self.forward.device)

    def save(self, directory: Path) -> None:
        save_state(directory, self.model, self.optimizer, self.pace, self.base)

    def load(self, directory: Path) -> None:
        """What any number of ranks saved. Raises CheckpointError where something is missing, or for
        another base."""
        load_state(directory, self.model, self.optimizer, self.pace, self.base)


def _renew(model: MegatronPolicy) -> None:
    """What an earlier stage has trained tells that stage's buffers of its gradients: new
    parameters, on the same memory, take the places of the old."""
    for chunk in model.chunks:
        chunk.scalar = None
        for module in chunk.modules():
            for name, old in list(module.named_parameters(recurse=False)):
                new: Any = nn.Parameter(old.detach(), requires_grad=old.requires_grad)
                # Megatron's marks: how it is divided, who else has it; not where its gradient and
                # its copy are.
                new.__dict__.update(
                    {key: value for key, value in vars(old).items() if not key.startswith("main_")}
                )
                setattr(module, name, new)


def _head(model: MegatronPolicy, device: torch.device) -> ScalarHead:
    """On the last stage, where it is trained with the others. Nothing reads logits then, and an
    optimizer would still decay the weights of a language head of its own."""
    head = ScalarHead(model.hidden_size).to(
        device, torch.promote_types(next(model.parameters()).dtype, torch.float32)
    )
    last = model.chunks[-1]
    if last.post_process:
        last.scalar = head
        if not model.shape.tied:
            last.output_layer.requires_grad_(False)
    return head


def _summing(chunk: nn.Module, config: MegatronConfig) -> DistributedDataParallel:
    """With buffers of gradients that are summed over data ranks."""
    settings: Any = chunk.config
    made = DistributedDataParallel(
        settings,
        DistributedDataParallelConfig(
            grad_reduce_in_fp32=config.weights == "bfloat16",
            overlap_grad_reduce=config.overlap_gradients,
            use_distributed_optimizer=config.distributed_optimizer,
        ),
        chunk,
        disable_bucketing=getattr(chunk, "vp_stage", 0) not in (None, 0),
    )
    settings.finalize_model_grads_func = _finalized
    return made


def _finalized(chunks: list[Any], tokens: Tensor | None = None, **groups: Any) -> None:
    """Complete sums, divided by nothing."""
    finalize_model_grads(chunks, None, **groups)


def _optimizer(chunks: Sequence[Any], section: OptimizerConfig, config: MegatronConfig) -> Any:
    made = get_megatron_optimizer(
        MegatronOptimizerConfig(
            optimizer="adam",
            lr=section.lr,
            weight_decay=section.weight_decay,
            adam_beta1=section.betas[0],
            adam_beta2=section.betas[1],
            adam_eps=section.eps,
            clip_grad=0.0,  # done here, where a norm that is not finite skips the step
            params_dtype=getattr(torch, config.weights),
            bf16=config.weights == "bfloat16",
            use_distributed_optimizer=config.distributed_optimizer,
        ),
        list(chunks),
    )
    for group in made.param_groups:
        group["weight_decay"] = section.weight_decay * group["wd_mult"]
    return made
