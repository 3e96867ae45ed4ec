"""Routers of Megatron Core's experts that can replay routing decisions.

They compute the same as the built-in decoder and transformers.

T = tokens of this rank, E = experts, k = experts per token.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from ratchet.config.model_shape.megatron_decoder import MegatronDecoderConfig
from ratchet.models.layers.expert_routing import RoutingHook


class ReplayableRouter(TopKRouter):
    """A router that computes the same as `ratchet.models.layers.moe.ExpertRouter`."""

    sparse_index: int = 0  # index among the layers with experts
    route: RoutingHook | None = None  # may replace the chosen experts; set at each forward pass

    def routing(self, logits: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return (weights [T, E], 0 for other experts; mask of the chosen experts [T, E])."""
        logits_TE = logits.view(-1, logits.shape[-1])
        logits_TE = logits_TE.to(torch.promote_types(logits_TE.dtype, torch.float32))
        scores_TE = self._score(logits_TE)
        experts_Tk = self._choose(scores_TE)
        if self.route is not None:
            experts_Tk = self.route(self.sparse_index, logits_TE, experts_Tk)
        weights_Tk = self._scale(scores_TE.gather(1, experts_Tk))
        weights_TE = torch.zeros_like(scores_TE).scatter(1, experts_Tk, weights_Tk)
        chosen_TE = torch.zeros_like(scores_TE, dtype=torch.bool).scatter(1, experts_Tk, True)
        return weights_TE.to(logits.dtype), chosen_TE

    def _score(self, logits_TE: Tensor) -> Tensor:
        return logits_TE.softmax(-1)

    def _choose(self, scores_TE: Tensor) -> Tensor:
        """Return the experts of each token [T, k]."""
        return scores_TE.topk(self.topk).indices

    def _scale(self, scores_Tk: Tensor) -> Tensor:
        """Return the weights of the chosen experts."""
        # They are scaled to sum to 1.
        if self.config.moe_router_pre_softmax is False:
            return scores_Tk / scores_Tk.sum(-1, keepdim=True)
        return scores_Tk


class SigmoidRouter(ReplayableRouter):
    """The router of GLM-4-MoE and DeepSeek-V3, as transformers computes it.

    A sigmoid of each logit weighs an expert. A bias of each expert, which no gradient reaches,
    changes which experts are chosen.
    """

    shape: MegatronDecoderConfig  # set when the model is built
    expert_bias: Tensor

    def __init__(self, config: TransformerConfig, **keys: Any) -> None:
        super().__init__(config=config, **keys)
        # Megatron's own bias would be changed after each step by its own rule.
        del self.expert_bias
        self.register_buffer("expert_bias", torch.zeros(config.num_moe_experts or 0))

    def _score(self, logits_TE: Tensor) -> Tensor:
        return logits_TE.sigmoid()

    def _scale(self, scores_Tk: Tensor) -> Tensor:
        if self.shape.renormalise:
            scores_Tk = scores_Tk / (scores_Tk.sum(-1, keepdim=True) + 1e-20)
        return scores_Tk * self.shape.routed_scale

    def _choose(self, scores_TE: Tensor) -> Tensor:
        """Return the experts [T, k] of the groups whose two best experts have the largest sums."""
        scores_TE = scores_TE.detach() + self.expert_bias
        n_groups, used = self.shape.n_expert_groups, self.shape.groups_per_token
        if used < n_groups:
            scores_TGe = scores_TE.view(len(scores_TE), n_groups, -1)
            groups_Tg = scores_TGe.topk(2, dim=-1).values.sum(-1).topk(used, dim=-1).indices
            is_used_TG = torch.zeros_like(scores_TGe[..., 0], dtype=torch.bool)
            is_used_TG = is_used_TG.scatter(1, groups_Tg, True)
            scores_TE = scores_TGe.masked_fill(~is_used_TG[..., None], float("-inf")).flatten(1)
        return scores_TE.topk(self.topk, dim=-1).indices


class BiasedRouter(ReplayableRouter):
    """The router of GPT-OSS, whose logits have a bias that is trained."""

    def __init__(self, config: TransformerConfig, **keys: Any) -> None:
        super().__init__(config=config, **keys)
        # Megatron has this bias only where all of its linear layers have one.
        self.bias = nn.Parameter(torch.empty_like(self.weight[:, 0]))
        self.bias.sequence_parallel = config.sequence_parallel  # pyright: ignore[reportAttributeAccessIssue]
