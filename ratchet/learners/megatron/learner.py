"""One rank of a learner that uses Megatron Core's layers, pipeline schedules and optimizer.

Attention and losses are Ratchet's. Losses and gradients are sums, as in every learner.
`calculate_per_token_loss` with a count of 0 tokens turns off Megatron's divisions by the number of
tokens, micro-batches and ranks.
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
from ratchet.config.model_shape.megatron_decoder import MegatronDecoderConfig
from ratchet.config.schema import OptimizerConfig
from ratchet.learners.compute.forward import resolve_chunk_mib
from ratchet.learners.config import MegatronConfig
from ratchet.learners.distributed.base import RankForward, RankLearner
from ratchet.learners.distributed.frozen_fingerprint import fingerprint_across_ranks
from ratchet.learners.distributed.topology import Topology
from ratchet.learners.export import HEAD, export_blocks
from ratchet.learners.megatron.multi_token_prediction import MTPLoss, add_mtp_copies
from ratchet.learners.megatron.offload import (
    StorageOffloader,
    list_gradient_buffers,
    list_learner_tensors,
)
from ratchet.learners.megatron.state import load_state, save_state
from ratchet.learners.optim.step_rules import OptimizerStepRules
from ratchet.models.convert.dimensions import Dimensions
from ratchet.models.convert.packed_experts import pack_blocks
from ratchet.models.convert.stacked_experts import stack_block
from ratchet.models.layers.expert_routing import RouterMonitor
from ratchet.models.layers.packed_inputs import PackedInputs
from ratchet.models.megatron.blocks import is_model_weight
from ratchet.models.megatron.build import MegatronStage
from ratchet.models.megatron.fused_experts import join_fused_blocks
from ratchet.models.megatron.policy import MegatronPolicy
from ratchet.models.scalar_head import ScalarHead
from ratchet.models.weights.weight_layout import cut_blocks
from ratchet.protocols import ExportedPart, LossTerm, Shard

ROUTER_BIAS = "e_score_correction_bias"  # the end of the name of a router's bias in files
# A function that the last pipeline stage calls with (index of the micro-batch, its final hidden
# states [T, d] and those of each layer of multi-token prediction that is trained). Megatron's
# schedule gets its result.
OutputFunction = Callable[[int, Sequence[Tensor]], Any]


class MegatronLearner(RankLearner):
    """One rank of a learner that uses Megatron Core.

    model: a model with loaded weights. Megatron's buffers take over their memory.
    has_scalar_head: True to add a scalar head, initialised to zeros.

    optimizer, total_steps, autocast, shared_vocab and replays_routes are as in `LocalLearner`.
    """

    def __init__(
        self,
        config: MegatronConfig,
        topology: Topology,
        model: MegatronPolicy,
        *,
        device: torch.device,
        optimizer: OptimizerConfig | None = None,
        total_steps: int = 1,
        has_scalar_head: bool = False,
        autocast: bool = False,
        shared_vocab: int | None = None,
        replays_routes: bool = False,
    ) -> None:
        _renew_parameters(model)
        head = _attach_head(model, device) if has_scalar_head else None
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
        gradient_group: Any = (
            parallel_state.get_data_parallel_group(with_context_parallel=True)
            if topology.gradient_ranks > 1
            else None
        )
        super().__init__(forward, topology, dist.get_rank(), gradient_group, step_rules)
        self.model = model
        self.autocast = autocast
        # The loss of multi-token prediction (MTP); None for a critic and where it is not trained.
        self.mtp_loss: MTPLoss | None = None
        if config.mtp_loss_scaling_factor and optimizer is not None and head is None:
            self.mtp_loss = MTPLoss(model, forward, config.mtp_loss_scaling_factor)
        self.dimensions = Dimensions.from_config(model.shape)
        self.stage_parameters = list(model.stage_parameters())
        self.chunks: list[Any] = list(model.chunks)
        self.optimizer: Any = None
        if optimizer is not None:
            self.chunks = [_wrap_ddp(chunk, config) for chunk in model.chunks]
            if config.overlap_gradients:
                no_sync = [chunk.no_sync for chunk in self.chunks]
                settings: Any = model.chunks[0].config  # All chunks share it.
                settings.no_sync_func = no_sync if len(no_sync) > 1 else no_sync[0]
            self.optimizer = _make_optimizer(self.chunks, optimizer, config)
        self._offloader = StorageOffloader(
            partial(list_learner_tensors, model, self.optimizer),
            partial(list_gradient_buffers, () if optimizer is None else self.chunks),
            device,
        )

    # --- computing

    def _score(
        self, micros: Sequence[Batch], output_names: Sequence[str], top_k: int
    ) -> list[Mapping[str, Tensor]]:
        device_micros = [micro.to(self.forward.device, self.forward.dtype) for micro in micros]

        def columns(number: int, states: Sequence[Tensor]) -> Mapping[str, Tensor]:
            return self.forward.score(
                device_micros[number], output_names, top_k=top_k, hidden_Td=states[0]
            )

        with torch.no_grad():
            return self._run(device_micros, [None] * len(device_micros), columns, forward_only=True)

    def _learn(
        self, micros: Sequence[Batch], terms: Sequence[LossTerm]
    ) -> list[Mapping[str, Tensor]]:
        device_micros = [micro.to(self.forward.device, self.forward.dtype) for micro in micros]
        monitors = [self.forward.make_monitor(terms) for _ in device_micros]
        zero_tokens = torch.zeros((), dtype=torch.int, device=self.forward.device)
        if self.mtp_loss is not None:
            self.mtp_loss.begin_step(
                device_micros, terms, self.gradient_group, self.topology.context
            )

        def loss(
            number: int, states: Sequence[Tensor]
        ) -> tuple[Tensor, Tensor, Mapping[str, Tensor]]:
            micro = device_micros[number]
            total, metrics = self.forward.losses(micro, states[0], terms, monitors[number])
            if self.mtp_loss is not None:
                total, metrics = self.mtp_loss.add(micro, terms, states[1:], total, metrics)
            return total, zero_tokens, metrics

        return self._run(device_micros, monitors, loss, forward_only=False)

    def _run(
        self,
        micros: Sequence[Batch],
        monitors: Sequence[RouterMonitor | None],
        output_function: OutputFunction,
        *,
        forward_only: bool,
    ) -> list[Mapping[str, Tensor]]:
        """Run Megatron's schedule, and return the results on the last stage, [] on other stages."""
        micro_inputs = [
            self._pack_inputs(micro, monitor)
            for micro, monitor in zip(micros, monitors, strict=True)
        ]
        if not forward_only:
            micro_inputs = [
                replace(
                    packed,
                    seed=self._derive_seed(number),
                    later_tokens_KU=(
                        None if self.mtp_loss is None else self.mtp_loss.pack_later_tokens(micro)
                    ),
                )
                for number, (packed, micro) in enumerate(zip(micro_inputs, micros, strict=True))
            ]
        longest = (
            max(len(packed.tokens_U) for packed in micro_inputs)
            if self.topology.pipeline > 1
            else 0
        )
        padded_inputs = [self.model.pad_inputs(packed, longest) for packed in micro_inputs]

        def run_forward(numbers: Iterator[int], chunk: nn.Module) -> tuple[Tensor, Any]:
            number = next(numbers)
            with torch.autocast(self.forward.device.type, torch.bfloat16, enabled=self.autocast):
                out = chunk(padded_inputs[number])
            return out, partial(compute_output, number)

        def compute_output(number: int, out: Tensor, non_loss_data: bool = False) -> Any:
            packed = micro_inputs[number]
            later = packed.later_tokens_KU
            states = out.chunk(1 if later is None else 1 + len(later))
            return output_function(
                number, [self.model.unpad_hidden(packed, state) for state in states]
            )

        results = get_forward_backward_func()(
            forward_step_func=run_forward,
            data_iterator=[iter(range(len(micro_inputs))) for _ in self.chunks],
            model=self.chunks,
            num_microbatches=len(micro_inputs),
            seq_length=len(padded_inputs[0].tokens_U) * self.topology.context,
            micro_batch_size=1,
            forward_only=forward_only,
            collect_non_loss_data=forward_only,
        )
        return list(results)

    def _pack_inputs(self, micro: Batch, monitor: RouterMonitor | None) -> PackedInputs:
        """Return the packed inputs of a micro-batch."""
        routing = self.forward.routing(micro, monitor)
        return self.model.pack_inputs(
            micro.tokens_T, micro.positions_T, micro.lengths_S.tolist(), routing
        )

    def _complete_gradient(self, loss: float) -> tuple[float, float]:
        """Return the gradient's norm and the loss over all ranks.

        Megatron's schedule has already summed the gradient.
        """
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

    def _zero_gradient(self) -> None:
        self.optimizer.zero_grad()
        for chunk in self.chunks:
            chunk.zero_grad_buffer()

    # --- weights and state

    def count_later_bytes(self) -> int:
        if self.optimizer is None or self.forward.device.type == "cpu":
            return 0
        # Buffers of gradients exist already. Each rank gets two moments of its part of the weights.
        groups = self.optimizer.param_groups
        return sum(2 * parameter.nbytes for group in groups for parameter in group["params"])

    def onload(self) -> None:
        self._offloader.onload()

    def offload(self) -> None:
        self._offloader.offload()

    def weights(self) -> Iterator[Shard]:
        is_frozen = self.model.adapter is not None
        # The model that generates lacks MTP layers, as in transformers.
        n_layers = self.dimensions.layers
        mtp_prefixes = tuple(
            f"model.layers.{n_layers + number}." for number in range(self.model.mtp_layers)
        )
        for block in self.blocks("base"):
            if block.name.startswith(mtp_prefixes):
                continue
            if isinstance(self.model.shape, MegatronDecoderConfig):
                # Generators run the model by transformers, and the biases of routers never change.
                if block.name.endswith(ROUTER_BIAS):
                    continue
                block = stack_block(block, self.model.shape.n_experts)
            yield replace(block, is_frozen=is_frozen)
        yield from (block for block in self.blocks("adapter") if block.name != HEAD)

    def blocks(self, part: ExportedPart = "all") -> Iterator[Shard]:
        """Yield views of this rank's blocks. A scalar head belongs to the part "adapter"."""
        blocks = join_fused_blocks(self._cut_blocks(part))
        return (
            pack_blocks(blocks, self.dimensions.experts)
            if self.dimensions.has_packed_experts
            else blocks
        )

    def _cut_blocks(self, part: ExportedPart) -> Iterator[Shard]:
        """Yield the blocks of this rank's parameters by the names of the conversion tables."""
        for entry in self.stage_parameters:
            if entry.is_owner and part in (
                "all",
                "base" if is_model_weight(entry.name) else "adapter",
            ):
                yield from cut_blocks(entry.pieces, entry.parameter.detach())

    def export(
        self, directory: Path, *, averaged: bool = False, part: ExportedPart = "all"
    ) -> None:
        assert not averaged, "the configuration does not allow ema_decay with this learner"
        blocks = add_mtp_copies(self.blocks(part), self.dimensions)
        export_blocks(self.model, blocks, self.rank, directory, part)

    @cached_property
    def base_fingerprint(self) -> str | None:
        """The fingerprint of the frozen weights; None without an adapter.

        Checkpoints hold it in place of the frozen weights.

        Its first use is a collective operation, so all ranks must use it at the same time.
        """
        if self.model.adapter is None:
            return None
        return fingerprint_across_ranks(self.blocks("base"))

    def save(self, directory: Path) -> None:
        save_state(directory, self.model, self.optimizer, self.step_rules, self.base_fingerprint)

    def load(self, directory: Path) -> None:
        """Load a checkpoint, written by any number of ranks.

        Raises CheckpointError if the checkpoint lacks a weight, or belongs to other frozen weights.
        """
        load_state(directory, self.model, self.optimizer, self.step_rules, self.base_fingerprint)


def _renew_parameters(model: MegatronPolicy) -> None:
    """Replace the parameters by new ones that share their memory.

    The parameters of the previous training stage would still send their gradients to the buffers of
    that stage.
    """
    for chunk in model.chunks:
        chunk.scalar = None
        for module in chunk.modules():
            for name, parameter in list(module.named_parameters(recurse=False)):
                renewed: Any = nn.Parameter(
                    parameter.detach(), requires_grad=parameter.requires_grad
                )
                # Copy Megatron's attributes, which describe how the parameter is sharded. Leave out
                # "main_...": the gradient and the master copy of the previous stage.
                renewed.__dict__.update(
                    {
                        key: value
                        for key, value in vars(parameter).items()
                        if not key.startswith("main_")
                    }
                )
                setattr(module, name, renewed)


def _attach_head(model: MegatronPolicy, device: torch.device) -> ScalarHead:
    """Return a new scalar head, attached to the model on the last pipeline stage.

    An untied language head and MTP layers are frozen: they are not used, but the optimizer would
    decay their weights.
    """
    head = ScalarHead(model.hidden_size).to(
        device, torch.promote_types(next(model.parameters()).dtype, torch.float32)
    )
    last = model.chunks[-1]
    if last.post_process:
        last.scalar = head
        if not model.shape.tied:
            last.output_layer.requires_grad_(False)
        if last.mtp_process:
            last.mtp.requires_grad_(False)
    return head


def _wrap_ddp(chunk: MegatronStage, config: MegatronConfig) -> DistributedDataParallel:
    """Return the chunk with gradient buffers that are summed over data-parallel ranks."""
    settings: Any = chunk.config
    wrapped = DistributedDataParallel(
        settings,
        DistributedDataParallelConfig(
            grad_reduce_in_fp32=config.weights == "bfloat16",
            overlap_grad_reduce=config.overlap_gradients,
            use_distributed_optimizer=config.distributed_optimizer,
        ),
        chunk,
        disable_bucketing=bool(chunk.vp_stage),
    )
    settings.finalize_model_grads_func = _sum_gradients
    return wrapped


def _sum_gradients(chunks: list[Any], tokens: Tensor | None = None, **groups: Any) -> None:
    """Sum gradients over ranks, without dividing them by the number of tokens."""
    finalize_model_grads(chunks, None, **groups)


def _make_optimizer(chunks: Sequence[Any], section: OptimizerConfig, config: MegatronConfig) -> Any:
    """Return Megatron's Adam for the chunks."""
    optimizer = get_megatron_optimizer(
        MegatronOptimizerConfig(
            optimizer="adam",
            lr=section.lr,
            weight_decay=section.weight_decay,
            adam_beta1=section.betas[0],
            adam_beta2=section.betas[1],
            adam_eps=section.eps,
            # Ratchet clips gradients, and skips steps whose norm is not finite.
            clip_grad=0.0,
            params_dtype=getattr(torch, config.weights),
            bf16=config.weights == "bfloat16",
            use_distributed_optimizer=config.distributed_optimizer,
        ),
        list(chunks),
    )
    for group in optimizer.param_groups:
        group["weight_decay"] = section.weight_decay * group["wd_mult"]
    return optimizer
