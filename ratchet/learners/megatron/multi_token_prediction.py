"""The loss of multi-token prediction (MTP): DeepSeek-V3, arXiv:2412.19437, equations 24 and 25.

    L = 1/K sum_k L_k,    L_k = -1/n_k sum_j log P_k(t_j)

The layer of depth k predicts token j from the state of token j - k - 1 and the tokens up to j - 1.
A token counts if the stage trains it (`Batch.trainable_T`), its sequence has a loss weight, and
token j - k - 1 is in its sequence. n_k is the number of predictions of depth k in the optimizer
step. Temperatures and grammars of the sampler don't change P_k.

T = tokens of a micro-batch, d = hidden size, K = MTP layers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from ratchet.batch import Batch
from ratchet.errors import ModelError
from ratchet.learners.compute.microbatching import mask_weighted_rows
from ratchet.learners.compute.token_outputs import TokenOutputSpec
from ratchet.learners.distributed.base import RankForward
from ratchet.models.convert.dimensions import Dimensions
from ratchet.models.convert.tables import list_mtp_copies
from ratchet.models.megatron.policy import MegatronPolicy
from ratchet.models.parallel.collectives import Group
from ratchet.protocols import LossTerm, Shard


def shift_tokens(micro: Batch, column_T: Tensor, depth: int) -> Tensor:
    """Return the entry `depth` places later in the same sequence; 0 where there is none. [T]"""
    index_T = torch.arange(micro.n_tokens, device=column_T.device)
    ends_S = micro.starts_S + micro.lengths_S
    is_inside_T = index_T + depth < ends_S[micro.sequence_T]
    return torch.where(is_inside_T, column_T.roll(-depth), torch.zeros_like(column_T))


def mask_predictions(micro: Batch, terms: Sequence[LossTerm], depth: int) -> Tensor:
    """Return the mask of the predictions that count, bool [T].

    It is True at token j - depth if token j counts, whose predicting state is the one before. So
    tokens that are shifted by `depth` are scored at this mask like those of any batch. Fillers,
    which complete the micro-batches of a pipeline or of data ranks, have no weights.
    """
    counts_T = micro.trainable_T & mask_weighted_rows(micro, terms)[micro.sequence_T]
    return shift_tokens(micro, counts_T, depth) & (micro.positions_T > 0)


class MTPLoss:
    """The MTP loss of a learner's rank, times `factor`.

    Call `begin_step` before the micro-batches of each optimizer step.

    Raises ModelError if the model has no MTP layers.
    """

    def __init__(self, model: MegatronPolicy, forward: RankForward, factor: float) -> None:
        if not model.mtp_layers:
            raise ModelError(
                f"learner.mtp_loss_scaling_factor={factor} trains layers for multi-token "
                "prediction, which the model's files lack. Set learner.mtp_loss_scaling_factor=0."
            )
        self.model = model
        self.forward = forward
        self.factor = factor
        self.depths = range(1, model.mtp_layers + 1)
        self.counts: list[float] = []  # n_k of each depth

    def begin_step(
        self,
        micros: Sequence[Batch],
        terms: Sequence[LossTerm],
        group: Group | None,
        context: int,
    ) -> None:
        """Count the predictions of the step over all ranks.

        Args:
            micros: The micro-batches of this rank, of which there is at least one.
            terms: The losses of the step.
            group: The ranks whose micro-batches count, see `RankLearner.gradient_group`.
            context: How many of these ranks have the same micro-batches.
        """
        counts_K = torch.stack(
            [
                torch.stack([mask_predictions(micro, terms, depth).sum() for micro in micros]).sum()
                for depth in self.depths
            ]
        ).double()
        if group is not None:
            dist.all_reduce(counts_K, group=group)
        self.counts = (counts_K / context).tolist()

    def pack_later_tokens(self, micro: Batch) -> Tensor:
        """Return `PackedInputs.later_tokens_KU` of a micro-batch."""
        lengths = micro.lengths_S.tolist()
        return torch.stack(
            [
                self.model.pack_inputs(
                    shift_tokens(micro, micro.tokens_T, depth), micro.positions_T, lengths
                ).tokens_U
                for depth in self.depths
            ]
        )

    def add(
        self,
        micro: Batch,
        terms: Sequence[LossTerm],
        states: Sequence[Tensor],
        total: Tensor,
        metrics: Mapping[str, Tensor],
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the sum of a micro-batch's losses with this one, and the metrics with L.

        Args:
            terms: The losses of the step.
            states: The hidden states of each depth [T, d].
            total: The sum of the other losses.
            metrics: Their metrics.
        """
        nll = torch.zeros_like(total)
        for depth, hidden_Td, count in zip(self.depths, states, self.counts, strict=True):
            shifted = replace(
                micro,
                tokens_T=shift_tokens(micro, micro.tokens_T, depth),
                predicted_T=mask_predictions(micro, terms, depth),
                temperature_S=torch.ones_like(micro.temperature_S),
                masks_MB=None,
                host=None,
            )
            columns = self.forward.predictions(shifted, hidden_Td, TokenOutputSpec())
            nll = nll - columns["logprobs"].sum() / max(count, 1.0)
        nll = nll / len(self.depths)
        total = total + self.factor * nll
        return total, {**metrics, "mtp_nll": nll.detach(), "loss": total.detach()}


def add_mtp_copies(blocks: Iterable[Shard], dimensions: Dimensions) -> Iterator[Shard]:
    """Yield blocks, and those of the copies of embedding and head that files have in MTP layers."""
    copies = list_mtp_copies(dimensions)
    for block in blocks:
        yield block
        yield from (replace(block, name=copy) for copy in copies if copies[copy] == block.name)
