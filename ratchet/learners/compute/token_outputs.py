"""Compute the columns that losses read, such as log-probabilities, from hidden states.

The columns are computed in float32 and in chunks, so that the logits [T, V] never exist as a whole.

T = tokens of a micro-batch, S = its sequences, n = predicted tokens (only these need logits),
d = hidden size, V = vocabulary, K = tokens for which a prediction's log-probabilities are returned,
M = masks of B bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ratchet.allowed_tokens import unpack_masks
from ratchet.batch import ALLOWED, Batch
from ratchet.learners.compute.chunked_logprobs import compute_target_logprobs
from ratchet.utils.transfer import upload

Logits = Callable[[Tensor], Tensor]  # [n, d] -> [n, V], float32 or better
# Columns that a scalar head computes.
SCALAR_COLUMNS = frozenset({"values", "scores", "token_scores"})
# The logit of tokens that a grammar does not allow: a finite number with probability 0, as
# 0 * -inf in entropies and divergences would be NaN.
DISALLOWED = -1e30


@dataclass(frozen=True)
class TokenOutputSpec:
    """The outputs to compute for each prediction, besides its target's log-probability.

    needs_entropy: True for the prediction's entropy.
    needs_logprobs_at_ids: True for the log-probabilities of the tokens in the batch's
      `teacher_ids`.
    needs_top: True for the log-probabilities of the top_k likeliest tokens (top_k=0: of all tokens,
      in order).
    needs_ids: True for the ids of these likeliest tokens too.
    shared_vocab: size of the vocabulary that student and teacher share. The log-probabilities at
      ids or of the likeliest tokens are renormalised over these first entries; None: over the whole
      vocabulary.
    has_entropy_gradient: False if the entropy needs no gradient, which saves memory for the
      backward.
    """

    needs_entropy: bool = False
    needs_logprobs_at_ids: bool = False
    needs_top: bool = False
    needs_ids: bool = False
    top_k: int = 0
    shared_vocab: int | None = None
    has_entropy_gradient: bool = True

    @classmethod
    def from_names(
        cls,
        names: Collection[str],
        *,
        has_ids: bool = False,
        top_k: int = 0,
        shared_vocab: int | None = None,
        measured: Collection[str] = (),
    ) -> TokenOutputSpec:
        """Return the outputs that the columns of these names need.

        has_ids: True if the batch has the column `teacher_ids`.
        measured: names of the columns that need no gradient.
        """
        top = "topk_logprobs" in names or "topk_ids" in names
        return cls(
            "entropy" in names,
            needs_logprobs_at_ids=top and has_ids,
            needs_top=top and not has_ids,
            needs_ids="topk_ids" in names and not has_ids,
            top_k=top_k,
            shared_vocab=shared_vocab,
            has_entropy_gradient="entropy" not in measured,
        )

    @property
    def only_logprobs_need_gradient(self) -> bool:
        """True if the targets' log-probabilities are the only output with a gradient.

        No other log-probabilities are computed then.
        """
        has_gradient = self.needs_entropy and self.has_entropy_gradient
        return not (self.needs_logprobs_at_ids or self.needs_top or has_gradient)

    @property
    def column_names(self) -> tuple[str, ...]:
        """The names of the columns, in the order of the outputs."""
        is_computed_by_name = {
            "entropy": self.needs_entropy,
            "topk_logprobs": self.needs_logprobs_at_ids or self.needs_top,
            "topk_ids": self.needs_ids,
        }
        optional = (name for name, is_computed in is_computed_by_name.items() if is_computed)
        return ("logprobs", *optional)


class Vocabulary(Protocol):
    """The operations on log-probabilities [n, V], whose columns may be divided over ranks.

    If they are divided, V is this rank's part of the vocabulary.
    """

    def take_columns(self, x_nV: Tensor) -> Tensor:
        """Return this rank's columns of a matrix over the whole vocabulary."""
        ...

    def log_softmax(self, logits_nV: Tensor) -> Tensor: ...
    def renormalise_first(self, logprobs_nV: Tensor, size: int) -> Tensor:
        """Return the log-probabilities of the first `size` tokens, renormalised over these."""
        ...

    def sum(self, x_nV: Tensor) -> Tensor: ...
    def pick(self, logprobs_nV: Tensor, ids_nK: Tensor) -> Tensor:
        """Return the log-probabilities of the ids, [n, K]."""
        ...

    def compute_rest(self, logprobs_nV: Tensor, ids_nK: Tensor) -> Tensor:
        """Return the log of the total probability of all other tokens, [n]."""
        ...

    def find_top(self, logprobs_nV: Tensor, k: int) -> Tensor:
        """Return the ids of the k likeliest tokens in descending order, int64 [n, k]."""
        ...

    def gather_all(self, logprobs_nV: Tensor, size: int) -> Tensor:
        """Return the log-probabilities of all `size` tokens, in order."""
        ...


class FullVocabulary:
    """A vocabulary whose log-probabilities are all on this rank."""

    def take_columns(self, x_nV: Tensor) -> Tensor:
        return x_nV

    def log_softmax(self, logits_nV: Tensor) -> Tensor:
        return logits_nV.log_softmax(-1)

    def renormalise_first(self, logprobs_nV: Tensor, size: int) -> Tensor:
        return logprobs_nV[:, :size].log_softmax(-1)

    def sum(self, x_nV: Tensor) -> Tensor:
        return x_nV.sum(-1)

    def pick(self, logprobs_nV: Tensor, ids_nK: Tensor) -> Tensor:
        return logprobs_nV.gather(1, ids_nK)

    def compute_rest(self, logprobs_nV: Tensor, ids_nK: Tensor) -> Tensor:
        return logprobs_nV.scatter(1, ids_nK, -torch.inf).logsumexp(-1)

    def find_top(self, logprobs_nV: Tensor, k: int) -> Tensor:
        return logprobs_nV.topk(k, dim=-1).indices

    def gather_all(self, logprobs_nV: Tensor, size: int) -> Tensor:
        return logprobs_nV


FULL_VOCABULARY = FullVocabulary()


@dataclass(frozen=True)
class Head:
    """A language head, which turns hidden states into log-probabilities.

    size: number of tokens in the vocabulary.
    chunk_rows: number of predictions whose logits exist at a time.
    matrix: the head's weight [V, d], if `logits` is just hidden @ matrix.T (no bias or soft cap)
      and the weight has the dtype in which losses are computed; else None.
    """

    logits: Logits
    size: int
    chunk_rows: int
    vocabulary: Vocabulary = FULL_VOCABULARY
    matrix: Tensor | None = None


def compute_token_columns(
    head: Head,
    hidden_Td: Tensor,
    batch: Batch,
    mask_T: Tensor,
    spec: TokenOutputSpec,
    state_index_T: Tensor | None = None,
) -> dict[str, Tensor]:
    """Return the columns that `spec` lists, by name.

    "logprobs" and "entropy" are [T], "topk_ids" [T, K], "topk_logprobs" [T, K + 1] (or [T, V], see
    `compute_topk_and_rest_logprobs`). They are computed at the tokens of the mask, under each row's
    temperature, and are 0 elsewhere. A row that was sampled greedily (temperature 0) is scored
    under temperature 1, as the sampler does. A token that was drawn under a grammar is scored among
    the tokens that the grammar allowed.

    mask_T: bool; in main memory it costs no wait for the device.
    state_index_T: row of each token's state in `hidden_Td`; None: the order of tokens.
    """
    index_n = upload(mask_T.nonzero()[:, 0], hidden_Td.device)
    temperature_S = torch.where(batch.temperature_S > 0, batch.temperature_S, 1.0)
    temperature_n = temperature_S[batch.sequence_T[index_n]]
    previous_n = index_n - 1  # The state of the previous token predicts a token.
    hidden_nd = hidden_Td.index_select(
        0, previous_n if state_index_T is None else state_index_T[previous_n]
    )
    targets_n = batch.tokens_T[index_n]
    ids_nK = (
        batch.need("teacher_ids")[index_n] if spec.needs_logprobs_at_ids else targets_n[:, None]
    )
    has_masks = batch.masks_MB is not None and len(batch.masks_MB) > 0
    allowed_n = batch.need(ALLOWED)[index_n] if has_masks else None
    columns: dict[str, Tensor] = {}
    for name, values_n in _compute_predictions(
        head, hidden_nd, targets_n, ids_nK, temperature_n, spec, allowed_n, batch.masks_MB
    ).items():
        columns[name] = values_n.new_zeros(batch.n_tokens, *values_n.shape[1:]).index_put(
            (index_n,), values_n
        )
    return columns


def _compute_predictions(
    head: Head,
    hidden_nd: Tensor,
    targets_n: Tensor,
    ids_nK: Tensor,
    temperature_n: Tensor,
    spec: TokenOutputSpec,
    allowed_n: Tensor | None,
    masks_MB: Tensor | None,
) -> dict[str, Tensor]:
    """Return the columns of the predictions, by name.

    allowed_n: row of `masks_MB` for each prediction, -1 for none; None: no prediction has a mask.
    """
    starts = range(0, max(1, len(hidden_nd)), head.chunk_rows)
    can_use_matrix = head.matrix is not None and allowed_n is None
    if len(starts) > 1 and can_use_matrix and spec.only_logprobs_need_gradient:
        assert head.matrix is not None
        inputs = (
            hidden_nd.to(head.matrix.dtype),
            head.matrix,
            targets_n,
            temperature_n.to(head.matrix.dtype),
        )
        # `PolicyModel.logits` disables autocast too, to keep float32.
        with torch.autocast(hidden_nd.device.type, enabled=False):
            outputs = compute_target_logprobs(
                *inputs, chunk_rows=head.chunk_rows, with_entropy=spec.needs_entropy
            )
        return dict(zip(spec.column_names, outputs, strict=False))
    chunks: list[tuple[Tensor, ...]] = []
    for start in starts:
        rows = slice(start, start + head.chunk_rows)
        arguments = (
            head,
            hidden_nd[rows],
            targets_n[rows],
            ids_nK[rows],
            temperature_n[rows],
            spec,
            None if allowed_n is None else allowed_n[rows],
            masks_MB,
        )
        if len(starts) > 1 and torch.is_grad_enabled():
            # The backward recomputes the logits of each chunk, which draw no random numbers.
            chunks.append(
                checkpoint(
                    _compute_chunk, *arguments, use_reentrant=False, preserve_rng_state=False
                )
            )
        else:
            chunks.append(_compute_chunk(*arguments))
    return {
        name: torch.cat([chunk[i] for chunk in chunks]) for i, name in enumerate(spec.column_names)
    }


def _compute_chunk(
    head: Head,
    hidden_nd: Tensor,
    targets_n: Tensor,
    ids_nK: Tensor,
    temperature_n: Tensor,
    spec: TokenOutputSpec,
    allowed_n: Tensor | None,
    masks_MB: Tensor | None,
) -> tuple[Tensor, ...]:
    """Return the columns of a chunk of predictions, in the order of `spec.column_names`."""
    vocabulary = head.vocabulary
    size = head.size
    logits_nV = head.logits(hidden_nd) / temperature_n[:, None]
    if allowed_n is not None and masks_MB is not None:
        allowed_nV = unpack_masks(masks_MB[allowed_n.clamp(min=0)], size)
        allowed_nV |= (allowed_n < 0)[:, None]
        logits_nV = logits_nV.masked_fill(~vocabulary.take_columns(allowed_nV), DISALLOWED)
    logprobs_nV = vocabulary.log_softmax(logits_nV)
    columns = [vocabulary.pick(logprobs_nV, targets_n[:, None])[:, 0]]
    if spec.needs_entropy:
        with nullcontext() if spec.has_entropy_gradient else torch.no_grad():
            columns.append(-vocabulary.sum(logprobs_nV.exp() * logprobs_nV))
    if not (spec.needs_logprobs_at_ids or spec.needs_top):
        return tuple(columns)
    if spec.shared_vocab is not None and spec.shared_vocab < size:
        size = spec.shared_vocab
        logprobs_nV = vocabulary.renormalise_first(logprobs_nV, size)
    if spec.needs_logprobs_at_ids:
        columns.append(compute_topk_and_rest_logprobs(vocabulary, logprobs_nV, ids_nK, size))
    elif 0 < spec.top_k < size:
        ids_nK = vocabulary.find_top(logprobs_nV, spec.top_k)
        columns.append(compute_topk_and_rest_logprobs(vocabulary, logprobs_nV, ids_nK, size))
    else:
        ids_nK = torch.arange(size, device=logprobs_nV.device).expand(len(logprobs_nV), size)
        columns.append(vocabulary.gather_all(logprobs_nV, size))
    return (*columns, ids_nK) if spec.needs_ids else tuple(columns)


def compute_topk_and_rest_logprobs(
    vocabulary: Vocabulary, logprobs_nV: Tensor, ids_nK: Tensor, size: int
) -> Tensor:
    """Return log p of K tokens and, in a last column, of any other token: [n, K + 1].

    If the K tokens are the whole vocabulary, there is no last column. The last column sums the
    probabilities of all tokens outside the K. For a sharp distribution, 1 minus the probability of
    the K tokens would be 0 in float32, and have no gradient.
    """
    chosen_nK = vocabulary.pick(logprobs_nV, ids_nK)
    if ids_nK.shape[1] == size:
        return chosen_nK
    return torch.cat([chosen_nK, vocabulary.compute_rest(logprobs_nV, ids_nK)[:, None]], dim=-1)


def compute_state_values(scalars_T: Tensor, mask_T: Tensor) -> Tensor:
    """Return the value of the state before each token of the mask, and 0 elsewhere. [T]

    It is the scalar head's output at the previous token. mask_T: as in `compute_token_columns`.
    """
    index_n = upload(mask_T.nonzero()[:, 0], scalars_T.device)
    return torch.zeros_like(scalars_T).index_put((index_n,), scalars_T[index_n - 1])


def select_sequence_scores(scalars_T: Tensor, batch: Batch) -> Tensor:
    """Return the scalar head's output at each sequence's last token. [S]"""
    return scalars_T[batch.starts_S + batch.lengths_S - 1]
