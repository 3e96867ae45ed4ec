"""Multi-head latent attention (MLA, arXiv:2405.04434, section 2.1) of Megatron Core.

t = tokens that this rank keeps between layers (fewer than T under sequence parallelism), T =
tokens, H = query heads of this rank, d = hidden size, R = rotated dimensions of a head, P = others.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import torch
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    copy_to_tensor_model_parallel_region,
    gather_from_tensor_model_parallel_region,
    scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.multi_latent_attention import (
    MLASelfAttention,
    MLASelfAttentionSubmodules,
)
from megatron.core.transformer.transformer_config import MLATransformerConfig
from torch import Tensor

from ratchet.config.model_shape.megatron_decoder import LatentHeads
from ratchet.models.megatron.low_rank import ColumnLinear

# transformers' norms of latent states have this, whatever config.json says.
LATENT_NORM_EPS = 1e-6


class LatentAttention(MLASelfAttention):
    """DeepSeek's attention with the rotation of `PackedCoreAttention`.

    Megatron's own counts positions from the start of its input, and under tensor parallelism
    without Transformer Engine it does not sum the gradient of the rotated part of keys over ranks,
    each of which uses it for other heads.
    """

    config: MLATransformerConfig
    q_layernorm: Any
    kv_layernorm: Any

    def __init__(
        self,
        config: MLATransformerConfig,
        submodules: MLASelfAttentionSubmodules,
        latent: LatentHeads,
        **keys: Any,
    ) -> None:
        # Megatron takes only its own class for the projections to latent states.
        accepted = replace(
            submodules,
            linear_q_down_proj=ColumnParallelLinear,
            linear_kv_down_proj=ColumnParallelLinear,
        )
        super().__init__(config=config, submodules=accepted, **keys)
        self.latent = latent
        self.linear_kv_down_proj = self._make_down_projection(self.linear_kv_down_proj)
        self.kv_layernorm.eps = LATENT_NORM_EPS
        if latent.q_rank:
            self.linear_q_down_proj = self._make_down_projection(self.linear_q_down_proj)
            self.q_layernorm.eps = LATENT_NORM_EPS

    def _make_down_projection(self, linear: Any) -> ColumnLinear:
        """Return a linear layer of the same sizes that can have an adapter."""
        return ColumnLinear(
            linear.input_size,
            linear.output_size,
            config=self.config,
            init_method=self.config.init_method,
            bias=False,
            gather_output=False,
            tp_group=linear.tp_group,
        )

    def get_query_key_value_tensors(self, hidden_states: Tensor, *_: Any, **__: Any) -> Any:
        """Return queries and keys [T, H, R + P], values [T, H, value_dim], and latent states.

        The rotated dimensions come first.
        """
        latent = self.latent
        q_td = hidden_states[:, 0]
        if latent.q_rank:
            q_td = self._keep_tokens(self._project_down(self.linear_q_down_proj, hidden_states))
            q_td = self.q_layernorm(q_td)
        q_linear = self.linear_q_up_proj if latent.q_rank else self.linear_q_proj
        q, k_v = q_linear(q_td)[0], self._project_down(self.linear_kv_down_proj, hidden_states)
        kv_td, k_rotated_TR = k_v.split([latent.kv_rank, k_v.shape[-1] - latent.kv_rank], dim=-1)
        kv_td = self.kv_layernorm(self._keep_tokens(kv_td))
        kv = self.linear_kv_up_proj(kv_td)[0]
        n_heads = self.num_attention_heads_per_partition
        # Each rank uses the rotated part for its own heads, so the gradient is summed over ranks.
        k_rotated_TR = copy_to_tensor_model_parallel_region(k_rotated_TR, group=self.tp_group)
        k_rotated = self._pair(k_rotated_TR[:, None]).expand(-1, n_heads, -1)
        q_plain, q_rotated = q.view(len(q), n_heads, -1).split(
            [latent.plain_dim, k_rotated.shape[-1]], dim=-1
        )
        k_plain, value = kv.view(len(kv), n_heads, -1).split(
            [latent.plain_dim, latent.value_dim], dim=-1
        )
        query = torch.cat([self._pair(q_rotated), q_plain], dim=-1) * latent.query_scale
        return query, torch.cat([k_rotated, k_plain], dim=-1), value, q_td, kv_td

    def _project_down(self, linear: Any, hidden_states: Tensor) -> Tensor:
        """Return the latent states of all tokens on every rank [T, latent size]."""
        states = gather_from_tensor_model_parallel_region(
            linear(hidden_states)[0], group=self.tp_group
        )
        return cast(Tensor, states)[:, 0]

    def _keep_tokens(self, states_T: Tensor) -> Tensor:
        """Return the latent states of the tokens that this rank keeps."""
        if not self.config.sequence_parallel:
            return states_T
        return cast(Tensor, scatter_to_sequence_parallel_region(states_T, group=self.tp_group))

    def _pair(self, x_THR: Tensor) -> Tensor:
        """Return the dimensions in the order of `rotate`, which pairs the two halves."""
        if not self.latent.is_interleaved:
            return x_THR
        return torch.cat([x_THR[..., 0::2], x_THR[..., 1::2]], dim=-1)
