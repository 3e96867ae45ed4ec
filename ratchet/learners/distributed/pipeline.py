"""Pipeline parallelism by torch.distributed.pipelining.

All ranks know every micro-batch, so the stages exchange hidden states alone. These have one shape
in a pass: shorter micro-batches are padded with tokens that nothing reads.

T = tokens of the longest micro-batch, U = distinct tokens of another, d = hidden size, M = micro-
batches.
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
from ratchet.models.layers.packed_inputs import PackedInputs
from ratchet.models.parallel.sharded_policy import DistributedPolicy

# micro-batch -> the routing of its forward
RoutingFunction = Callable[[Batch], Routing | None]
# (number of the micro-batch, its hidden states [T, d]) -> the loss to differentiate
Loss = Callable[[int, Tensor], Tensor]


class Pipeline:
    """The stages of a pipeline on this rank.

    device: computes.
    dtype: of the hidden states.
    """

    def __init__(
        self,
        mesh: Mesh,
        model: DistributedPolicy,
        device: torch.device,
        dtype: torch.dtype,
        routing: RoutingFunction,
    ) -> None:
        assert mesh.pipeline is not None, "a pipeline of one rank"
        self.group = mesh.pipeline
        self.mesh = mesh
        self.model = model
        self.device = device
        self.dtype = dtype
        self.routing = routing

    @property
    def is_last(self) -> bool:
        """True if hidden states come out on this rank."""
        return self.mesh.at.pipeline == self.mesh.topology.pipeline - 1

    def learn(self, micros: Sequence[Batch], loss: Loss) -> None:
        """Add up gradients, with one forward and one backward at a time on each stage.

        "1F1B", arXiv:2006.09503; several stages on a rank are interleaved (arXiv:2104.04473).
        """
        feeds = self._feeds(micros)
        schedule, numbers_M = self._schedule(
            feeds, lambda hidden, number: loss(int(number), self._unpad(feeds, hidden, number))
        )
        tokens = self._stage_input(feeds)
        schedule.step(*tokens, number=numbers_M, target=numbers_M, return_outputs=False)

    def hidden(self, micros: Sequence[Batch]) -> list[Tensor]:
        """Return the hidden states of every micro-batch on the last rank, and nothing elsewhere."""
        feeds = self._feeds(micros)
        schedule, numbers_M = self._schedule(feeds, None)
        out = schedule.eval(*self._stage_input(feeds), number=numbers_M)
        if out is None or not self.is_last:
            return []
        head = self.model.runs[-1]
        # A pass without a backward has divided the head again.
        if isinstance(head, FSDPModule):
            head.unshard()
        return [
            self._unpad(feeds, hidden, number)
            for number, hidden in zip(numbers_M, out.chunk(len(feeds)), strict=True)
        ]

    def _feeds(self, micros: Sequence[Batch]) -> list[PackedInputs]:
        """Return the packed inputs of the micro-batches."""
        return [
            self.model.feed(
                micro.tokens_T, micro.positions_T, micro.lengths_S.tolist(), self.routing(micro)
            )
            for micro in micros
        ]

    def _unpad(self, feeds: Sequence[PackedInputs], hidden_Td: Tensor, number: Tensor) -> Tensor:
        """Return the hidden states of a micro-batch's own tokens."""
        feed = feeds[int(number)]
        return feed.unfold(hidden_Td[: len(feed.tokens_U)])

    def _stage_input(self, feeds: Sequence[PackedInputs]) -> tuple[Tensor, ...]:
        """Return the first stage's input, whose values are unused.

        The stage takes the tokens of the feeds.
        """
        return (torch.zeros(len(feeds), device=self.device),) if self.mesh.at.pipeline == 0 else ()

    def _schedule(
        self, feeds: Sequence[PackedInputs], loss: Callable[[Tensor, Tensor], Tensor] | None
    ) -> tuple[Schedule1F1B | ScheduleInterleaved1F1B, Tensor]:
        """Return the schedule of a pass, and the numbers of its micro-batches."""
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

    def _stage(
        self, place: int, feeds: Sequence[PackedInputs], tokens: int, between: int
    ) -> PipelineStage:
        """Return the torch stage of one of this rank's runs of layers."""
        stage = self.model.runs[place]
        size = self.model.hidden_size
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
