"""What others have to do with the routers of a mixture of experts: a sampler notes which experts
they choose, a learner gives them the sampler's choice again (rollout routing replay,
arXiv:2510.11370), and measures how evenly they choose.

Near a tie the slightest difference of arithmetic sends a token to another expert, which moves its
logprobs by as much as many steps of an optimizer. A choice has no gradient, the weights of the
chosen have: replay takes the choice from the sampler, and computes the weights anew.

T = tokens, E = experts, K = experts of a token, L = layers with experts, S = sequences.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from ratchet.errors import DataError
from ratchet.models.config import DecoderConfig

UNKNOWN = -1  # in place of an expert's number: no forward of the sampler's has routed the token


class Route(Protocol):
    """(place among the layers with experts, router logits [T, E], the K experts of each token by
    them [T, K]) -> the experts that compute it [T, K]; int64 both. A layer whose activations are
    recomputed asks again."""

    def __call__(self, place: int, logits_TE: Tensor, own_TK: Tensor, /) -> Tensor: ...


class Record:
    """`route` that lets routers choose, and keeps their choice: `experts_TLK`, int16."""

    def __init__(self, config: DecoderConfig, tokens: int, device: torch.device) -> None:
        shape = (tokens, len(config.sparse_layers), config.experts_per_token)
        self.experts_TLK = torch.empty(shape, dtype=torch.int16, device=device)

    def __call__(self, place: int, logits_TE: Tensor, own_TK: Tensor) -> Tensor:
        self.experts_TLK[:, place] = own_TK.to(torch.int16)
        return own_TK


class Seen(NamedTuple):
    """Of one layer; `own_TK`: what the router chose, `used_TK`: what computed."""

    logits_TE: Tensor
    own_TK: Tensor
    used_TK: Tensor


class Watch:
    """Keeps what the routers of one forward did. back_T: where each token is among those that were
    computed; None: in order.

    Like `Routing` no dataclass: FSDP copies those on their way to a layer, and what the copy is
    told is lost."""

    def __init__(self) -> None:
        self.layers: dict[int, Seen] = {}
        self.back_T: Tensor | None = None

    def columns(self, sequence_T: Tensor, n_sequences: int) -> Tensor:
        """[S, 5], means over the layers, of each sequence:

        balance: sum over experts of (its share of the choices, times experts / K) x (mean
        probability of it): 1 if all is even; z: mean over tokens of logsumexp(logits)^2. Both with
        a gradient. entropy: of the router, in nats a token; max_load: of the busiest expert, where
        1 is even; rerouted: share of the choices that the routers would have made otherwise than
        they were given.
        """
        assert self.layers, "no router was watched"
        return torch.stack(
            [self._layer(seen, sequence_T, n_sequences) for seen in self.layers.values()]
        ).mean(0)

    def _layer(self, seen: Seen, sequence_T: Tensor, n_sequences: int) -> Tensor:
        logits_TE, own_TK, used_TK = (
            seen if self.back_T is None else (x.index_select(0, self.back_T) for x in seen)
        )
        count_S = torch.bincount(sequence_T, minlength=n_sequences).clamp(min=1)

        def mean(x: Tensor) -> Tensor:  # [T, ...] -> [S, ...]
            sums = x.new_zeros(n_sequences, *x.shape[1:]).index_add(0, sequence_T, x)
            return sums / count_S.view(-1, *(1,) * (x.dim() - 1))

        experts, chosen = logits_TE.shape[1], used_TK.shape[1]
        logs_TE = logits_TE.log_softmax(-1)
        shares_TE = logs_TE.exp()
        picked_TE = torch.zeros_like(shares_TE).scatter(1, used_TK, 1.0)
        load_SE = mean(picked_TE) * (experts / chosen)  # 1 for each expert where all have as much
        kept_TK = (own_TK[:, :, None] == used_TK[:, None]).any(-1).to(logits_TE.dtype)
        balance_S = (load_SE * mean(shares_TE)).sum(-1)
        z_S = mean(logits_TE.logsumexp(-1).square())
        entropy_S = mean(-(shares_TE * logs_TE).sum(-1)).detach()
        return torch.stack(
            [balance_S, z_S, entropy_S, load_SE.amax(-1), mean(1 - kept_TK.mean(-1))], dim=-1
        )


class Routing:
    """`route` of a learner's forward. given_TLK: experts that the sampler chose, `UNKNOWN` for
    tokens that it did not route: the router here chooses theirs; None: for all. watch: is told of
    everything."""

    def __init__(self, given_TLK: Tensor | None = None, watch: Watch | None = None) -> None:
        self.given_TLK, self.watch = given_TLK, watch

    def __call__(self, place: int, logits_TE: Tensor, own_TK: Tensor) -> Tensor:
        used_TK = own_TK
        if self.given_TLK is not None:
            given_TK = self.given_TLK[:, place].to(torch.int64)
            used_TK = torch.where(given_TK[:, :1] < 0, own_TK, given_TK)
        if self.watch is not None:
            self.watch.layers.setdefault(place, Seen(logits_TE, own_TK, used_TK))
        return used_TK

    def check(self, config: DecoderConfig) -> None:
        """Raises DataError where another model has been sampled."""
        own = len(config.sparse_layers), config.experts_per_token
        if self.given_TLK is not None and self.given_TLK.shape[1:] != own:
            given = tuple(self.given_TLK.shape[1:])
            raise DataError(
                f"routes of {given} (layers, experts a token) for a model of {own}: replay those "
                "that this model has sampled"
            )

    def rows(self, index: Tensor) -> Routing:
        """For a forward of these tokens."""
        return self if self.given_TLK is None else Routing(self.given_TLK[index], self.watch)

    def padded(self, tokens: int) -> Routing:
        """With tokens behind the given ones."""
        if self.given_TLK is None:
            return self
        more = tokens - len(self.given_TLK)
        return Routing(F.pad(self.given_TLK, (0, 0, 0, 0, 0, more), value=UNKNOWN), self.watch)
