"""A decoder that is spread over the ranks of several groups, as a policy: each rank holds a part of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ratchet.models.collectives import Group, sum_backward
from ratchet.models.config import DecoderConfig
from ratchet.models.context_parallel import ContextAttention, Division
from ratchet.models.expert_parallel import ExpertExchange
from ratchet.models.hf import empty_decoder
from ratchet.models.moe import SparseMLP
from ratchet.models.parts import Part, Share
from ratchet.models.policy import DecoderPolicy
from ratchet.models.tensor_parallel import DividedVocabulary, TensorSeams


@dataclass(frozen=True)
class Spread:
    """part: of the decoder that this rank holds. tensor, context, experts: the groups of ranks that it computes together with;
    None: it is alone. sequence: see `TensorSeams`."""

    part: Part
    tensor: Group | None = None
    context: Group | None = None
    experts: Group | None = None
    sequence: bool = False


class SpreadPolicy(DecoderPolicy):
    """`hidden` gives the states of this rank's own tokens, and `places` says which they are."""

    def __init__(self, config: DecoderConfig, spread: Spread, *, device: torch.device | str, dtype: torch.dtype) -> None:
        """Weights are uninitialised memory."""
        spread.part.check(config)
        super().__init__(empty_decoder(config, part=spread.part, device=device, dtype=dtype))
        self.spread = spread
        if spread.tensor is not None:
            rows = spread.part.tensor.range(config.vocab_size)
            self.decoder.join(TensorSeams(spread.tensor, rows, sequence=spread.sequence))
        if spread.experts is not None:
            for module in self.decoder.modules():
                if isinstance(module, SparseMLP):
                    module.exchange = ExpertExchange(spread.experts)

    @property
    def shares_prefixes(self) -> bool:
        """A beginning that sequences share is not divided between ranks."""
        return self.spread.context is None

    @property
    def vocabulary(self) -> DividedVocabulary | None:
        return None if self.spread.tensor is None else DividedVocabulary(self.spread.tensor, self.vocab_size)

    def division(self, lengths: Sequence[int]) -> Division | None:
        """Which tokens of packed sequences this rank computes; None: all."""
        group = self.spread.context
        return None if group is None else Division.of(lengths, Share(group.rank(), group.size()))

    def hidden(self, tokens_T: Tensor, positions_T: Tensor, lengths: Sequence[int]) -> Tensor:
        division = self.division(lengths)
        if division is None or self.spread.context is None:
            return super().hidden(tokens_T, positions_T, lengths)
        own = torch.from_numpy(division.tokens).to(tokens_T.device)
        attend = ContextAttention(division, self.spread.context, tokens_T.device)
        return self.decoder(tokens_T[own], positions_T[own], attend)

    def logits(self, hidden_nd: Tensor) -> Tensor:
        """Of this rank's tokens of the vocabulary."""
        if self.spread.tensor is not None:
            hidden_nd = sum_backward(hidden_nd, self.spread.tensor)
        return super().logits(hidden_nd)

    def canonical_weights(self) -> Iterator[tuple[str, Tensor]]:
        raise AssertionError("a rank has blocks of weights: see ratchet.models.layout")
