"""The forward pass of a model with its scalar head, and the outputs that loss terms read.

T = tokens, S = sequences of a micro-batch.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ratchet.batch import ROUTES, Batch
from ratchet.errors import ModelError
from ratchet.learners.compute.token_outputs import (
    SCALAR_COLUMNS,
    Head,
    TokenOutputSpec,
    compute_state_values,
    compute_token_columns,
    select_sequence_scores,
)
from ratchet.models.decoder import share_rounded_weights
from ratchet.models.layers.expert_routing import RouterMonitor, Routing
from ratchet.models.lora.layers import seed_dropout
from ratchet.models.policy import PolicyModel
from ratchet.models.scalar_head import ScalarHead
from ratchet.protocols import LossTerm, Outputs, list_needed_outputs

PREDICTION_COLUMNS = frozenset({"logprobs", "old_logprobs", "entropy", "topk_logprobs", "topk_ids"})
# MiB of logits under `logprob_chunk_mib=auto`. A CPU has a small cache, while an accelerator needs
# large matrix products.
CHUNK_MIB = 16
CHUNK_MIB_GPU = 256


class Forward:
    """The forward and backward passes of one role's model on micro-batches.

    Args:
        chunk_mib: MiB of logits that exist at a time.
        autocast, shared_vocab, replays_routes: As in `LocalLearner`.
        device: Device that computes; None: the device of the weights.
    """

    def __init__(
        self,
        model: PolicyModel,
        head: ScalarHead | None,
        *,
        chunk_mib: int,
        autocast: bool,
        shared_vocab: int | None,
        device: torch.device | None = None,
        replays_routes: bool = False,
    ) -> None:
        self.model = model
        self.head = head
        self.replays_routes = replays_routes
        self.chunk_mib = chunk_mib
        self.autocast = autocast
        self.shared_vocab = shared_vocab
        first_parameter = next(model.parameters())
        self.device = device or first_parameter.device
        # Losses are computed in float32, or in float64 for float64 models.
        self.dtype = torch.promote_types(first_parameter.dtype, torch.float32)

    def copy_with_own_gradients(self) -> Forward:
        """Return a copy with gradients of its own, which shares the weights and rounded weights."""
        clone = copy.copy(self)
        # `deepcopy` takes the objects in this memo instead of copying them.
        memo: dict[int, object] = {}
        for module in (self.model, self.head):
            if module is not None:
                memo |= {
                    id(p): nn.Parameter(p.detach(), requires_grad=p.requires_grad)
                    for p in module.parameters()
                }
                memo |= {id(buffer): buffer for buffer in module.buffers()}
                memo |= share_rounded_weights(module)
        clone.model = copy.deepcopy(self.model, memo)
        clone.head = copy.deepcopy(self.head, memo)
        return clone

    def parameters(self) -> list[tuple[str, nn.Parameter]]:
        """Return the parameters that an update of this role changes, as (name, parameter) pairs.

        A frozen role returns the parameters that it would train.
        """
        named_parameters = self.model.trained_parameters()
        if self.head is not None:
            named_parameters += [
                (f"head.{name}", parameter) for name, parameter in self.head.named_parameters()
            ]
        return named_parameters

    def forward_backward(
        self, micro: Batch, terms: Sequence[LossTerm], seed: int = 0
    ) -> Mapping[str, Tensor]:
        """Run forward and backward, and return the losses and metrics of the terms.

        Gradients are added to `.grad`. "loss" is the sum that was differentiated.

        Args:
            seed: Seed of the adapter's dropout.
        """
        micro = micro.to(self.device, self.dtype)
        monitor = self.make_monitor(terms)
        with seed_dropout(self.model, seed):
            total, metrics = self.losses(
                micro, self.hidden(micro, monitor, list_needed_outputs(terms)), terms, monitor
            )
            total.backward()
        return metrics

    def make_monitor(self, terms: Sequence[LossTerm]) -> RouterMonitor | None:
        """Return a recorder of the routers if a term reads their outputs, else None."""
        return RouterMonitor() if any("routers" in term.needs for term in terms) else None

    def losses(
        self,
        micro: Batch,
        hidden_Td: Tensor,
        terms: Sequence[LossTerm],
        monitor: RouterMonitor | None = None,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return (the sum to differentiate, losses and metrics as `forward_backward` returns them).

        Args:
            micro: A micro-batch on the device, in the dtype of losses.
            monitor: The recorder of the forward that computed the hidden states.
        """
        needs = list_needed_outputs(terms)
        # A term with coefficient 0 is only measured. Outputs that no other term needs get no
        # gradient.
        needs_with_gradient = list_needed_outputs(
            term for term in terms if micro.weights[term.name].coef
        )
        out = self.outputs(micro, hidden_Td, needs, measured=needs - needs_with_gradient)
        if monitor is not None:
            out = replace(out, routers=monitor.measure(micro.sequence_T, micro.n_sequences))
        total = torch.zeros((), dtype=self.dtype, device=self.device)
        metrics: dict[str, Tensor] = {}
        for term in terms:
            loss, term_metrics = term(out, micro)
            total = total + loss
            metrics |= {f"{term.name}/{key}": value for key, value in term_metrics.items()}
            if micro.weights[term.name].coef:
                metrics[term.name] = loss.detach()
        return total, {**metrics, "loss": total.detach()}

    def outputs(
        self,
        micro: Batch,
        hidden_Td: Tensor,
        needs: Collection[str],
        *,
        measured: Collection[str] = (),
    ) -> Outputs:
        """Return the outputs that loss terms need.

        Args:
            needs: Names of the outputs.
            measured: Names among `needs` of outputs that are only measured and get no gradient.
        """
        spec = TokenOutputSpec.from_names(
            needs,
            has_ids=micro.has("teacher_ids"),
            shared_vocab=self.shared_vocab,
            measured=measured,
        )
        columns = self.columns(micro, hidden_Td, needs, spec)
        if "old_logprobs" in needs:
            # If no scoring pass filled the column, this forward is the first one of the batch, and
            # its own log-probabilities are the old ones.
            source = (
                micro.need("old_logprobs") if micro.has("old_logprobs") else columns["logprobs"]
            )
            columns["old_logprobs"] = source.detach()
        return Outputs(sequence_sum=micro.sequence_sum, **columns)

    def score(
        self,
        micro: Batch,
        output_names: Sequence[str],
        *,
        top_k: int = 0,
        hidden_Td: Tensor | None = None,
    ) -> Mapping[str, Tensor]:
        """Return the named columns, without gradient.

        hidden_Td: the hidden states; None: compute them.
        """
        has_ids = not top_k and micro.has("teacher_ids")
        spec = TokenOutputSpec.from_names(
            output_names, has_ids=has_ids, top_k=top_k, shared_vocab=self.shared_vocab
        )
        with torch.no_grad():
            micro = micro.to(self.device, self.dtype)
            hidden_Td = self.hidden(micro, needs=output_names) if hidden_Td is None else hidden_Td
            return self.columns(micro, hidden_Td, output_names, spec)

    def hidden(
        self,
        micro: Batch,
        monitor: RouterMonitor | None = None,
        needs: Collection[str] = SCALAR_COLUMNS,
    ) -> Tensor:
        """Return the hidden states, [T, d].

        needs: the outputs to be computed from the hidden states. If no output reads the scalar
          head, the states of tokens that predict nothing may be left out.
        """
        if not micro.n_tokens:
            return torch.zeros(0, self.model.hidden_size, dtype=self.dtype, device=self.device)
        source = micro.on_host if self.model.packs_on_host else micro
        output_mask_T = (
            _mask_predicting_tokens(source) if SCALAR_COLUMNS.isdisjoint(needs) else None
        )
        inputs = [
            source.tokens_T,
            source.positions_T,
            micro.on_host.lengths_S.tolist(),
            self.routing(source, monitor),
            *self.list_media(micro),
        ]
        with self._autocast():
            return self.model(*inputs, output_mask_T=output_mask_T)

    def list_media(self, micro: Batch) -> list[Any]:
        """Return the argument of the model for the media of a micro-batch; [] without media.

        Raises ModelError if the model reads no media.
        """
        if not any(micro.media_S):
            return []
        if not self.model.reads_media:
            raise ModelError(
                "the batch has images, audio or videos, but the model of a role only reads text. "
                "Choose a multimodal model."
            )
        return [micro.media_S]

    def routing(self, micro: Batch, monitor: RouterMonitor | None = None) -> Routing | None:
        """Return the routing of a micro-batch; None if nothing is replayed or monitored."""
        routes_TLK = micro.need(ROUTES) if self.replays_routes and micro.has(ROUTES) else None
        return None if routes_TLK is None and monitor is None else Routing(routes_TLK, monitor)

    def columns(
        self, micro: Batch, hidden_Td: Tensor, needs: Collection[str], spec: TokenOutputSpec
    ) -> dict[str, Tensor]:
        """Return the columns of a micro-batch, by name.

        Predictions and values are at the tokens of `predicted_T`, and 0 elsewhere. "scores" has one
        entry per sequence, "token_scores" one per token.
        """
        columns: dict[str, Tensor] = {}
        if not PREDICTION_COLUMNS.isdisjoint(needs):
            columns |= self.predictions(micro, hidden_Td, spec)
        if not SCALAR_COLUMNS.isdisjoint(needs):
            scalars_T = self.scalars(micro, hidden_Td)
            columns |= {
                "values": compute_state_values(scalars_T, micro.on_host.predicted_T),
                "scores": select_sequence_scores(scalars_T, micro),
            }
            columns["token_scores"] = scalars_T
        return columns

    def predictions(
        self, micro: Batch, hidden_Td: Tensor, spec: TokenOutputSpec
    ) -> dict[str, Tensor]:
        """Return the columns that are computed with the language head."""
        mask_T = micro.on_host.predicted_T
        return compute_token_columns(self.language_head, hidden_Td, micro, mask_T, spec)

    def scalars(self, micro: Batch, hidden_Td: Tensor) -> Tensor:
        """Return the output of the scalar head for each token, [T]."""
        assert self.head is not None, "this role has no scalar head"
        return self.head(hidden_Td.to(self.dtype))

    @property
    def language_head(self) -> Head:
        """The language head. It has a matrix only if the matrix has the dtype of losses."""
        size = self.model.vocab_size
        matrix = self.head_matrix
        has_loss_dtype = matrix is not None and matrix.dtype == self.dtype
        return Head(
            self.model.logits,
            size,
            count_rows_per_chunk(self.chunk_mib, size, self.dtype),
            matrix=matrix if has_loss_dtype else None,
        )

    @property
    def head_matrix(self) -> Tensor | None:
        """The matrix of the language head, see `PolicyModel.head_matrix`."""
        return self.model.head_matrix

    def _autocast(self) -> AbstractContextManager[object]:
        return torch.autocast(self.device.type, torch.bfloat16) if self.autocast else nullcontext()


def _mask_predicting_tokens(micro: Batch) -> Tensor:
    """Return the mask of the tokens whose successor is predicted, bool [T]."""
    return F.pad(micro.predicted_T[1:], (0, 1))


def count_rows_per_chunk(mib: int, vocab_size: int, dtype: torch.dtype) -> int:
    """Return the number of rows of logits that fit into `mib` MiB, at least 1."""
    return max(1, mib * 2**20 // (vocab_size * dtype.itemsize))


def resolve_chunk_mib(mib: int | str, device: str) -> int:
    """Return the MiB of logits that exist at a time; "auto" depends on the kind of device."""
    if mib == "auto":
        return CHUNK_MIB if device == "cpu" else CHUNK_MIB_GPU
    return int(mib)
