"""Build the decoder's inputs from packed sequences, with shared prefixes computed once.

A token is "read" if the caller uses its final hidden state.

T = tokens of packed sequences laid end to end, U = tokens that are computed, S = sequences, d =
hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ratchet.models.decoder import AttentionFn
from ratchet.models.layers.attention import PackedAttention, TreeAttention
from ratchet.models.layers.expert_routing import Routing
from ratchet.models.layers.prefix_tree import PrefixTree, compute_path_keys

# The number of tokens kept after the first read one is rounded up to a multiple of this: on a CPU,
# attention over 31 tokens takes longer than over 32.
STRIDE = 8
# Sharing prefixes and skipping final states have a cost, so each is done only if at most this share
# of the tokens or states remains.
WORTH = 0.9


@dataclass(frozen=True)
class PackedInputs:
    """The decoder's inputs for packed sequences: the computed tokens, in the order of `attend`."""

    tokens_U: Tensor
    positions_U: Tensor
    attend: AttentionFn
    # int64: index of each of the T tokens among the computed states; None: U = T, in order
    back_T: Tensor | None = None
    routing: Routing | None = None
    seed: int | None = None  # of adapter dropout, if sent with the inputs
    # int64: indices of the tokens whose final states are computed, which `back_T` then refers to;
    # None: all
    read_U: Tensor | None = None

    def unfold(self, hidden_Ud: Tensor) -> Tensor:
        """Return the hidden states of all tokens in their original order [T, d]."""
        return hidden_Ud if self.back_T is None else hidden_Ud.index_select(0, self.back_T)

    def padded(self, tokens: int) -> PackedInputs:
        """Return the inputs padded at the end to `tokens` tokens; the padding is never read."""
        n_real = len(self.tokens_U)
        if n_real == tokens:
            return self
        padding = (0, tokens - n_real)
        return replace(
            self,
            tokens_U=F.pad(self.tokens_U, padding),
            positions_U=F.pad(self.positions_U, padding),
            attend=PaddedAttention(self.attend, n_real),
            routing=None if self.routing is None else self.routing.padded(tokens),
        )


@dataclass(frozen=True)
class PaddedAttention:
    """An `attend` that ignores padding at the end; its output there is 0."""

    attend: AttentionFn  # of the tokens before the padding
    tokens: int  # number of tokens before the padding

    def __call__(self, layer: int, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor) -> Tensor:
        out = self.attend(layer, q_THD[: self.tokens], k_TKD[: self.tokens], v_TKD[: self.tokens])
        return F.pad(out, (0, 0, 0, 0, 0, len(q_THD) - self.tokens))


def pack_inputs(
    tokens_T: Tensor,
    positions_T: Tensor,
    lengths: Sequence[int],
    routing: Routing | None = None,
    *,
    shares: bool = True,
) -> PackedInputs:
    """Return the decoder's inputs for packed sequences.

    Args:
        lengths: tokens of each sequence, each at least 1; they sum to T.
        routing: expert routing of the T tokens.
        shares: True if prefixes that sequences share are computed once.
    """
    assert sum(lengths) == len(tokens_T), (
        f"{sum(lengths)} tokens in `lengths`, {len(tokens_T)} in `tokens_T`"
    )
    if len(lengths) > 1 and shares:
        replayed_TLK = None if routing is None else routing.replayed_TLK
        tree = PrefixTree.from_sequences(compute_path_keys(tokens_T, replayed_TLK), lengths)
        if len(tree.tokens_U) <= WORTH * len(tokens_T):
            return _shared(tokens_T, positions_T, tree, routing)
    ascending = sorted(lengths)
    attend = PackedAttention(ascending, tokens_T.device)
    if ascending == list(lengths):
        return PackedInputs(tokens_T, positions_T, attend, routing=routing)
    # Consecutive sequences of similar length share an attention call: sort by length once, not in
    # every layer.
    order_T, inverse_T = (index.to(tokens_T.device) for index in _by_length(lengths))
    return _reordered(tokens_T, positions_T, attend, order_T, inverse_T, routing)


def pack_read_inputs(
    tokens_T: Tensor,
    positions_T: Tensor,
    lengths: Sequence[int],
    read_T: Tensor,
    *,
    shares: bool = True,
) -> PackedInputs:
    """Return the decoder's inputs if only some final states are read.

    Tokens after a sequence's last read one are not computed, but for rounding up to `STRIDE`. Of
    unread tokens before it, the last layer computes only keys and values. `unfold` returns
    arbitrary read states in the places of unread ones.

    Args:
        read_T: bool, True for tokens whose final states are read, at least one.
    """
    kept_T, kept_S = _select_computed(lengths, read_T)
    kept_T = kept_T.to(tokens_T.device)
    feed = pack_inputs(tokens_T[kept_T], positions_T[kept_T], kept_S, shares=shares)
    back_T = kept_T.cumsum(0) - 1  # a token that is left out maps to the kept one before it
    if feed.back_T is not None:
        back_T = feed.back_T[back_T]
    read_U = torch.zeros(len(feed.tokens_U), dtype=torch.bool, device=back_T.device)
    read_U[back_T[read_T]] = True
    index_U = read_U.nonzero()[:, 0]
    if len(index_U) > WORTH * len(read_U):
        return feed if kept_T.all() else replace(feed, back_T=back_T)
    return replace(feed, back_T=(read_U.cumsum(0) - 1).clamp_(min=0)[back_T], read_U=index_U)


def _select_computed(lengths: Sequence[int], read_T: Tensor) -> tuple[Tensor, list[int]]:
    """Select the tokens to compute: each sequence up to its last read token, at least one token.

    The number of tokens after the first read one is rounded up to a multiple of `STRIDE`.

    Returns (mask of the kept tokens, bool [T]; number of kept tokens of each sequence).
    """
    lengths_S = np.asarray(lengths, dtype=np.int64)
    read = read_T.cpu().numpy()
    places_T = np.arange(len(read_T))
    starts_S = np.cumsum(lengths_S) - lengths_S
    first_S = np.minimum.reduceat(np.where(read, places_T, len(read)), starts_S)
    last_S = np.maximum.reduceat(np.where(read, places_T, -1), starts_S)
    answers_S = -(-(last_S - first_S) // STRIDE) * STRIDE  # tokens after the first read one
    ends_S = np.where(
        last_S < 0, starts_S + 1, np.minimum(first_S + 1 + answers_S, starts_S + lengths_S)
    )
    return torch.from_numpy(places_T < np.repeat(ends_S, lengths_S)), (ends_S - starts_S).tolist()


def _shared(
    tokens_T: Tensor, positions_T: Tensor, tree: PrefixTree, routing: Routing | None = None
) -> PackedInputs:
    """Return the inputs for the distinct tokens of a prefix tree."""
    tokens_U, distinct_T = (
        torch.from_numpy(x).to(tokens_T.device) for x in (tree.tokens_U, tree.distinct_T)
    )
    return _reordered(
        tokens_T, positions_T, TreeAttention(tree, tokens_T.device), tokens_U, distinct_T, routing
    )


def _reordered(
    tokens_T: Tensor,
    positions_T: Tensor,
    attend: AttentionFn,
    order_U: Tensor,
    back_T: Tensor,
    routing: Routing | None,
) -> PackedInputs:
    """Return the inputs for the tokens with the indices `order_U`."""
    if routing is not None:
        routing = routing.rows(order_U)
        if routing.watch is not None:
            routing.watch.back_T = back_T
    return PackedInputs(tokens_T[order_U], positions_T[order_U], attend, back_T, routing)


def _by_length(lengths: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Return the permutation that sorts sequences by length, and its inverse, int64 [T] each.

    The first has the original indices of the tokens, those of the shortest sequence first.
    """
    lengths_S = torch.tensor(lengths)
    starts_S = lengths_S.cumsum(0) - lengths_S
    sorted_S, rows_S = lengths_S.sort(stable=True)
    shift_S = starts_S[rows_S] - (sorted_S.cumsum(0) - sorted_S)
    order_T = torch.arange(int(lengths_S.sum())) + shift_S.repeat_interleave(sorted_S)
    inverse_T = torch.empty_like(order_T)
    inverse_T[order_T] = torch.arange(len(order_T))
    return order_T, inverse_T
