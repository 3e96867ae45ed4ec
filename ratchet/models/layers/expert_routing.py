"""Router replay: record, replay and monitor the expert choices of a mixture of experts (MoE).

A sampler records which experts its routers choose. A learner replays that choice (rollout routing
replay, R3, arXiv:2510.11370), and measures how evenly experts are chosen.

Near a tie, a rounding difference sends a token to another expert, which changes its
log-probabilities as much as many optimizer steps do. Replay takes the choice, which has no
gradient, from the sampler. The learner computes the weights of the chosen experts, which have a
gradient.

T = tokens, E = experts, K = experts of a token, L = layers with experts, S = sequences.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from ratchet.config.model_shape.decoder_config import DecoderConfig
from ratchet.errors import DataError
from ratchet.utils.transfer import upload

UNKNOWN = -1  # expert index of tokens for which the sampler recorded no choice


class RoutingHook(Protocol):
    """A function that decides which experts compute each token of a layer.

    Activation checkpointing calls it again in the backward.

    Args:
        sparse_index: Index of the layer among the layers with experts.
        logits_TE: Router logits.
        chosen_TK: The K experts that the router chooses for each token, int64.

    Returns: the experts that compute each token [T, K], int64.
    """

    def __call__(self, sparse_index: int, logits_TE: Tensor, chosen_TK: Tensor, /) -> Tensor: ...


class RouteRecorder:
    """A `RoutingHook` for samplers: it records the routers' choices in `experts_TLK` (int16)."""

    def __init__(self, config: DecoderConfig, tokens: int, device: torch.device) -> None:
        shape = (tokens, len(config.sparse_layers), config.experts_per_token)
        self.experts_TLK = torch.empty(shape, dtype=torch.int16, device=device)

    def __call__(self, sparse_index: int, logits_TE: Tensor, chosen_TK: Tensor) -> Tensor:
        self.experts_TLK[:, sparse_index] = chosen_TK.to(torch.int16)
        return chosen_TK


class LayerRouting(NamedTuple):
    """The routing of one layer in one forward pass."""

    logits_TE: Tensor
    chosen_TK: Tensor  # experts chosen by the router's logits
    used_TK: Tensor  # experts that computed the tokens


class RouterMonitor:
    """A record of the expert choices in one forward pass, from which router metrics are computed.

    Like `Routing` it is not a dataclass: FSDP would pass a copy of a dataclass to each layer, and
    what is recorded in a copy is lost.
    """

    def __init__(self) -> None:
        self.layers: dict[int, LayerRouting] = {}
        # Index of each token's row in the layers' tensors; None: the rows are in token order.
        self.row_index_T: Tensor | None = None

    def measure(self, sequence_T: Tensor, n_sequences: int) -> Tensor:
        """Return five measures per sequence, averaged over the layers [S, 5].

        balance: sum over experts of (load x mean probability), where the load is the expert's share
            of the choices times the number of experts. It is 1 if the load is even, and has a
            gradient.
        z: mean over tokens of logsumexp(logits)^2. It has a gradient.
        entropy: entropy of the router's distribution, in nats per token.
        max_load: load of the busiest expert, 1 if the load is even.
        rerouted: share of the choices that replay changed.
        """
        assert self.layers, "no router was monitored"
        return torch.stack(
            [self._measure_layer(layer, sequence_T, n_sequences) for layer in self.layers.values()]
        ).mean(0)

    def _measure_layer(self, layer: LayerRouting, sequence_T: Tensor, n_sequences: int) -> Tensor:
        """Return the five measures of one layer [S, 5]."""
        logits_TE, chosen_TK, used_TK = (
            layer
            if self.row_index_T is None
            else (x.index_select(0, self.row_index_T) for x in layer)
        )
        # `bincount` would wait for the device.
        ones_T = torch.ones_like(sequence_T)
        count_S = ones_T.new_zeros(n_sequences).scatter_add_(0, sequence_T, ones_T).clamp_(min=1)

        def mean(x: Tensor) -> Tensor:  # [T, ...] -> [S, ...]
            sums = x.new_zeros(n_sequences, *x.shape[1:]).index_add(0, sequence_T, x)
            return sums / count_S.view(-1, *(1,) * (x.dim() - 1))

        n_experts, n_chosen = logits_TE.shape[1], used_TK.shape[1]
        logprobs_TE = logits_TE.log_softmax(-1)
        probabilities_TE = logprobs_TE.exp()
        is_used_TE = torch.zeros_like(probabilities_TE).scatter(1, used_TK, 1.0)
        # The load is 1 for every expert if all experts are used equally.
        load_SE = mean(is_used_TE) * (n_experts / n_chosen)
        is_unchanged_TK = (chosen_TK[:, :, None] == used_TK[:, None]).any(-1).to(logits_TE.dtype)
        balance_S = (load_SE * mean(probabilities_TE)).sum(-1)
        z_S = mean(logits_TE.logsumexp(-1).square())
        entropy_S = mean(-(probabilities_TE * logprobs_TE).sum(-1)).detach()
        return torch.stack(
            [balance_S, z_S, entropy_S, load_SE.amax(-1), mean(1 - is_unchanged_TK.mean(-1))],
            dim=-1,
        )


class Routing:
    """The `RoutingHook` of a learner: it can replay the sampler's choice and be monitored."""

    def __init__(
        self, replayed_TLK: Tensor | None = None, monitor: RouterMonitor | None = None
    ) -> None:
        """Create a routing hook.

        Args:
            replayed_TLK: The experts that the sampler chose. For tokens with `UNKNOWN` this model's
                routers choose. None: they choose for all tokens.
            monitor: Records the routing of every layer; None: nothing is recorded.
        """
        self.replayed_TLK = replayed_TLK
        self.monitor = monitor

    def __call__(self, sparse_index: int, logits_TE: Tensor, chosen_TK: Tensor) -> Tensor:
        used_TK = chosen_TK
        if self.replayed_TLK is not None:
            replayed_TK = self.replayed_TLK[:, sparse_index].to(torch.int64)
            used_TK = torch.where(replayed_TK[:, :1] < 0, chosen_TK, replayed_TK)
        if self.monitor is not None:
            self.monitor.layers.setdefault(
                sparse_index, LayerRouting(logits_TE, chosen_TK, used_TK)
            )
        return used_TK

    def check(self, config: DecoderConfig) -> None:
        """Raise DataError if the replayed choices have the shape of another model."""
        expected = len(config.sparse_layers), config.experts_per_token
        if self.replayed_TLK is not None and self.replayed_TLK.shape[1:] != expected:
            recorded = tuple(self.replayed_TLK.shape[1:])
            raise DataError(
                f"the routes are for {recorded} (layers, experts per token), but the model has "
                f"{expected}: replay routes that this model has sampled"
            )

    def select(self, index: Tensor) -> Routing:
        """Return the routing for a forward pass of these tokens only."""
        return (
            self if self.replayed_TLK is None else Routing(self.replayed_TLK[index], self.monitor)
        )

    def to(self, device: torch.device) -> Routing:
        """Return the routing on the device that computes."""
        if self.monitor is not None and self.monitor.row_index_T is not None:
            self.monitor.row_index_T = upload(self.monitor.row_index_T, device)
        if self.replayed_TLK is None:
            return self
        return Routing(upload(self.replayed_TLK, device), self.monitor)

    def pad(self, tokens: int) -> Routing:
        """Return the routing padded at the end to `tokens` tokens."""
        if self.replayed_TLK is None:
            return self
        padding = tokens - len(self.replayed_TLK)
        replayed_TLK = F.pad(self.replayed_TLK, (0, 0, 0, 0, 0, padding), value=UNKNOWN)
        return Routing(replayed_TLK, self.monitor)
