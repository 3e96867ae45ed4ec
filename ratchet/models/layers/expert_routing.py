"""Record, replay and monitor the expert choices of a mixture of experts.

A sampler records which experts its routers choose. A learner replays that choice (rollout routing
replay, arXiv:2510.11370), and measures how evenly experts are chosen.

Near a tie a rounding difference sends a token to another expert, which changes its
log-probabilities as much as many optimizer steps do. A choice has no gradient, but the weights of
the chosen experts do: replay takes the choice from the sampler and recomputes the weights.

T = tokens, E = experts, K = experts of a token, L = layers with experts, S = sequences.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from ratchet.config.model_shape.decoder_config import DecoderConfig
from ratchet.errors import DataError

UNKNOWN = -1  # expert index of tokens that the sampler has not routed


class RoutingHook(Protocol):
    """A function that decides which experts compute each token of a layer.

    A layer whose activations are recomputed calls it again.

    Args:
        place: index among the layers with experts.
        logits_TE: router logits.
        chosen_TK: the K experts of each token by these logits, int64.

    Returns: the experts that compute each token [T, K], int64.
    """

    def __call__(self, place: int, logits_TE: Tensor, chosen_TK: Tensor, /) -> Tensor: ...


class RouteRecorder:
    """A `RoutingHook` that keeps the routers' choice and records it in `experts_TLK` (int16)."""

    def __init__(self, config: DecoderConfig, tokens: int, device: torch.device) -> None:
        shape = (tokens, len(config.sparse_layers), config.experts_per_token)
        self.experts_TLK = torch.empty(shape, dtype=torch.int16, device=device)

    def __call__(self, place: int, logits_TE: Tensor, chosen_TK: Tensor) -> Tensor:
        self.experts_TLK[:, place] = chosen_TK.to(torch.int16)
        return chosen_TK


class LayerRouting(NamedTuple):
    """The routing of one layer in one forward pass."""

    logits_TE: Tensor
    chosen_TK: Tensor  # experts chosen by the router's logits
    used_TK: Tensor  # experts that computed the tokens


class RouterMonitor:
    """A record of the expert choices in one forward pass.

    Like `Routing` it is not a dataclass: FSDP passes a copy of a dataclass to each layer, and
    anything recorded in the copy is lost.
    """

    def __init__(self) -> None:
        self.layers: dict[int, LayerRouting] = {}
        # Index of each token's row in the layers' tensors; None: rows are in the tokens' order.
        self.back_T: Tensor | None = None

    def columns(self, sequence_T: Tensor, n_sequences: int) -> Tensor:
        """Return five measures per sequence, averaged over the layers [S, 5].

        balance: sum over experts of (share of choices x experts / K) x (mean probability); 1 if
            even. Has a gradient.
        z: mean over tokens of logsumexp(logits)^2. Has a gradient.
        entropy: of the router's distribution, in nats per token.
        max_load: load of the busiest expert, 1 if even.
        rerouted: share of the choices in which replay overrode the router.
        """
        assert self.layers, "no router was watched"
        return torch.stack(
            [self._layer(layer, sequence_T, n_sequences) for layer in self.layers.values()]
        ).mean(0)

    def _layer(self, layer: LayerRouting, sequence_T: Tensor, n_sequences: int) -> Tensor:
        logits_TE, chosen_TK, used_TK = (
            layer if self.back_T is None else (x.index_select(0, self.back_T) for x in layer)
        )
        count_S = torch.bincount(sequence_T, minlength=n_sequences).clamp(min=1)

        def mean(x: Tensor) -> Tensor:  # [T, ...] -> [S, ...]
            sums = x.new_zeros(n_sequences, *x.shape[1:]).index_add(0, sequence_T, x)
            return sums / count_S.view(-1, *(1,) * (x.dim() - 1))

        n_experts, n_chosen = logits_TE.shape[1], used_TK.shape[1]
        logs_TE = logits_TE.log_softmax(-1)
        shares_TE = logs_TE.exp()
        picked_TE = torch.zeros_like(shares_TE).scatter(1, used_TK, 1.0)
        load_SE = mean(picked_TE) * (
            n_experts / n_chosen
        )  # 1 for every expert if all are used equally
        kept_TK = (chosen_TK[:, :, None] == used_TK[:, None]).any(-1).to(logits_TE.dtype)
        balance_S = (load_SE * mean(shares_TE)).sum(-1)
        z_S = mean(logits_TE.logsumexp(-1).square())
        entropy_S = mean(-(shares_TE * logs_TE).sum(-1)).detach()
        return torch.stack(
            [balance_S, z_S, entropy_S, load_SE.amax(-1), mean(1 - kept_TK.mean(-1))], dim=-1
        )


class Routing:
    """The `RoutingHook` of a learner: it can replay the sampler's choice and be monitored."""

    def __init__(
        self, replayed_TLK: Tensor | None = None, watch: RouterMonitor | None = None
    ) -> None:
        """Create a routing hook.

        Args:
            replayed_TLK: experts that the sampler chose; `UNKNOWN` for tokens that it did not
                route and for which this model's routers choose. None: they choose for all tokens.
            watch: records the routing of every layer.
        """
        self.replayed_TLK = replayed_TLK
        self.watch = watch

    def __call__(self, place: int, logits_TE: Tensor, chosen_TK: Tensor) -> Tensor:
        used_TK = chosen_TK
        if self.replayed_TLK is not None:
            replayed_TK = self.replayed_TLK[:, place].to(torch.int64)
            used_TK = torch.where(replayed_TK[:, :1] < 0, chosen_TK, replayed_TK)
        if self.watch is not None:
            self.watch.layers.setdefault(place, LayerRouting(logits_TE, chosen_TK, used_TK))
        return used_TK

    def check(self, config: DecoderConfig) -> None:
        """Raise DataError if the replayed choices have the shape of another model."""
        expected = len(config.sparse_layers), config.experts_per_token
        if self.replayed_TLK is not None and self.replayed_TLK.shape[1:] != expected:
            recorded = tuple(self.replayed_TLK.shape[1:])
            raise DataError(
                f"routes of {recorded} (layers, experts a token) for a model of {expected}: replay "
                "those that this model has sampled"
            )

    def rows(self, index: Tensor) -> Routing:
        """Return the routing for a forward pass of these tokens only."""
        return self if self.replayed_TLK is None else Routing(self.replayed_TLK[index], self.watch)

    def padded(self, tokens: int) -> Routing:
        """Return the routing with padding appended, for `tokens` tokens in all."""
        if self.replayed_TLK is None:
            return self
        missing = tokens - len(self.replayed_TLK)
        replayed_TLK = F.pad(self.replayed_TLK, (0, 0, 0, 0, 0, missing), value=UNKNOWN)
        return Routing(replayed_TLK, self.watch)
