"""From hidden states to the columns that losses read, in float32 and in chunks, so that [T, V]
never exists whole.

T = tokens of a micro-batch, n = those whose prediction is asked for (only they need logits), d =
hidden size, V = vocabulary, K = columns of likeliest tokens.
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
from ratchet.learners.compute.chunked_logprobs import picked_logprobs

Logits = Callable[[Tensor], Tensor]  # [n, d] -> [n, V], float32 or better
SCALARS = frozenset({"values", "scores", "token_scores"})  # columns that a scalar head gives


@dataclass(frozen=True)
class Wanted:
    """What to compute of each prediction: beside the token's own log-probability its entropy, the
    log-probabilities of given tokens (ids [n, K]), or those of the top_k likeliest ones (0: of all,
    in order), with their ids where they are asked for.

    shared: these are of the first so many tokens alone, renormalised; None: of all that the model
    has. entropy_slope: whether the entropy is differentiated; one that is only measured keeps
    nothing for the backward."""

    entropy: bool = False
    of_ids: bool = False
    top: bool = False
    ids: bool = False
    top_k: int = 0
    shared: int | None = None
    entropy_slope: bool = True

    @classmethod
    def among(
        cls,
        names: Collection[str],
        *,
        given_ids: bool = False,
        top_k: int = 0,
        shared: int | None = None,
        measured: Collection[str] = (),
    ) -> Wanted:
        """given_ids: the batch says which tokens. measured: those of the names that nothing is
        differentiated by."""
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
    def plain(self) -> bool:
        """Whether nothing but the tokens' own log-probabilities is differentiated, and no other is
        read."""
        return not (self.of_ids or self.top or (self.entropy and self.entropy_slope))

    @property
    def names(self) -> tuple[str, ...]:
        wanted = {
            "entropy": self.entropy,
            "topk_logprobs": self.of_ids or self.top,
            "topk_ids": self.ids,
        }
        return ("logprobs", *(name for name, here in wanted.items() if here))


class Vocabulary(Protocol):
    """How log-probabilities [n, V] are read, wherever those of each token lie: V may be a rank's
    part of the vocabulary."""

    def log_softmax(self, logits_nV: Tensor) -> Tensor: ...
    def first(self, all_nV: Tensor, size: int) -> Tensor:
        """Of the first `size` tokens alone, renormalised."""
        ...

    def sum(self, x_nV: Tensor) -> Tensor: ...
    def pick(self, all_nV: Tensor, ids_nK: Tensor) -> Tensor:
        """[n, K]"""
        ...

    def rest(self, all_nV: Tensor, ids_nK: Tensor) -> Tensor:
        """log of what all tokens but these have together: [n]."""
        ...

    def top(self, all_nV: Tensor, k: int) -> Tensor:
        """int64 ids [n, k] of the likeliest, in descending order."""
        ...

    def whole(self, all_nV: Tensor, size: int) -> Tensor:
        """Of all `size` tokens, in order."""
        ...


class OneVocabulary:
    """All tokens' logits are here."""

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


ONE_VOCABULARY = OneVocabulary()


@dataclass(frozen=True)
class Head:
    """What turns hidden states into log-probabilities. size: tokens of the vocabulary. chunk_rows:
    predictions whose logits exist at a time. matrix: [V, d], where a product with it is all that
    `logits` does, in the dtype of losses; or None."""

    logits: Logits
    size: int
    chunk_rows: int
    vocabulary: Vocabulary = ONE_VOCABULARY
    matrix: Tensor | None = None


def token_columns(
    head: Head,
    hidden_Td: Tensor,
    batch: Batch,
    mask_T: Tensor,
    wanted: Wanted,
    place_T: Tensor | None = None,
) -> dict[str, Tensor]:
    """ "logprobs" [T], and "entropy" [T], "topk_ids" [T, K] and "topk_logprobs" [T, K + 1] (or [T,
     V], see `outcomes`) as
    wanted, at the tokens of the mask under each row's temperature; 0 elsewhere. Given ids are the
    batch's `teacher_ids`.

    A row sampled greedily (temperature 0) is scored under temperature 1, as its sampler recorded
    it. place_T: where the hidden state of each token lies; None: in the order of tokens.
    """
    index_n = mask_T.nonzero()[:, 0]
    temperature_S = torch.where(batch.temperature_S > 0, batch.temperature_S, 1.0)
    temperature_n = temperature_S[batch.sequence_T[index_n]]
    before_n = index_n - 1  # what predicts token t is one place earlier
    hidden_nd = hidden_Td.index_select(0, before_n if place_T is None else place_T[before_n])
    targets_n = batch.tokens_T[index_n]
    ids_nK = batch.need("teacher_ids")[index_n] if wanted.of_ids else targets_n[:, None]
    columns: dict[str, Tensor] = {}
    for name, values_n in _predicted(
        head, hidden_nd, targets_n, ids_nK, temperature_n, wanted
    ).items():
        columns[name] = values_n.new_zeros(batch.n_tokens, *values_n.shape[1:]).index_put(
            (index_n,), values_n
        )
    return columns


def _predicted(
    head: Head,
    hidden_nd: Tensor,
    targets_n: Tensor,
    ids_nK: Tensor,
    temperature_n: Tensor,
    wanted: Wanted,
) -> dict[str, Tensor]:
    """Of each prediction, by name."""
    bounds = range(0, max(1, len(hidden_nd)), head.chunk_rows)
    if len(bounds) > 1 and head.matrix is not None and wanted.plain:
        given = (
            hidden_nd.to(head.matrix.dtype),
            head.matrix,
            targets_n,
            temperature_n.to(head.matrix.dtype),
        )
        with torch.autocast(hidden_nd.device.type, enabled=False):  # as `PolicyModel.logits`
            picked = picked_logprobs(*given, rows=head.chunk_rows, entropy=wanted.entropy)
        return dict(zip(wanted.names, picked, strict=False))
    parts: list[tuple[Tensor, ...]] = []
    for start in bounds:
        rows = slice(start, start + head.chunk_rows)
        arguments = (
            head,
            hidden_nd[rows],
            targets_n[rows],
            ids_nK[rows],
            temperature_n[rows],
            wanted,
        )
        if len(bounds) > 1 and torch.is_grad_enabled():
            # logits are recomputed in the backward
            parts.append(checkpoint(_chunk, *arguments, use_reentrant=False))
        else:
            parts.append(_chunk(*arguments))
    return {name: torch.cat([part[i] for part in parts]) for i, name in enumerate(wanted.names)}


def _chunk(
    head: Head,
    hidden_nd: Tensor,
    targets_n: Tensor,
    ids_nK: Tensor,
    temperature_n: Tensor,
    wanted: Wanted,
) -> tuple[Tensor, ...]:
    vocabulary, size = head.vocabulary, head.size
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
        columns.append(outcomes(vocabulary, all_nV, ids_nK, size))
    elif 0 < wanted.top_k < size:
        ids_nK = vocabulary.top(all_nV, wanted.top_k)
        columns.append(outcomes(vocabulary, all_nV, ids_nK, size))
    else:
        ids_nK = torch.arange(size, device=all_nV.device).expand(len(all_nV), size)
        columns.append(vocabulary.whole(all_nV, size))
    return (*columns, ids_nK) if wanted.ids else tuple(columns)


def outcomes(vocabulary: Vocabulary, all_nV: Tensor, ids_nK: Tensor, size: int) -> Tensor:
    """log p of K tokens and, unless they are all, of "any other" in a last column. That one is
    summed up, not taken as what the others leave of 1: of a sharp distribution nothing would be
    left in float32, and its gradient would be gone."""
    chosen_nK = vocabulary.pick(all_nV, ids_nK)
    if ids_nK.shape[1] == size:
        return chosen_nK
    return torch.cat([chosen_nK, vocabulary.rest(all_nV, ids_nK)[:, None]], dim=-1)


def state_values(scalars_T: Tensor, mask_T: Tensor) -> Tensor:
    """Value of the state in which each token of the mask is chosen: the scalar head one token
    earlier; 0 elsewhere. [T]"""
    index_n = mask_T.nonzero()[:, 0]
    return torch.zeros_like(scalars_T).index_put((index_n,), scalars_T[index_n - 1])


def sequence_scores(scalars_T: Tensor, batch: Batch) -> Tensor:
    """The scalar head at each sequence's last token. [S]"""
    return scalars_T[batch.starts_S + batch.lengths_S - 1]
