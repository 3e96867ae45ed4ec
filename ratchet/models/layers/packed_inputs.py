"""Build the decoder's inputs from packed sequences, with shared prefixes computed once.

An output token is one whose final hidden state the caller uses.

T = tokens of packed sequences, U = tokens that are computed, n = output tokens, S = sequences,
d = hidden size.
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
from ratchet.utils.transfer import upload_together

# The number of tokens after the first output token is rounded up to a multiple of this, because
# attention over 31 tokens takes longer than over 32 on a CPU.
STRIDE = 8
# Sharing prefixes and skipping final states have a cost of their own. Each is done only if at most
# this share of the tokens (or of the final states) is left to compute.
MAX_REMAINING_SHARE = 0.9


@dataclass(frozen=True)
class PackedInputs:
    """The decoder's inputs for packed sequences, in the order of tokens that `attend` expects."""

    tokens_U: Tensor
    positions_U: Tensor
    attend: AttentionFn
    # int64, index of each of the T tokens among the computed final states; None: same order.
    state_index_T: Tensor | None = None
    routing: Routing | None = None
    # Seed of adapter dropout, which the Megatron learner sets for updates. None: adapters take the
    # seed of `seed_dropout`, and drop nothing without it.
    seed: int | None = None
    # int64, indices of the output tokens among the U tokens; None: all U final states are computed.
    output_index_n: Tensor | None = None
    # int64 [K, U], row k - 1: the token k places after each token of its sequence, which the
    # Megatron learner sets to train K layers of multi-token prediction.
    later_tokens_KU: Tensor | None = None

    def to(self, device: torch.device) -> PackedInputs:
        """Return the inputs on the device that computes, for which `attend` was planned."""
        routing = self.routing
        names = ("tokens_U", "positions_U", "state_index_T", "output_index_n")
        tensors = {name: x for name in names if (x := getattr(self, name)) is not None}
        moved = dict(zip(tensors, upload_together(list(tensors.values()), device), strict=True))
        if routing is not None:
            routing = routing.to(device)
        return replace(self, routing=routing, **moved)

    def unfold(self, hidden_Ud: Tensor) -> Tensor:
        """Return the hidden states of all tokens in their original order [T, d]."""
        return (
            hidden_Ud
            if self.state_index_T is None
            else hidden_Ud.index_select(0, self.state_index_T)
        )

    def pad(self, tokens: int) -> PackedInputs:
        """Return the inputs padded to `tokens` tokens. Nothing attends to the padding."""
        n_tokens = len(self.tokens_U)
        if n_tokens == tokens:
            return self
        padding = (0, tokens - n_tokens)
        return replace(
            self,
            tokens_U=F.pad(self.tokens_U, padding),
            positions_U=F.pad(self.positions_U, padding),
            attend=PaddedAttention(self.attend, n_tokens),
            routing=None if self.routing is None else self.routing.pad(tokens),
            later_tokens_KU=(
                None if self.later_tokens_KU is None else F.pad(self.later_tokens_KU, padding)
            ),
        )


@dataclass(frozen=True)
class PaddedAttention:
    """An attention that ignores padding at the end, where its output is 0."""

    attend: AttentionFn  # the attention of the tokens before the padding
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
    output_mask_T: Tensor | None = None,
    shares_prefixes: bool = True,
    device: torch.device | None = None,
    uses_varlen: bool = False,
) -> PackedInputs:
    """Return the decoder's inputs for packed sequences.

    Args:
        lengths: Number of tokens of each sequence, at least 1. They sum to T.
        routing: Expert routing of the T tokens.
        output_mask_T: bool, True for output tokens; None, or none True: all are. Tokens after a
            sequence's last output token are then not computed, except for rounding up to `STRIDE`.
            For the other tokens that are not output tokens, the last layer computes only keys and
            values, and `unfold` returns meaningless states. With `routing` all are computed.
        shares_prefixes: True to compute prefixes that sequences share only once.
        device: The device for which attention is planned; None: that of the tokens.
        uses_varlen: As of `PackedAttention`.
    """
    assert sum(lengths) == len(tokens_T), (
        f"{sum(lengths)} tokens in `lengths`, {len(tokens_T)} in `tokens_T`"
    )
    device = device or tokens_T.device
    if output_mask_T is not None and routing is None and output_mask_T.any():
        is_kept_T, kept_lengths = _select_computed(lengths, output_mask_T)
        is_kept_T = is_kept_T.to(tokens_T.device)
        packed = pack_inputs(
            tokens_T[is_kept_T],
            positions_T[is_kept_T],
            kept_lengths,
            shares_prefixes=shares_prefixes,
            device=device,
            uses_varlen=uses_varlen,
        )
        return _select_outputs(packed, is_kept_T, output_mask_T)
    if len(lengths) > 1 and shares_prefixes:
        replayed_TLK = None if routing is None else routing.replayed_TLK
        tree = PrefixTree.from_sequences(compute_path_keys(tokens_T, replayed_TLK), lengths)
        if len(tree.token_index_U) <= MAX_REMAINING_SHARE * len(tokens_T):
            return _share_prefixes(tokens_T, positions_T, tree, device, routing, uses_varlen)
    ascending = sorted(lengths)
    attend = PackedAttention(ascending, device, uses_varlen=uses_varlen)
    if ascending == list(lengths):
        return PackedInputs(tokens_T, positions_T, attend, routing=routing)
    # Consecutive sequences of similar length share an attention call. So sort by length here, once
    # for all layers.
    order_T, inverse_T = (index.to(tokens_T.device) for index in sort_by_length(lengths))
    return _reorder(tokens_T, positions_T, attend, order_T, inverse_T, routing)


def _select_outputs(packed: PackedInputs, is_kept_T: Tensor, output_mask_T: Tensor) -> PackedInputs:
    """Return the inputs of the kept tokens, with the final states of output tokens only."""
    # A token that is left out maps to the last kept token before it.
    state_index_T = is_kept_T.cumsum(0) - 1
    if packed.state_index_T is not None:
        state_index_T = packed.state_index_T[state_index_T]
    output_mask_U = torch.zeros(len(packed.tokens_U), dtype=torch.bool, device=state_index_T.device)
    output_mask_U[state_index_T[output_mask_T]] = True
    output_index_n = output_mask_U.nonzero()[:, 0]
    if len(output_index_n) > MAX_REMAINING_SHARE * len(output_mask_U):
        return packed if is_kept_T.all() else replace(packed, state_index_T=state_index_T)
    return replace(
        packed,
        state_index_T=(output_mask_U.cumsum(0) - 1).clamp_(min=0)[state_index_T],
        output_index_n=output_index_n,
    )


def _select_computed(lengths: Sequence[int], output_mask_T: Tensor) -> tuple[Tensor, list[int]]:
    """Select the tokens to compute: each sequence up to its last output token, at least one token.

    The number of tokens after the first output token is rounded up to a multiple of `STRIDE`.

    Returns (mask of the kept tokens, bool [T]; number of kept tokens of each sequence).
    """
    lengths_S = np.asarray(lengths, dtype=np.int64)
    is_output_T = output_mask_T.cpu().numpy()
    index_T = np.arange(len(is_output_T))
    starts_S = np.cumsum(lengths_S) - lengths_S
    first_S = np.minimum.reduceat(np.where(is_output_T, index_T, len(is_output_T)), starts_S)
    last_S = np.maximum.reduceat(np.where(is_output_T, index_T, -1), starts_S)
    # Number of tokens after the first output token, rounded up.
    following_S = (last_S - first_S + STRIDE - 1) // STRIDE * STRIDE
    ends_S = np.where(
        last_S < 0, starts_S + 1, np.minimum(first_S + 1 + following_S, starts_S + lengths_S)
    )
    return torch.from_numpy(index_T < np.repeat(ends_S, lengths_S)), (ends_S - starts_S).tolist()


def _share_prefixes(
    tokens_T: Tensor,
    positions_T: Tensor,
    tree: PrefixTree,
    device: torch.device,
    routing: Routing | None = None,
    uses_varlen: bool = False,
) -> PackedInputs:
    """Return the inputs for the distinct tokens of a prefix tree."""
    order_U, distinct_index_T = (
        torch.from_numpy(x).to(tokens_T.device) for x in (tree.token_index_U, tree.distinct_index_T)
    )
    return _reorder(
        tokens_T,
        positions_T,
        TreeAttention(tree, device, uses_varlen),
        order_U,
        distinct_index_T,
        routing,
    )


def _reorder(
    tokens_T: Tensor,
    positions_T: Tensor,
    attend: AttentionFn,
    order_U: Tensor,
    state_index_T: Tensor,
    routing: Routing | None,
) -> PackedInputs:
    """Return the inputs for the tokens with the indices `order_U`, in this order."""
    if routing is not None:
        routing = routing.select(order_U)
        if routing.monitor is not None:
            routing.monitor.row_index_T = state_index_T
    return PackedInputs(tokens_T[order_U], positions_T[order_U], attend, state_index_T, routing)


def sort_by_length(lengths: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Return the permutation of tokens that sorts sequences by length, and its inverse, int64 [T].

    The permutation lists the original indices of the tokens, the shortest sequence first.
    """
    lengths_S = torch.tensor(lengths)
    starts_S = lengths_S.cumsum(0) - lengths_S
    sorted_S, rows_S = lengths_S.sort(stable=True)
    shift_S = starts_S[rows_S] - (sorted_S.cumsum(0) - sorted_S)
    order_T = torch.arange(int(lengths_S.sum())) + shift_S.repeat_interleave(sorted_S)
    inverse_T = torch.empty_like(order_T)
    inverse_T[order_T] = torch.arange(len(order_T))
    return order_T, inverse_T
