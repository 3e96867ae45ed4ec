"""The inputs of a backbone of transformers for packed sequences.

T = tokens of packed sequences, U = tokens that are computed, d = hidden size, R = axes of a
position.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor

from ratchet.models.decoder import AttentionFn
from ratchet.models.layers.attention import PackedAttention
from ratchet.models.layers.packed_inputs import PaddedAttention, sort_by_length
from ratchet.models.parallel.context_parallel import ContextSplit
from ratchet.types import Medium
from ratchet.utils.transfer import upload


@dataclass(frozen=True)
class BackboneInputs:
    """The inputs of a backbone for packed sequences, in the order in which it gets the tokens.

    attend: the attention of the packed sequences; None if positions separate them.
    positions_U: the positions, [R, U] if a token's position has several axes.
    split: the tokens of each context-parallel rank; None: this rank has all.
    state_index_T: index of each token among the U states; None: same order.
    """

    tokens_U: Tensor
    positions_U: Tensor
    attend: AttentionFn | None = None
    split: ContextSplit | None = None
    state_index_T: Tensor | None = None

    @classmethod
    def from_lengths(
        cls, tokens_T: Tensor, positions_T: Tensor, lengths: Sequence[int], *, uses_varlen: bool
    ) -> Self:
        """Return the inputs of sequences whose attention gets their lengths."""
        device = tokens_T.device
        attend = PackedAttention(sorted(lengths), device, uses_varlen=uses_varlen)
        if len(lengths) == 1:
            return cls(tokens_T, positions_T, attend)
        # Sequences of similar length share an attention call if they follow one another.
        order_T, inverse_T = (upload(index, device) for index in sort_by_length(lengths))
        return cls(tokens_T[order_T], positions_T[order_T], attend, state_index_T=inverse_T)

    @classmethod
    def from_split(cls, tokens_T: Tensor, positions_T: Tensor, split: ContextSplit) -> Self:
        """Return the inputs of one context-parallel rank."""
        own = torch.from_numpy(split.tokens).to(tokens_T.device)
        return cls(tokens_T[own], positions_T[own], split=split)

    def pad(self, tokens: int) -> Self:
        """Return the inputs padded to `tokens` tokens, each of them a sequence of its own."""
        n_tokens = len(self.tokens_U)
        if n_tokens == tokens:
            return self
        padding = (0, tokens - n_tokens)
        return replace(
            self,
            tokens_U=F.pad(self.tokens_U, padding),
            positions_U=F.pad(self.positions_U, padding),
            attend=None if self.attend is None else PaddedAttention(self.attend, n_tokens),
        )

    def unfold(self, hidden_Ud: Tensor) -> Tensor:
        """Return the hidden states of all tokens in their original order [T, d]."""
        return hidden_Ud if self.state_index_T is None else hidden_Ud[self.state_index_T]


@dataclass(frozen=True, kw_only=True)
class MediaInputs(BackboneInputs):
    """The inputs of a multimodal backbone, which embeds all tokens and media of the sequences.

    Its language model computes some of the tokens.

    tokens_T: all tokens. With padding there is one more, which every padding token repeats.
    types_T: the type of each token's medium; 0 for text.
    media: all media, in the order of their tokens.
    index_U: index of each computed token among all tokens; None: all, in their order.
    """

    tokens_T: Tensor
    types_T: Tensor
    media: tuple[Medium, ...] = ()
    index_U: Tensor | None = None

    def pad(self, tokens: int) -> Self:
        n_padding = tokens - len(self.tokens_U)
        if not n_padding:
            return self
        n_all = len(self.tokens_T)
        index_U = self.index_U
        if index_U is None:
            index_U = torch.arange(n_all, device=self.tokens_T.device)
        return replace(
            super().pad(tokens),
            tokens_T=F.pad(self.tokens_T, (0, 1)),
            types_T=F.pad(self.types_T, (0, 1)),
            index_U=F.pad(index_U, (0, n_padding), value=n_all),
        )
