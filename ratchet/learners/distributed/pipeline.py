"""Micro-batches on their way through the stages of a pipeline, by torch.distributed.pipelining.

All ranks know every micro-batch, so the stages exchange hidden states alone. These have one shape
in a pass: shorter micro-batches are padded with tokens that nothing reads.

T = tokens of the longest micro-batch, U = distinct ones of another, d = hidden size, M =
micro-batches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B

from ratchet.batch import Batch
from ratchet.learners.distributed.mesh import Mesh
from ratchet.models.layers.expert_routing import Routing
from ratchet.models.layers.packed_inputs import Feed
from ratchet.models.parallel.sharded_policy import SpreadPolicy

Router = Callable[[Batch], Routing | None]  # of a micro-batch's forward
# (micro-batch, its hidden states [T, d]) -> what to differentiate
Loss = Callable[[int, Tensor], Tensor]


class Pipeline:
    """device: that computes. dtype: of the hidden states."""

    def __init__(
        self,
        mesh: Mesh,
        model: SpreadPolicy,
        device: torch.device,
        dtype: torch.dtype,
        routing: Router,
    ) -> None:
        assert mesh.pipeline is not None, "a pipeline of one rank"
        self.group, self.mesh, self.model = mesh.pipeline, mesh, model
        self.device, self.dtype, self.routing = device, dtype, routing

    @property
    def last(self) -> bool:
        """Whether hidden states come out here."""
        return self.mesh.at.pipeline == self.mesh.topology.pipeline - 1

    def learn(self, micros: Sequence[Batch], loss: Loss) -> None:
        """Adds up gradients: each stage does a forward and a backward by turns ("1F1B",
        arXiv:2006.09503), which with several stages a rank are interleaved (arXiv:2104.04473)."""
        feeds = self._feeds(micros)
        schedule, numbers_M = self._schedule(
            feeds, lambda hidden, number: loss(int(number), self._real(feeds, hidden, number))
        )
        tokens = self._tokens(feeds)
        schedule.step(*tokens, number=numbers_M, target=numbers_M, return_outputs=False)

    def hidden(self, micros: Sequence[Batch]) -> list[Tensor]:
        """Of every micro-batch, where they come out; nothing elsewhere."""
        feeds = self._feeds(micros)
        schedule, numbers_M = self._schedule(feeds, None)
        out = schedule.eval(*self._tokens(feeds), number=numbers_M)
        if out is None or not self.last:
            return []
        head = self.model.runs[-1]
        if isinstance(head, FSDPModule):  # a pass without a backward has divided it again
            head.unshard()
        return [
            self._real(feeds, hidden, number)
            for number, hidden in zip(numbers_M, out.chunk(len(feeds)), strict=True)
        ]

    def _feeds(self, micros: Sequence[Batch]) -> list[Feed]:
        return [
            self.model.feed(
                micro.tokens_T, micro.positions_T, micro.lengths_S.tolist(), self.routing(micro)
            )
            for micro in micros
        ]

    def _real(self, feeds: Sequence[Feed], hidden_Td: Tensor, number: Tensor) -> Tensor:
        feed = feeds[int(number)]
        return feed.unfold(hidden_Td[: len(feed.tokens_U)])

    def _tokens(self, feeds: Sequence[Feed]) -> tuple[Tensor, ...]:
        """The first stage's input, which only counts: it takes the tokens of the feeds."""
        return (torch.zeros(len(feeds), device=self.device),) if self.mesh.at.pipeline == 0 else ()

    def _schedule(
        self, feeds: Sequence[Feed], loss: Callable[[Tensor, Tensor], Tensor] | None
    ) -> tuple[Schedule1F1B | ScheduleInterleaved1F1B, Tensor]:
        spread = self.model.spread
        multiple = spread.tensor.size() if spread.tensor is not None and spread.sequence else 1
        longest = -(-max(len(feed.tokens_U) for feed in feeds) // multiple) * multiple
        padded = [feed.padded(longest) for feed in feeds]
        stages = [
            self._stage(stage, padded, longest, longest // multiple)
            for stage in range(len(self.model.runs))
        ]
        numbers_M = torch.arange(len(feeds))
        if len(stages) == 1:
            return Schedule1F1B(stages[0], len(feeds), loss_fn=loss, scale_grads=False), numbers_M
        return ScheduleInterleaved1F1B(
            list(stages), len(feeds), loss_fn=loss, scale_grads=False
        ), numbers_M

    def _stage(self, place: int, feeds: Sequence[Feed], tokens: int, between: int) -> PipelineStage:
        stage, size = self.model.runs[place], self.model.hidden_size
        stage.feeds = feeds
        share = stage.decoder.part.pipeline
        states = torch.empty(between, size, dtype=self.dtype, device="meta", requires_grad=True)
        out = (
            torch.empty(tokens, size, dtype=self.dtype, device="meta", requires_grad=True)
            if share.index == share.count - 1
            else states
        )
        before = torch.empty(1, device="meta") if share.index == 0 else states
        return PipelineStage(
            stage,
            share.index,
            share.count,
            self.device,
            input_args=before,
            output_args=out,
            group=self.group,
        )
