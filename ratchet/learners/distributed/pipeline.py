"""Run pipeline parallelism with torch.distributed.pipelining.

All ranks have every micro-batch, so the stages exchange only hidden states. In a pass all hidden
states have the same shape: shorter micro-batches are padded at the end, and no loss depends on the
padding.

T = tokens of a micro-batch, U = its tokens with shared prefixes counted once, d = hidden size,
M = micro-batches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B

from ratchet.batch import Batch
from ratchet.learners.compute.forward import Forward
from ratchet.learners.distributed.mesh import Mesh
from ratchet.models.lora.layers import seed_dropout
from ratchet.models.parallel.stages import ModelStage, StageInputs

# (index of the micro-batch, its hidden states [T, d]) -> the loss to differentiate
Loss = Callable[[int, Tensor], Tensor]


class SeededStage(PipelineStage):
    """A pipeline stage that sets the seed of the adapters' dropout for each micro-batch.

    The backward of a micro-batch needs its seed too, because activation checkpointing then
    recomputes its activations. Other micro-batches run between the two.
    """

    seeds: Sequence[int] = ()  # the seed of each micro-batch; (): nothing is dropped

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **options: Any) -> Any:
        with self._seed(fwd_chunk_id):
            return super().forward_one_chunk(fwd_chunk_id, *args, **options)

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **options: Any) -> Any:
        with self._seed(bwd_chunk_id):
            return super().backward_one_chunk(bwd_chunk_id, *args, **options)

    def _seed(self, number: int) -> AbstractContextManager[None]:
        return seed_dropout(self.submod, self.seeds[number]) if self.seeds else nullcontext()


class Pipeline:
    """The pipeline stages on this rank.

    Args:
        forward: What this rank computes with. It has the model with the stages, the device, and the
            type of the hidden states between stages.
    """

    def __init__(self, mesh: Mesh, forward: Forward) -> None:
        assert mesh.pipeline is not None, "a pipeline of one rank"
        self.group = mesh.pipeline
        self.mesh = mesh
        self.forward = forward
        self.model = forward.model
        self.device = forward.device
        self.dtype = forward.dtype

    @property
    def is_last(self) -> bool:
        """True if this rank has the last stage, which returns the final hidden states."""
        return self.mesh.coordinates.pipeline == self.mesh.topology.pipeline - 1

    def forward_backward(self, micros: Sequence[Batch], loss: Loss, seeds: Sequence[int]) -> None:
        """Accumulate the gradients of the micro-batches' losses.

        seeds: the seed of the adapter's dropout for each micro-batch.

        The schedule is 1F1B (arXiv:2006.09503), interleaved if a rank has several stages
        (arXiv:2104.04473).
        """
        micro_inputs = self._pack_micros(micros)
        schedule, numbers_M = self._make_schedule(
            micro_inputs,
            lambda hidden, number: loss(int(number), self._unpad(micro_inputs, hidden, number)),
            seeds,
        )
        stage_input = self._make_stage_input(micro_inputs)
        schedule.step(*stage_input, number=numbers_M, target=numbers_M, return_outputs=False)

    def hidden(self, micros: Sequence[Batch]) -> list[Tensor]:
        """Return the hidden states of every micro-batch on the last rank; [] on other ranks."""
        micro_inputs = self._pack_micros(micros)
        schedule, numbers_M = self._make_schedule(micro_inputs, None, ())
        out = schedule.eval(*self._make_stage_input(micro_inputs), number=numbers_M)
        if out is None or not self.is_last:
            return []
        last_stage = self.model.local_stages[-1]
        # FSDP has resharded the stage after this pass without a backward. The caller needs its
        # language head whole.
        if isinstance(last_stage, FSDPModule):
            last_stage.unshard()
        return [
            self._unpad(micro_inputs, hidden, number)
            for number, hidden in zip(numbers_M, out.chunk(len(micro_inputs)), strict=True)
        ]

    def _pack_micros(self, micros: Sequence[Batch]) -> list[StageInputs]:
        """Return the packed inputs of the micro-batches."""
        return [
            self.model.pack_inputs(
                micro.tokens_T,
                micro.positions_T,
                micro.lengths_S.tolist(),
                self.forward.routing(micro),
                *self.forward.list_media(micro),
            )
            for micro in micros
        ]

    def _unpad(
        self, micro_inputs: Sequence[StageInputs], hidden_Td: Tensor, number: Tensor
    ) -> Tensor:
        """Return the hidden states of a micro-batch without the padding, in its token order."""
        packed = micro_inputs[int(number)]
        return packed.unfold(hidden_Td[: len(packed.tokens_U)])

    def _make_stage_input(self, micro_inputs: Sequence[StageInputs]) -> tuple[Tensor, ...]:
        """Return the input that torch's schedule needs: unused zeros for the first stage, else ().

        The first stage embeds the tokens of its packed inputs instead.
        """
        is_first = self.mesh.coordinates.pipeline == 0
        return (torch.zeros(len(micro_inputs), device=self.device),) if is_first else ()

    def _make_schedule(
        self,
        micro_inputs: Sequence[StageInputs],
        loss: Callable[[Tensor, Tensor], Tensor] | None,
        seeds: Sequence[int],
    ) -> tuple[Schedule1F1B | ScheduleInterleaved1F1B, Tensor]:
        """Return the schedule of a pass and the indices of its micro-batches."""
        multiple = self.model.local_stages[0].state_parts
        # A context-parallel rank may have no tokens.
        longest = max(1, *(len(packed.tokens_U) for packed in micro_inputs))
        longest = -(-longest // multiple) * multiple
        padded = [packed.pad(longest) for packed in micro_inputs]
        stages = [self._make_stage(stage, padded, longest) for stage in self.model.local_stages]
        for stage in stages:
            stage.seeds = seeds
        numbers_M = torch.arange(len(micro_inputs))
        if len(stages) == 1:
            return Schedule1F1B(
                stages[0], len(micro_inputs), loss_fn=loss, scale_grads=False
            ), numbers_M
        return ScheduleInterleaved1F1B(
            list(stages), len(micro_inputs), loss_fn=loss, scale_grads=False
        ), numbers_M

    def _make_stage(
        self, stage: ModelStage, micro_inputs: Sequence[StageInputs], tokens: int
    ) -> SeededStage:
        """Return torch's stage for one of this rank's stages.

        tokens: padded number of tokens; the last stage returns the states of all of them.
        """
        stage.micro_inputs = micro_inputs
        index = stage.index
        states, output_states = (
            torch.empty(n, self.model.hidden_size, dtype=self.dtype, device="meta").requires_grad_()
            for n in (tokens // stage.state_parts, tokens)
        )
        return SeededStage(
            stage,
            index.index,
            index.count,
            self.device,
            input_args=torch.empty(1, device="meta") if index.index == 0 else states,
            output_args=output_states if index.index == index.count - 1 else states,
            group=self.group,
        )
