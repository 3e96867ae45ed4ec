"""A model with its scalar head, and how what terms read is computed with them.

T = tokens, S = sequences of a micro-batch.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ratchet.batch import ROUTES, Batch
from ratchet.errors import ModelError
from ratchet.learners.compute.token_outputs import (
    SCALARS,
    Head,
    Wanted,
    sequence_scores,
    state_values,
    token_columns,
)
from ratchet.models.layers.expert_routing import Routing, Watch
from ratchet.models.lora.layers import dropping
from ratchet.models.policy import PolicyModel
from ratchet.models.scalar_head import ScalarHead
from ratchet.protocols import LossTerm, Outputs, needed

PREDICTIONS = frozenset({"logprobs", "old_logprobs", "entropy", "topk_logprobs", "topk_ids"})
# "auto": a CPU's cache is small, an accelerator wants large products
CHUNK_MIB, CHUNK_MIB_GPU = 16, 256


class Forward:
    """chunk_mib: logits that exist at a time. device: None: where the weights are. autocast,
    shared_vocab, replays: see `LocalLearner`."""

    def __init__(
        self,
        model: PolicyModel,
        head: ScalarHead | None,
        *,
        chunk_mib: int,
        autocast: bool,
        shared_vocab: int | None,
        device: torch.device | None = None,
        replays: bool = False,
    ) -> None:
        self.model, self.head, self.replays = model, head, replays
        self.chunk_mib, self.autocast, self.shared_vocab = chunk_mib, autocast, shared_vocab
        first = next(model.parameters())
        self.device = device or first.device
        # Losses run in float32 or, for float64 models, in float64: never below.
        self.dtype = torch.promote_types(first.dtype, torch.float32)

    def twin(self) -> Forward:
        """The same weights, with gradients of its own."""
        made = copy.copy(self)
        shared: dict[int, object] = {}
        for module in (self.model, self.head):
            if module is not None:
                shared |= {
                    id(p): nn.Parameter(p.detach(), requires_grad=p.requires_grad)
                    for p in module.parameters()
                }
                shared |= {id(buffer): buffer for buffer in module.buffers()}
        made.model, made.head = copy.deepcopy(self.model, shared), copy.deepcopy(self.head, shared)
        return made

    def parameters(self) -> list[tuple[str, nn.Parameter]]:
        """What the role learns, or is where it learns nothing, by name."""
        named = self.model.trained()
        if self.head is not None:
            named += [
                (f"head.{name}", parameter) for name, parameter in self.head.named_parameters()
            ]
        return named

    def learn(self, micro: Batch, terms: Sequence[LossTerm], seed: int = 0) -> Mapping[str, Tensor]:
        """Adds the gradient of the terms to `.grad`. Their losses and metrics, and "loss", the sum
        that was differentiated. seed: of what an adapter drops."""
        micro, watch = micro.to(self.device, self.dtype), self.watch(terms)
        with dropping(self.model, seed):
            total, found = self.losses(
                micro, self.hidden(micro, watch, needed(terms)), terms, watch
            )
            total.backward()
        return found

    def watch(self, terms: Sequence[LossTerm]) -> Watch | None:
        """What the routers of a forward are watched by, where a term reads what they do."""
        return Watch() if any("routers" in term.needs for term in terms) else None

    def losses(
        self, micro: Batch, hidden_Td: Tensor, terms: Sequence[LossTerm], watch: Watch | None = None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """(what to differentiate, numbers as `learn` gives them). micro: on the device, in the
        dtype of losses. watch: of the forward that made the hidden states."""
        needs = needed(terms)
        # A term of coefficient 0 is only measured: what nothing else needs gets no gradient.
        learned = needed(term for term in terms if micro.weights[term.name].coef)
        out = self.outputs(micro, hidden_Td, needs, measured=needs - learned)
        if watch is not None:
            out = replace(out, routers=watch.columns(micro.sequence_T, micro.n_sequences))
        total = torch.zeros((), dtype=self.dtype, device=self.device)
        found: dict[str, Tensor] = {}
        for term in terms:
            loss, measured = term(out, micro)
            total = total + loss
            found |= {f"{term.name}/{key}": value for key, value in measured.items()}
            if micro.weights[term.name].coef:
                found[term.name] = loss.detach()
        return total, {**found, "loss": total.detach()}

    def outputs(
        self,
        micro: Batch,
        hidden_Td: Tensor,
        needs: Collection[str],
        *,
        measured: Collection[str] = (),
    ) -> Outputs:
        """measured: those of the needs that nothing is differentiated by."""
        given = micro.has("teacher_ids")
        wanted = Wanted.among(needs, given_ids=given, shared=self.shared_vocab, measured=measured)
        columns = self.columns(micro, hidden_Td, needs, wanted)
        if "old_logprobs" in needs:
            own = micro.need("old_logprobs") if micro.has("old_logprobs") else columns["logprobs"]
            columns["old_logprobs"] = own.detach()
        return Outputs(sequence_sum=micro.sequence_sum, **columns)

    def score(
        self,
        micro: Batch,
        wanted: Sequence[str],
        *,
        top_k: int = 0,
        hidden_Td: Tensor | None = None,
    ) -> Mapping[str, Tensor]:
        """Columns without gradient. hidden_Td: where they are known; None: they are computed."""
        asked = Wanted.among(wanted, top_k=top_k, shared=self.shared_vocab)
        with torch.no_grad():
            micro = micro.to(self.device, self.dtype)
            hidden_Td = self.hidden(micro, needs=wanted) if hidden_Td is None else hidden_Td
            return self.columns(micro, hidden_Td, wanted, asked)

    def hidden(
        self, micro: Batch, watch: Watch | None = None, needs: Collection[str] = SCALARS
    ) -> Tensor:
        """[T, d]. needs: what they are read for; for predictions alone, states that predict nothing
        may be left out."""
        if not micro.n_tokens:
            return torch.zeros(0, self.model.hidden_size, dtype=self.dtype, device=self.device)
        read_T = _predicting(micro) if SCALARS.isdisjoint(needs) else None
        given = [
            micro.tokens_T,
            micro.positions_T,
            micro.lengths_S.tolist(),
            self.routing(micro, watch),
        ]
        if any(micro.media_S):
            if not self.model.reads_media:
                raise ModelError(
                    "the batch has images, audio or videos, and a role's model reads text alone: "
                    "choose another"
                )
            given.append(micro.media_S)
        with self._precision():
            return self.model(*given, read_T=read_T)

    def routing(self, micro: Batch, watch: Watch | None = None) -> Routing | None:
        """What the forward of a micro-batch has to do with routers."""
        given_TLK = micro.need(ROUTES) if self.replays and micro.has(ROUTES) else None
        return None if given_TLK is None and watch is None else Routing(given_TLK, watch)

    def columns(
        self, micro: Batch, hidden_Td: Tensor, needs: Collection[str], wanted: Wanted
    ) -> dict[str, Tensor]:
        """At `predicted_T`."""
        columns: dict[str, Tensor] = {}
        if not PREDICTIONS.isdisjoint(needs):
            columns |= self.predictions(micro, hidden_Td, wanted)
        if not SCALARS.isdisjoint(needs):
            scalars_T = self.scalars(micro, hidden_Td)
            columns |= {
                "values": state_values(scalars_T, micro.predicted_T),
                "scores": sequence_scores(scalars_T, micro),
            }
            columns["token_scores"] = scalars_T
        return columns

    def predictions(self, micro: Batch, hidden_Td: Tensor, wanted: Wanted) -> dict[str, Tensor]:
        return token_columns(self.language_head, hidden_Td, micro, micro.predicted_T, wanted)

    def scalars(self, micro: Batch, hidden_Td: Tensor) -> Tensor:
        assert self.head is not None, "this role has no scalar head"
        return self.head(hidden_Td.to(self.dtype))

    @property
    def language_head(self) -> Head:
        size, matrix = self.model.vocab_size, self.head_matrix
        usable = matrix is not None and matrix.dtype == self.dtype
        return Head(
            self.model.logits,
            size,
            rows_per_chunk(self.chunk_mib, size, self.dtype),
            matrix=matrix if usable else None,
        )

    @property
    def head_matrix(self) -> Tensor | None:
        """See `PolicyModel.head_matrix`."""
        return self.model.head_matrix

    def _precision(self) -> AbstractContextManager[object]:
        return torch.autocast(self.device.type, torch.bfloat16) if self.autocast else nullcontext()


def _predicting(micro: Batch) -> Tensor:
    """The tokens before those that are predicted: bool [T]."""
    return F.pad(micro.predicted_T[1:], (0, 1))


def rows_per_chunk(mib: int, vocab_size: int, dtype: torch.dtype) -> int:
    """How many rows of logits fit into so many MiB; at least one."""
    return max(1, mib * 2**20 // (vocab_size * dtype.itemsize))


def logits_mib(mib: int | str, device: str) -> int:
    """Of the logits that exist at a time, where the configuration may leave it to the kind of
    device."""
    if mib == "auto":
        return CHUNK_MIB if device == "cpu" else CHUNK_MIB_GPU
    return int(mib)
