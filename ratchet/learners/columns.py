"""From hidden states to the columns that losses read, in float32 and in chunks, so that [T, V] never exists whole.

T = tokens of a micro-batch, n = those that train (only their predictions need logits), d = hidden size, V = vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ratchet.batch import Batch

Logits = Callable[[Tensor], Tensor]  # [n, d] -> [n, V], float32 or better


def predicted_tokens(batch: Batch) -> Tensor:
    """Flat indices t of the trainable tokens, int64 [n]; the hidden state that predicts token t is at t - 1."""
    return batch.trainable_T.nonzero()[:, 0]


def token_columns(
    logits: Logits, hidden_Td: Tensor, batch: Batch, wanted: Collection[str], *, chunk_rows: int
) -> dict[str, Tensor]:
    """ "logprobs" and "entropy" [T] as wanted, 0 where a token does not train, under each row's temperature.

    A row sampled greedily (temperature 0) is scored under temperature 1, as its sampler recorded it.
    """
    index_n = predicted_tokens(batch)
    temperature_S = torch.where(batch.temperature_S > 0, batch.temperature_S, 1.0)
    temperature_n = temperature_S[batch.sequence_T[index_n]]
    hidden_nd = hidden_Td[index_n - 1]
    targets_n = batch.tokens_T[index_n]
    wants_entropy = "entropy" in wanted
    parts: list[tuple[Tensor, ...]] = []
    bounds = range(0, len(index_n), chunk_rows)
    for start in bounds:
        rows = slice(start, start + chunk_rows)
        arguments = (logits, hidden_nd[rows], targets_n[rows], temperature_n[rows], wants_entropy)
        if len(bounds) > 1 and torch.is_grad_enabled():
            parts.append(checkpoint(_chunk, *arguments, use_reentrant=False))  # logits are recomputed in the backward
        else:
            parts.append(_chunk(*arguments))
    names = ("logprobs", "entropy") if wants_entropy else ("logprobs",)
    columns: dict[str, Tensor] = {}
    for position, name in enumerate(names):
        values_n = torch.cat([part[position] for part in parts]) if parts else hidden_nd.new_zeros(0)
        columns[name] = values_n.new_zeros(batch.n_tokens).index_put((index_n,), values_n)
    return columns


def _chunk(logits: Logits, hidden_nd: Tensor, targets_n: Tensor, temperature_n: Tensor, entropy: bool) -> tuple[Tensor, ...]:
    scaled_nV = logits(hidden_nd) / temperature_n[:, None]
    logprobs_n = -F.cross_entropy(scaled_nV, targets_n, reduction="none")
    if not entropy:
        return (logprobs_n,)
    all_nV = scaled_nV.log_softmax(-1)
    return logprobs_n, -(all_nV.exp() * all_nV).sum(-1)


def state_values(scalars_T: Tensor, batch: Batch) -> Tensor:
    """Value of the state in which each trainable token is chosen: the scalar head one token earlier; 0 elsewhere. [T]"""
    index_n = predicted_tokens(batch)
    return scalars_T.new_zeros(batch.n_tokens).index_put((index_n,), scalars_T[index_n - 1])


def sequence_scores(scalars_T: Tensor, batch: Batch) -> Tensor:
    """The scalar head at each sequence's last token. [S]"""
    return scalars_T[batch.starts_S + batch.lengths_S - 1]
