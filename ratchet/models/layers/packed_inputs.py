"""What a decoder is given of packed sequences: each distinct token once, in the order that
attention wants.

T = tokens of packed sequences laid end to end, U = those that are computed, S = sequences, d =
hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ratchet.models.decoder import Attend
from ratchet.models.layers.attention import PackedAttention, TreeAttention
from ratchet.models.layers.expert_routing import Routing
from ratchet.models.layers.prefix_tree import PrefixTree, path_keys

# tokens: attention of 31 takes a CPU longer than of 32, so that to leave the last one out would
# cost
STRIDE = 8
# beginnings are shared, and states left out, where at most this part of them is left: either costs
# a little too
WORTH = 0.9


@dataclass(frozen=True)
class Feed:
    """What a decoder computes of packed sequences: distinct tokens, in the order that its attention
    wants. back_T: int64, where each of the T tokens is among them; None: as they are. read_U:
    int64, those of them whose final states are computed, which back_T then counts; None: all. seed:
    of what adapters drop, where the feed brings it."""

    tokens_U: Tensor
    positions_U: Tensor
    attend: Attend
    back_T: Tensor | None = None
    routing: Routing | None = None
    seed: int | None = None
    read_U: Tensor | None = None

    def unfold(self, hidden_Ud: Tensor) -> Tensor:
        """[T, d]"""
        return hidden_Ud if self.back_T is None else hidden_Ud.index_select(0, self.back_T)

    def padded(self, tokens: int) -> Feed:
        """With so many, of which nothing reads the last ones."""
        own = len(self.tokens_U)
        if own == tokens:
            return self
        more = (0, tokens - own)
        routing = None if self.routing is None else self.routing.padded(tokens)
        tokens_U, positions_U = F.pad(self.tokens_U, more), F.pad(self.positions_U, more)
        return replace(
            self,
            tokens_U=tokens_U,
            positions_U=positions_U,
            attend=Padded(self.attend, own),
            routing=routing,
        )


@dataclass(frozen=True)
class Padded:
    """`attend` of a feed for hidden states with padding behind them."""

    attend: Attend
    tokens: int

    def __call__(self, layer: int, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor) -> Tensor:
        out = self.attend(layer, q_THD[: self.tokens], k_TKD[: self.tokens], v_TKD[: self.tokens])
        return F.pad(out, (0, 0, 0, 0, 0, len(q_THD) - self.tokens))


def feed_of(
    tokens_T: Tensor,
    positions_T: Tensor,
    lengths: Sequence[int],
    routing: Routing | None = None,
    *,
    shares: bool = True,
) -> Feed:
    """lengths: tokens of each sequence, each at least 1. shares: beginnings that sequences have in
    common are computed once."""
    assert sum(lengths) == len(tokens_T), (
        f"{sum(lengths)} tokens in `lengths`, {len(tokens_T)} in `tokens_T`"
    )
    if len(lengths) > 1 and shares:
        given_TLK = None if routing is None else routing.given_TLK
        tree = PrefixTree.of(path_keys(tokens_T, given_TLK), lengths)
        if len(tree.tokens_U) <= WORTH * len(tokens_T):
            return _shared(tokens_T, positions_T, tree, routing)
    ascending = sorted(lengths)
    attend = PackedAttention(ascending, tokens_T.device)
    if ascending == list(lengths):
        return Feed(tokens_T, positions_T, attend, routing=routing)
    # Sequences of like length share an attention call if they are neighbours: reorder once, not in
    # every layer.
    order_T, inverse_T = (index.to(tokens_T.device) for index in _by_length(lengths))
    return _reordered(tokens_T, positions_T, attend, order_T, inverse_T, routing)


def reading_feed(
    tokens_T: Tensor,
    positions_T: Tensor,
    lengths: Sequence[int],
    read_T: Tensor,
    *,
    shares: bool = True,
) -> Feed:
    """Where the final states of some tokens alone are read (bool [T], at least one): what lies
    behind the last of a sequence is not computed, and of others only what later tokens attend to.
    In their places [T, d] has states of some that are read."""
    kept_T, kept_S = _begun(lengths, read_T)
    kept_T = kept_T.to(tokens_T.device)
    feed = feed_of(tokens_T[kept_T], positions_T[kept_T], kept_S, shares=shares)
    back_T = kept_T.cumsum(0) - 1  # what is left out goes with the token before it
    if feed.back_T is not None:
        back_T = feed.back_T[back_T]
    read_U = torch.zeros(len(feed.tokens_U), dtype=torch.bool, device=back_T.device)
    read_U[back_T[read_T]] = True
    index_U = read_U.nonzero()[:, 0]
    if len(index_U) > WORTH * len(read_U):
        return feed if kept_T.all() else replace(feed, back_T=back_T)
    return replace(feed, back_T=(read_U.cumsum(0) - 1).clamp_(min=0)[back_T], read_U=index_U)


def _begun(lengths: Sequence[int], read_T: Tensor) -> tuple[Tensor, list[int]]:
    """(whether each token lies before the end of what is read of its sequence, or a little behind
    it, bool [T]; how many of each sequence do: at least one)"""
    lengths_S, read, places_T = (
        np.asarray(lengths, dtype=np.int64),
        read_T.cpu().numpy(),
        np.arange(len(read_T)),
    )
    starts_S = np.cumsum(lengths_S) - lengths_S
    first_S = np.minimum.reduceat(np.where(read, places_T, len(read)), starts_S)
    last_S = np.maximum.reduceat(np.where(read, places_T, -1), starts_S)
    answers_S = -(-(last_S - first_S) // STRIDE) * STRIDE  # what follows the first
    ends_S = np.where(
        last_S < 0, starts_S + 1, np.minimum(first_S + 1 + answers_S, starts_S + lengths_S)
    )
    return torch.from_numpy(places_T < np.repeat(ends_S, lengths_S)), (ends_S - starts_S).tolist()


def _shared(
    tokens_T: Tensor, positions_T: Tensor, tree: PrefixTree, routing: Routing | None = None
) -> Feed:
    tokens_U, distinct_T = (
        torch.from_numpy(x).to(tokens_T.device) for x in (tree.tokens_U, tree.distinct_T)
    )
    return _reordered(
        tokens_T, positions_T, TreeAttention(tree, tokens_T.device), tokens_U, distinct_T, routing
    )


def _reordered(
    tokens_T: Tensor,
    positions_T: Tensor,
    attend: Attend,
    order_U: Tensor,
    back_T: Tensor,
    routing: Routing | None,
) -> Feed:
    """Of tokens order_U."""
    if routing is not None:
        routing = routing.rows(order_U)
        if routing.watch is not None:
            routing.watch.back_T = back_T
    return Feed(tokens_T[order_U], positions_T[order_U], attend, back_T, routing)


def _by_length(lengths: Sequence[int]) -> tuple[Tensor, Tensor]:
    """(where each token of the sequences in ascending order of length comes from, the inverse),
    int64 [T]."""
    lengths_S = torch.tensor(lengths)
    starts_S = lengths_S.cumsum(0) - lengths_S
    sorted_S, rows_S = lengths_S.sort(stable=True)
    shift_S = starts_S[rows_S] - (sorted_S.cumsum(0) - sorted_S)
    order_T = torch.arange(int(lengths_S.sum())) + shift_S.repeat_interleave(sorted_S)
    inverse_T = torch.empty_like(order_T)
    inverse_T[order_T] = torch.arange(len(order_T))
    return order_T, inverse_T
