"""A model with its scalar head, and how what terms read is computed with them.

T = tokens, S = sequences of a micro-batch.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn

from ratchet.batch import Batch
from ratchet.interfaces import LossTerm, Outputs
from ratchet.learners.columns import SCALARS, Wanted, sequence_scores, state_values, token_columns
from ratchet.models.heads import ScalarHead
from ratchet.models.policy import PolicyModel

PREDICTIONS = frozenset({"logprobs", "old_logprobs", "entropy", "topk_logprobs", "topk_ids"})


class Forward:
    """chunk_mib: logits that exist at a time. autocast, shared_vocab: see `LocalLearner`."""

    def __init__(
        self, model: PolicyModel, head: ScalarHead | None, *, chunk_mib: int, autocast: bool, shared_vocab: int | None
    ) -> None:
        self.model, self.head = model, head
        self.chunk_mib, self.autocast, self.shared_vocab = chunk_mib, autocast, shared_vocab
        first = next(model.parameters())
        self.device = first.device
        # Losses run in float32 or, for float64 models, in float64: never below.
        self.dtype = torch.promote_types(first.dtype, torch.float32)

    def twin(self) -> Forward:
        """The same weights, with gradients of its own."""
        made = copy.copy(self)
        shared: dict[int, object] = {}
        for module in (self.model, self.head):
            if module is not None:
                shared |= {id(p): nn.Parameter(p.detach(), requires_grad=p.requires_grad) for p in module.parameters()}
                shared |= {id(buffer): buffer for buffer in module.buffers()}
        made.model, made.head = copy.deepcopy(self.model, shared), copy.deepcopy(self.head, shared)
        return made

    def parameters(self) -> list[tuple[str, nn.Parameter]]:
        """By name."""
        named = list(self.model.named_parameters())
        if self.head is not None:
            named += [(f"head.{name}", parameter) for name, parameter in self.head.named_parameters()]
        return named

    def learn(self, micro: Batch, terms: Sequence[LossTerm]) -> Mapping[str, Tensor]:
        """Adds the gradient of the terms to `.grad`. Their losses and metrics, and "loss", the sum that was differentiated."""
        needs = frozenset[str]().union(*(term.needs for term in terms))
        # A term of coefficient 0 is only measured: what nothing else needs gets no gradient.
        learned = frozenset[str]().union(*(term.needs for term in terms if micro.weights[term.name].coef))
        micro = micro.to(self.device, self.dtype)
        out = self.outputs(micro, needs, measured=needs - learned)
        total = torch.zeros((), dtype=self.dtype, device=self.device)
        found: dict[str, Tensor] = {}
        for term in terms:
            loss, measured = term(out, micro)
            total = total + loss
            found |= {f"{term.name}/{key}": value for key, value in measured.items()}
            if micro.weights[term.name].coef:
                found[term.name] = loss.detach()
        total.backward()
        return {**found, "loss": total.detach()}

    def outputs(self, micro: Batch, needs: Collection[str], *, measured: Collection[str] = ()) -> Outputs:
        """measured: those of the needs that nothing is differentiated by."""
        given = micro.has("teacher_ids")
        wanted = Wanted.among(needs, given_ids=given, shared=self.shared_vocab, measured=measured)
        columns = self.columns(micro, needs, wanted)
        if "old_logprobs" in needs:
            own = micro.need("old_logprobs") if micro.has("old_logprobs") else columns["logprobs"]
            columns["old_logprobs"] = own.detach()
        return Outputs(sequence_sum=micro.sequence_sum, **columns)

    def columns(self, micro: Batch, needs: Collection[str], wanted: Wanted) -> dict[str, Tensor]:
        """At `predicted_T`. micro: on the device, in the dtype of losses."""
        hidden_Td = torch.zeros(0, self.model.hidden_size, dtype=self.dtype, device=self.device)
        if micro.n_tokens:
            with self._precision():
                hidden_Td = self.model.hidden(micro.tokens_T, micro.positions_T, micro.lengths_S.tolist())
        columns: dict[str, Tensor] = {}
        mask_T = micro.predicted_T
        if not PREDICTIONS.isdisjoint(needs):
            rows = rows_per_chunk(self.chunk_mib, self.model.vocab_size, self.dtype)
            columns |= token_columns(self.model.logits, hidden_Td, micro, mask_T, wanted, chunk_rows=rows)
        if not SCALARS.isdisjoint(needs):
            assert self.head is not None, "this role has no scalar head"
            scalars_T = self.head(hidden_Td.to(self.dtype))
            columns |= {"values": state_values(scalars_T, mask_T), "scores": sequence_scores(scalars_T, micro)}
            columns["token_scores"] = scalars_T
        return columns

    def _precision(self) -> AbstractContextManager[object]:
        return torch.autocast(self.device.type, torch.bfloat16) if self.autocast else nullcontext()


def rows_per_chunk(mib: int, vocab_size: int, dtype: torch.dtype) -> int:
    """How many rows of logits fit into so many MiB; at least one."""
    return max(1, mib * 2**20 // (vocab_size * dtype.itemsize))
