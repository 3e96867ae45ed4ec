"""Compute the columns that losses read, such as log-probabilities, from hidden states.

They are computed in float32 and in chunks: [T, V] never exists whole. T = tokens of a
micro-batch, S = its sequences, n = predicted tokens (only these need logits), d = hidden size,
V = vocabulary, K = tokens for which a prediction's log-probabilities are returned.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ratchet.batch import Batch
from ratchet.learners.compute.chunked_logprobs import compute_target_logprobs

Logits = Callable[[Tensor], Tensor]  # [n, d] -> [n, V], float32 or better
# Columns that a scalar head computes.
SCALARS = frozenset({"values", "scores", "token_scores"})


@dataclass(frozen=True)
class TokenOutputSpec:
    """The outputs to compute for each prediction, besides its target's log-probability.

    entropy: the prediction's entropy.
    of_ids: log-probabilities of given tokens (ids [n, K]).
    top: log-probabilities of the top_k likeliest tokens (0: of all, in order).
    ids: the ids of these tokens too.
    shared: size of the first part of the vocabulary over which `of_ids` and `top` renormalise;
      None: the whole vocabulary.
    entropy_slope: False if the entropy needs no gradient, which saves memory for the backward.
    """

    entropy: bool = False
    of_ids: bool = False
    top: bool = False
    ids: bool = False
    top_k: int = 0
    shared: int | None = None
    entropy_slope: bool = True

    @classmethod
    def from_names(
        cls,
        names: Collection[str],
        *,
        given_ids: bool = False,
        top_k: int = 0,
        shared: int | None = None,
        measured: Collection[str] = (),
    ) -> TokenOutputSpec:
        """Return the outputs that the columns of these names need.

        given_ids: True if the batch holds the ids whose log-probabilities to return.
        measured: names of the columns that need no gradient.
        """
        top = "topk_logprobs" in names or "topk_ids" in names
        return cls(
            "entropy" in names,
            of_ids=top and given_ids,
            top=top and not given_ids,
            ids="topk_ids" in names and not given_ids,
            top_k=top_k,
            shared=shared,
            entropy_slope="entropy" not in measured,
        )

    @property
    def is_logprobs_only(self) -> bool:
        """True if only the targets' log-probabilities need a gradient, and no others are read."""
        return not (self.of_ids or self.top or (self.entropy and self.entropy_slope))

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the columns, in the order of the outputs."""
        is_wanted = {
            "entropy": self.entropy,
            "topk_logprobs": self.of_ids or self.top,
            "topk_ids": self.ids,
        }
        return ("logprobs", *(name for name, wanted in is_wanted.items() if wanted))


class Vocabulary(Protocol):
    """A reader of log-probabilities [n, V] whose columns may be spread over ranks.

    V may be this rank's part of the vocabulary.
    """

    def log_softmax(self, logits_nV: Tensor) -> Tensor: ...
    def first(self, all_nV: Tensor, size: int) -> Tensor:
        """Return the log-probabilities of the first `size` tokens, renormalised over these."""
        ...

    def sum(self, x_nV: Tensor) -> Tensor: ...
    def pick(self, all_nV: Tensor, ids_nK: Tensor) -> Tensor:
        """Return the log-probabilities of the ids, [n, K]."""
        ...

    def rest(self, all_nV: Tensor, ids_nK: Tensor) -> Tensor:
        """Return the log of the total probability of all other tokens, [n]."""
        ...

    def top(self, all_nV: Tensor, k: int) -> Tensor:
        """Return the ids of the k likeliest tokens in descending order, int64 [n, k]."""
        ...

    def whole(self, all_nV: Tensor, size: int) -> Tensor:
        """Return the log-probabilities of all `size` tokens, in order."""
        ...


class FullVocabulary:
    """A vocabulary whose log-probabilities are all on this rank."""

    def log_softmax(self, logits_nV: Tensor) -> Tensor:
        return logits_nV.log_softmax(-1)

    def first(self, all_nV: Tensor, size: int) -> Tensor:
        return all_nV[:, :size].log_softmax(-1)

    def sum(self, x_nV: Tensor) -> Tensor:
        return x_nV.sum(-1)

    def pick(self, all_nV: Tensor, ids_nK: Tensor) -> Tensor:
        return all_nV.gather(1, ids_nK)

    def rest(self, all_nV: Tensor, ids_nK: Tensor) -> Tensor:
        return all_nV.scatter(1, ids_nK, -torch.inf).logsumexp(-1)

    def top(self, all_nV: Tensor, k: int) -> Tensor:
        return all_nV.topk(k, dim=-1).indices

    def whole(self, all_nV: Tensor, size: int) -> Tensor:
        return all_nV


FULL_VOCABULARY = FullVocabulary()


@dataclass(frozen=True)
class Head:
    """A language head, which turns hidden states into log-probabilities.

    size: number of tokens in the vocabulary.
    chunk_rows: number of predictions whose logits exist at a time.
    matrix: [V, d] in the dtype of losses, if `logits` only multiplies by it; else None.
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
    wanted: TokenOutputSpec,
    place_T: Tensor | None = None,
) -> dict[str, Tensor]:
    """Return those of the columns "logprobs", "entropy", "topk_ids", "topk_logprobs" in `wanted`.

    "logprobs" and "entropy" are [T], "topk_ids" [T, K], "topk_logprobs" [T, K + 1] (or [T, V], see
    `compute_outcome_logprobs`). They are computed at the tokens of the mask under each row's
    temperature, and are 0 elsewhere. `wanted.of_ids` reads the batch's `teacher_ids`. A row sampled
    greedily (temperature 0) is scored under temperature 1, as its sampler recorded it.

    place_T: row of each token's state in `hidden_Td`; None: the order of tokens.
    """
    index_n = mask_T.nonzero()[:, 0]
    temperature_S = torch.where(batch.temperature_S > 0, batch.temperature_S, 1.0)
    temperature_n = temperature_S[batch.sequence_T[index_n]]
    before_n = index_n - 1  # The state one position earlier predicts token t.
    hidden_nd = hidden_Td.index_select(0, before_n if place_T is None else place_T[before_n])
    targets_n = batch.tokens_T[index_n]
    ids_nK = batch.need("teacher_ids")[index_n] if wanted.of_ids else targets_n[:, None]
    columns: dict[str, Tensor] = {}
    for name, values_n in _compute_predictions(
        head, hidden_nd, targets_n, ids_nK, temperature_n, wanted
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
    wanted: TokenOutputSpec,
) -> dict[str, Tensor]:
    """Return the columns of the predictions, by name."""
    starts = range(0, max(1, len(hidden_nd)), head.chunk_rows)
    if len(starts) > 1 and head.matrix is not None and wanted.is_logprobs_only:
        inputs = (
            hidden_nd.to(head.matrix.dtype),
            head.matrix,
            targets_n,
            temperature_n.to(head.matrix.dtype),
        )
        # `PolicyModel.logits` disables autocast too, to keep float32.
        with torch.autocast(hidden_nd.device.type, enabled=False):
            outputs = compute_target_logprobs(*inputs, rows=head.chunk_rows, entropy=wanted.entropy)
        return dict(zip(wanted.names, outputs, strict=False))
    chunks: list[tuple[Tensor, ...]] = []
    for start in starts:
        rows = slice(start, start + head.chunk_rows)
        arguments = (
            head,
            hidden_nd[rows],
            targets_n[rows],
            ids_nK[rows],
            temperature_n[rows],
            wanted,
        )
        if len(starts) > 1 and torch.is_grad_enabled():
            # The backward recomputes the logits of each chunk.
            chunks.append(checkpoint(_compute_chunk, *arguments, use_reentrant=False))
        else:
            chunks.append(_compute_chunk(*arguments))
    return {name: torch.cat([chunk[i] for chunk in chunks]) for i, name in enumerate(wanted.names)}


def _compute_chunk(
    head: Head,
    hidden_nd: Tensor,
    targets_n: Tensor,
    ids_nK: Tensor,
    temperature_n: Tensor,
    wanted: TokenOutputSpec,
) -> tuple[Tensor, ...]:
    """Return the columns of a chunk of predictions, in the order of `wanted.names`."""
    vocabulary = head.vocabulary
    size = head.size
    all_nV = vocabulary.log_softmax(head.logits(hidden_nd) / temperature_n[:, None])
    columns = [vocabulary.pick(all_nV, targets_n[:, None])[:, 0]]
    if wanted.entropy:
        with nullcontext() if wanted.entropy_slope else torch.no_grad():
            columns.append(-vocabulary.sum(all_nV.exp() * all_nV))
    if not (wanted.of_ids or wanted.top):
        return tuple(columns)
    if wanted.shared is not None and wanted.shared < size:
        size = wanted.shared
        all_nV = vocabulary.first(all_nV, size)
    if wanted.of_ids:
        columns.append(compute_outcome_logprobs(vocabulary, all_nV, ids_nK, size))
    elif 0 < wanted.top_k < size:
        ids_nK = vocabulary.top(all_nV, wanted.top_k)
        columns.append(compute_outcome_logprobs(vocabulary, all_nV, ids_nK, size))
    else:
        ids_nK = torch.arange(size, device=all_nV.device).expand(len(all_nV), size)
        columns.append(vocabulary.whole(all_nV, size))
    return (*columns, ids_nK) if wanted.ids else tuple(columns)


def compute_outcome_logprobs(
    vocabulary: Vocabulary, all_nV: Tensor, ids_nK: Tensor, size: int
) -> Tensor:
    """Return log p of K tokens and, unless they are all tokens, of "any other" in a last column.

    The probability of "any other" is a sum over the other tokens. 1 minus that of the K tokens
    would be 0 in float32 for a sharp distribution, without a gradient.
    """
    chosen_nK = vocabulary.pick(all_nV, ids_nK)
    if ids_nK.shape[1] == size:
        return chosen_nK
    return torch.cat([chosen_nK, vocabulary.rest(all_nV, ids_nK)[:, None]], dim=-1)


def compute_state_values(scalars_T: Tensor, mask_T: Tensor) -> Tensor:
    """Return the value of the state before each token of the mask, 0 elsewhere. [T]

    It is the scalar head's output one token earlier.
    """
    index_n = mask_T.nonzero()[:, 0]
    return torch.zeros_like(scalars_T).index_put((index_n,), scalars_T[index_n - 1])


def select_sequence_scores(scalars_T: Tensor, batch: Batch) -> Tensor:
    """Return the scalar head's output at each sequence's last token. [S]"""
    return scalars_T[batch.starts_S + batch.lengths_S - 1]
