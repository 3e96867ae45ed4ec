"""Communication within a tensor-parallel group: hidden states, embeddings and logits.

T = tokens, d = hidden size, V = rows of the vocabulary on a rank, n = predictions, K = requested
tokens per prediction.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ratchet.models.parallel.collectives import (
    Group,
    all_reduce_max,
    gather,
    scatter_sum,
    sum_backward,
    sum_forward,
)
from ratchet.models.parallel.sharding import ShardIndex


class TensorParallelComm:
    """The communication of a decoder whose heads, MLPs and vocabulary are sharded over ranks."""

    def __init__(self, group: Group, rows: range, *, sequence: bool) -> None:
        """Create the communication of one rank.

        Args:
            rows: This rank's rows of the vocabulary.
            sequence: True for sequence parallelism (arXiv:2205.05198). Between tensor-parallel
                layers each rank then keeps only its share of the tokens, so that norms and their
                activations are sharded too.
        """
        self.group = group
        self.rows = rows
        self.sequence = sequence
        self.tokens = 0  # number of tokens of the current forward pass

    def begin(self, tokens: int) -> None:
        """Start a forward pass over this many tokens."""
        self.tokens = tokens

    def embed(self, tokens_T: Tensor, weight_Vd: Tensor) -> Tensor:
        """Return the embeddings of tokens, summed over ranks like in `leave`.

        weight_Vd: this rank's rows of the embedding matrix.
        """
        is_local_T = (tokens_T >= self.rows.start) & (tokens_T < self.rows.stop)
        x_Td = F.embedding((tokens_T - self.rows.start).where(is_local_T, 0), weight_Vd)
        return self.leave(x_Td * is_local_T[:, None])

    def enter(self, x: Tensor) -> Tensor:
        """Return the input of a tensor-parallel layer: the hidden states of all tokens."""
        return (
            gather(x, self.group)[: self.tokens] if self.sequence else sum_backward(x, self.group)
        )

    def leave(self, x: Tensor) -> Tensor:
        """Return the sum of the ranks' partial outputs.

        Under sequence parallelism the result has only this rank's tokens.
        """
        if not self.sequence:
            return sum_forward(x, self.group)
        padding = -len(x) % self.group.size()
        return scatter_sum(F.pad(x, (0, 0, 0, padding)), self.group)

    def finish(self, x: Tensor) -> Tensor:
        """Return the final hidden states of all tokens, the same on every rank."""
        return (
            gather(x, self.group, same_use_on_all_ranks=True)[: self.tokens].clone()
            if self.sequence
            else x
        )


class VocabParallelLogits:
    """A reader of logits whose vocabulary is sharded over the ranks of a group.

    It implements `ratchet.learners.compute.token_outputs.Vocabulary`. Only its method `gather_all`
    gathers the log-probabilities of the whole vocabulary.
    """

    def __init__(self, group: Group, size: int) -> None:
        """Create this rank's reader; `size` is the size of the whole vocabulary."""
        self.group, self.size = group, size
        self.rows = self._get_rows(group.rank(), size)

    def _get_rows(self, rank: int, size: int) -> range:
        """Return the token ids below `size` whose logits are on a rank."""
        rows = ShardIndex(rank, self.group.size()).range(self.size)
        return range(min(rows.start, size), min(rows.stop, size))

    def take_columns(self, x_nV: Tensor) -> Tensor:
        return x_nV[:, self.rows.start : self.rows.stop]

    def log_softmax(self, logits_nV: Tensor) -> Tensor:
        # Each rank subtracts the normaliser from its own part of the vocabulary, so the gradients
        # of the normaliser must be summed over the ranks.
        return logits_nV - sum_backward(self._logsumexp(logits_nV), self.group)[:, None]

    def renormalise_first(self, all_nV: Tensor, size: int) -> Tensor:
        return self.log_softmax(all_nV[:, : len(self._get_rows(self.group.rank(), size))])

    def sum(self, x_nV: Tensor) -> Tensor:
        return sum_forward(x_nV.sum(-1), self.group)

    def pick(self, all_nV: Tensor, ids_nK: Tensor) -> Tensor:
        is_local_nK, row_nK = self._locate(ids_nK, all_nV)
        # A rank without rows must take part in the collective too.
        if not all_nV.shape[1]:
            return sum_forward(all_nV.sum() * all_nV.new_zeros(ids_nK.shape), self.group)
        return sum_forward(all_nV.gather(1, row_nK).where(is_local_nK, 0.0), self.group)

    def compute_rest(self, all_nV: Tensor, ids_nK: Tensor) -> Tensor:
        is_local_nK, row_nK = self._locate(ids_nK, all_nV)
        if all_nV.shape[1]:
            chosen_nV = torch.zeros_like(all_nV).scatter_add(
                1, row_nK, is_local_nK.to(all_nV.dtype)
            )
            all_nV = all_nV.masked_fill(chosen_nV > 0, -torch.inf)
        return self._logsumexp(all_nV)

    def find_top(self, all_nV: Tensor, k: int) -> Tensor:
        """Return the ids of the k largest logits, chosen from the k largest of each rank."""
        values_nk, ids_nk = all_nV.detach().topk(min(k, all_nV.shape[1]), dim=-1)
        padding = (0, k - values_nk.shape[1])
        values_nk = F.pad(values_nk, padding, value=-torch.inf)
        ids_nk = F.pad(ids_nk + self.rows.start, padding)
        values_nK, ids_nK = (gather(x.T, self.group).T for x in (values_nk, ids_nk))
        return ids_nK.gather(1, values_nK.topk(k, dim=-1).indices)

    def gather_all(self, all_nV: Tensor, size: int) -> Tensor:
        widths = [len(self._get_rows(rank, size)) for rank in range(self.group.size())]
        widest = max(widths)
        padded_nV = F.pad(all_nV, (0, widest - all_nV.shape[1]))
        parts = gather(padded_nV.T, self.group, same_use_on_all_ranks=True).split(widest)
        return torch.cat([part[:width] for part, width in zip(parts, widths, strict=True)]).T

    def _logsumexp(self, x_nV: Tensor) -> Tensor:
        max_n = x_nV.detach().amax(-1) if x_nV.shape[1] else x_nV.new_full((len(x_nV),), -torch.inf)
        max_n = all_reduce_max(max_n, self.group)
        return self.sum((x_nV - max_n[:, None]).exp()).log() + max_n

    def _locate(self, ids_nK: Tensor, all_nV: Tensor) -> tuple[Tensor, Tensor]:
        """Return (True for each id that is on this rank; the id's row on this rank, or 0)."""
        row_nK = ids_nK - self.rows.start
        is_local_nK = (row_nK >= 0) & (row_nK < all_nV.shape[1])
        return is_local_nK, row_nK.where(is_local_nK, 0)
