"""From hidden states to the columns that losses read, in float32 and in chunks, so that [T, V] never exists whole.

T = tokens of a micro-batch, n = those whose prediction is asked for (only they need logits), d = hidden size, V = vocabulary,
K = columns of likeliest tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ratchet.batch import Batch

Logits = Callable[[Tensor], Tensor]  # [n, d] -> [n, V], float32 or better
SCALARS = frozenset({"values", "scores", "token_scores"})  # columns that a scalar head gives


@dataclass(frozen=True)
class Wanted:
    """What to compute of each prediction: beside the token's own log-probability its entropy, the log-probabilities of given
    tokens (ids [n, K]), or those of the top_k likeliest ones (0: of all, in order), with their ids where they are asked for.

    shared: these are of the first so many tokens alone, renormalised; None: of all that the model has. entropy_slope: whether
    the entropy is differentiated; one that is only measured keeps nothing for the backward."""

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
        """given_ids: the batch says which tokens. measured: those of the names that nothing is differentiated by."""
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
    def names(self) -> tuple[str, ...]:
        wanted = {"entropy": self.entropy, "topk_logprobs": self.of_ids or self.top, "topk_ids": self.ids}
        return ("logprobs", *(name for name, here in wanted.items() if here))


def token_columns(
    logits: Logits, hidden_Td: Tensor, batch: Batch, mask_T: Tensor, wanted: Wanted, *, chunk_rows: int
) -> dict[str, Tensor]:
    """ "logprobs" [T], and "entropy" [T], "topk_ids" [T, K] and "topk_logprobs" [T, K + 1] (or [T, V], see `outcomes`) as
    wanted, at the tokens of the mask under each row's temperature; 0 elsewhere. Given ids are the batch's `teacher_ids`.

    A row sampled greedily (temperature 0) is scored under temperature 1, as its sampler recorded it.
    """
    index_n = mask_T.nonzero()[:, 0]
    temperature_S = torch.where(batch.temperature_S > 0, batch.temperature_S, 1.0)
    temperature_n = temperature_S[batch.sequence_T[index_n]]
    hidden_nd = hidden_Td.index_select(0, index_n - 1)  # what predicts token t is one place earlier
    targets_n = batch.tokens_T[index_n]
    ids_nK = batch.need("teacher_ids")[index_n] if wanted.of_ids else targets_n[:, None]
    parts: list[tuple[Tensor, ...]] = []
    bounds = range(0, max(1, len(index_n)), chunk_rows)
    for start in bounds:
        rows = slice(start, start + chunk_rows)
        arguments = (logits, hidden_nd[rows], targets_n[rows], ids_nK[rows], temperature_n[rows], wanted)
        if len(bounds) > 1 and torch.is_grad_enabled():
            parts.append(checkpoint(_chunk, *arguments, use_reentrant=False))  # logits are recomputed in the backward
        else:
            parts.append(_chunk(*arguments))
    columns: dict[str, Tensor] = {}
    for position, name in enumerate(wanted.names):
        values_n = torch.cat([part[position] for part in parts])
        columns[name] = values_n.new_zeros(batch.n_tokens, *values_n.shape[1:]).index_put((index_n,), values_n)
    return columns


def _chunk(
    logits: Logits, hidden_nd: Tensor, targets_n: Tensor, ids_nK: Tensor, temperature_n: Tensor, wanted: Wanted
) -> tuple[Tensor, ...]:
    all_nV = (logits(hidden_nd) / temperature_n[:, None]).log_softmax(-1)
    columns = [all_nV.gather(1, targets_n[:, None])[:, 0]]
    if wanted.entropy:
        with nullcontext() if wanted.entropy_slope else torch.no_grad():
            columns.append(-(all_nV.exp() * all_nV).sum(-1))
    if not (wanted.of_ids or wanted.top):
        return tuple(columns)
    if wanted.shared is not None and wanted.shared < all_nV.shape[1]:
        all_nV = all_nV[:, : wanted.shared].log_softmax(-1)
    if wanted.of_ids:
        columns.append(outcomes(all_nV, ids_nK))
    elif 0 < wanted.top_k < all_nV.shape[1]:
        ids_nK = all_nV.topk(wanted.top_k, dim=-1).indices
        columns.append(outcomes(all_nV, ids_nK))
    else:
        ids_nK = torch.arange(all_nV.shape[1], device=all_nV.device).expand(all_nV.shape)
        columns.append(all_nV)
    return (*columns, ids_nK) if wanted.ids else tuple(columns)


def outcomes(all_nV: Tensor, ids_nK: Tensor) -> Tensor:
    """log p of K tokens and, unless they are all, of "any other" in a last column. That one is summed up, not taken as what the
    others leave of 1: of a sharp distribution nothing would be left in float32, and its gradient would be gone."""
    chosen_nK = all_nV.gather(1, ids_nK)
    if ids_nK.shape[1] == all_nV.shape[1]:
        return chosen_nK
    rest_n = all_nV.scatter(1, ids_nK, -torch.inf).logsumexp(-1)
    return torch.cat([chosen_nK, rest_n[:, None]], dim=-1)


def state_values(scalars_T: Tensor, mask_T: Tensor) -> Tensor:
    """Value of the state in which each token of the mask is chosen: the scalar head one token earlier; 0 elsewhere. [T]"""
    index_n = mask_T.nonzero()[:, 0]
    return torch.zeros_like(scalars_T).index_put((index_n,), scalars_T[index_n - 1])


def sequence_scores(scalars_T: Tensor, batch: Batch) -> Tensor:
    """The scalar head at each sequence's last token. [S]"""
    return scalars_T[batch.starts_S + batch.lengths_S - 1]
