"""A decoder that is spread over the ranks of several groups, as a policy: each rank holds a part of
it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import cast

import torch
from torch import Tensor, nn

from ratchet.models.config import DecoderConfig
from ratchet.models.layers.expert_routing import Routing
from ratchet.models.layers.moe import SparseMLP
from ratchet.models.layers.packed_inputs import Feed
from ratchet.models.parallel.collectives import Group, sum_backward
from ratchet.models.parallel.context_parallel import ContextAttention, Division
from ratchet.models.parallel.expert_parallel import ExpertExchange
from ratchet.models.parallel.sharding import Part, Share
from ratchet.models.parallel.tensor_parallel import DividedVocabulary, TensorSeams
from ratchet.models.policy import DecoderPolicy
from ratchet.models.weights.hf_weights import empty_decoder


@dataclass(frozen=True)
class Spread:
    """part: of the decoder that this rank holds. tensor, context, experts: the groups of ranks that
    it computes together with; None: it is alone. sequence: see `TensorSeams`."""

    part: Part
    tensor: Group | None = None
    context: Group | None = None
    experts: Group | None = None
    sequence: bool = False


class Stage(nn.Module):
    """Consecutive layers. feeds: what a pipeline passes through it, by number. autocast: products
    in bfloat16."""

    def __init__(
        self,
        config: DecoderConfig,
        spread: Spread,
        *,
        device: torch.device | str,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        self.decoder = empty_decoder(config, part=spread.part, device=device, dtype=dtype)
        self.feeds: Sequence[Feed] = ()
        self.autocast = False
        if spread.tensor is not None:
            rows = spread.part.tensor.range(config.vocab_size)
            self.decoder.join(TensorSeams(spread.tensor, rows, sequence=spread.sequence))
        if spread.experts is not None:
            for module in self.decoder.modules():
                if isinstance(module, SparseMLP):
                    module.exchange = ExpertExchange(spread.experts)

    def forward(
        self, x: Tensor | None, number: Tensor | None = None, *, feed: Feed | None = None
    ) -> Tensor:
        """x: what the stage before it gave; the first takes the tokens of the feed. number: [1], of
        one of the `feeds`."""
        if feed is None:
            assert number is not None, "neither a feed nor its number"
            feed = self.feeds[int(number)]
        before = None if self.decoder.part.first else x
        with torch.autocast(feed.tokens_U.device.type, torch.bfloat16, enabled=self.autocast):
            return self.decoder(
                feed.tokens_U, feed.positions_U, feed.attend, before, route=feed.routing
            )


class SpreadPolicy(DecoderPolicy):
    """`hidden` gives the states of this rank's own tokens, and `division` says which they are.
    stages: the runs of layers that are here, one, or several of an interleaved pipeline."""

    def __init__(
        self,
        config: DecoderConfig,
        spread: Spread,
        *,
        device: torch.device | str,
        dtype: torch.dtype,
        chunks: int = 1,
    ) -> None:
        """Weights are uninitialised memory. chunks: stages of each rank of a pipeline."""
        nn.Module.__init__(self)
        own = spread.part.pipeline
        shares = [Share(own.index + own.of * chunk, own.of * chunks) for chunk in range(chunks)]
        parts = [replace(spread, part=replace(spread.part, pipeline=share)) for share in shares]
        parts[0].part.check(config)
        self.spread = spread
        self.stages = nn.ModuleList(
            Stage(config, part, device=device, dtype=dtype) for part in parts
        )
        # The last stage's, which has the head: by this way it is no module of its own, beside the
        # stages.
        object.__setattr__(self, "decoder", self.runs[-1].decoder)

    @property
    def runs(self) -> list[Stage]:
        return [cast(Stage, stage) for stage in self.stages]

    @property
    def checkpointing(self) -> bool:
        return self.decoder.checkpointing

    @checkpointing.setter
    def checkpointing(self, on: bool) -> None:
        for stage in self.runs:
            stage.decoder.checkpointing = on

    @property
    def shares_prefixes(self) -> bool:
        """A beginning that sequences share is not divided between ranks."""
        return self.spread.context is None

    @property
    def vocabulary(self) -> DividedVocabulary | None:
        return (
            None
            if self.spread.tensor is None
            else DividedVocabulary(self.spread.tensor, self.vocab_size)
        )

    def division(self, lengths: Sequence[int]) -> Division | None:
        """Which tokens of packed sequences this rank computes; None: all."""
        group = self.spread.context
        return (
            None if group is None else _division(tuple(lengths), Share(group.rank(), group.size()))
        )

    def hidden(
        self,
        tokens_T: Tensor,
        positions_T: Tensor,
        lengths: Sequence[int],
        routing: Routing | None = None,
        *,
        read_T: Tensor | None = None,
    ) -> Tensor:
        feed = self.feed(tokens_T, positions_T, lengths, routing)
        return feed.unfold(self.stages[0](None, feed=feed))

    def feed(
        self,
        tokens_T: Tensor,
        positions_T: Tensor,
        lengths: Sequence[int],
        routing: Routing | None = None,
    ) -> Feed:
        division, group = self.division(lengths), self.spread.context
        if division is None or group is None:
            return super().feed(tokens_T, positions_T, lengths, routing)
        own = torch.from_numpy(division.tokens).to(tokens_T.device)
        if routing is not None:
            routing.check(self.shape)
            routing = routing.rows(own)
        attend = ContextAttention(division, group, tokens_T.device)
        return Feed(tokens_T[own], positions_T[own], attend, routing=routing)

    def logits(self, hidden_nd: Tensor) -> Tensor:
        """Of this rank's tokens of the vocabulary."""
        if self.spread.tensor is not None:
            hidden_nd = sum_backward(hidden_nd, self.spread.tensor)
        return super().logits(hidden_nd)

    def canonical_weights(self) -> Iterator[tuple[str, Tensor]]:
        raise AssertionError(
            "a rank has blocks of weights: see ratchet.models.weights.weight_layout"
        )


# the forward and each column of a micro-batch ask for the same one, in a pipeline some time later
@lru_cache(maxsize=64)
def _division(lengths: tuple[int, ...], share: Share) -> Division:
    return Division.of(lengths, share)
