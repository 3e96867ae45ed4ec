"""Layers for multi-token prediction (MTP): DeepSeek-V3, arXiv:2412.19437, section 2.2.

The layer of depth k predicts token i + k + 1 from a state of depth k - 1 (of the model itself, for
k = 1) and the embedding of token i + k (equations 21 to 23):

    h_k[i] = layer(eh_proj [enorm(Emb(t[i + k])); hnorm(h_{k-1}[i])])

Embedding and language head are those of the model. The layers are Megatron's, with the modules of
Ratchet's other layers. Megatron's own forward would shift the tokens of packed sequences by itself;
here the caller does it.

t = tokens that this rank keeps between layers, U = tokens of the micro-batch, d = hidden size, K =
MTP layers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.multi_token_prediction import (
    MultiTokenPredictionBlockSubmodules,
    MultiTokenPredictionLayer,
    MultiTokenPredictionLayerSubmodules,
)
from megatron.core.transformer.spec_utils import ModuleSpec
from torch import Tensor, nn

from ratchet.config.model_shape.decoder_config import DecoderConfig
from ratchet.config.model_shape.megatron_decoder import MegatronDecoderConfig
from ratchet.models.megatron.layer_modules import MegatronRMSNorm, PackedForwardParams, layer_spec
from ratchet.models.megatron.low_rank import ColumnLinear


def count_built_mtp_layers(shape: DecoderConfig) -> int:
    """Return the number of MTP layers of a decoder."""
    return shape.mtp_layers if isinstance(shape, MegatronDecoderConfig) else 0


def make_mtp_spec(shape: DecoderConfig) -> Any:
    """Return the specification of the MTP layers; None if the decoder has none."""
    count = count_built_mtp_layers(shape)
    if not count:
        return None
    layer = ModuleSpec(
        module=MultiTokenPredictionLayer,
        submodules=MultiTokenPredictionLayerSubmodules(
            enorm=MegatronRMSNorm,
            hnorm=MegatronRMSNorm,
            eh_proj=ColumnLinear,
            transformer_layer=layer_spec(shape, shape.n_layers),
            layer_norm=MegatronRMSNorm,
        ),
    )
    return MultiTokenPredictionBlockSubmodules(layer_specs=[layer] * count)


def set_router_shape(layers: nn.ModuleList, shape: DecoderConfig) -> None:
    """Give the routers of the MTP layers the shape of the decoder, which they read."""
    for layer in layers:
        block: Any = layer.transformer_layer
        if isinstance(block.mlp, MoELayer):
            router: Any = block.mlp.router
            router.shape = shape


def run_mtp_layers(
    layers: nn.ModuleList,
    embed: Callable[..., Tensor],
    x_t1d: Tensor,
    later_tokens_KU: Tensor,
    params: PackedForwardParams,
) -> list[Tensor]:
    """Return the states of each depth, K tensors [t, 1, d].

    Args:
        embed: The embedding of the model.
        x_t1d: The final states of the model, after its last norm.
        later_tokens_KU: Row k - 1 has the token k places after each token.
        params: The inputs of the layers. Nothing is replayed in the MTP layers, whose routes no
            sampler records.
    """
    params = replace(params, route=None)
    states = []
    for layer, tokens_U in zip(layers, later_tokens_KU, strict=True):
        run: Any = layer
        x_t1d = run._proj_and_transformer_layer(
            hidden_states=x_t1d,
            decoder_input=embed(input_ids=tokens_U[None], position_ids=None),
            packed_seq_params=params,
        )
        states.append(x_t1d)
    return states
