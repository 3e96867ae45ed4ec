"""A tiny random model twice: as transformers builds it, and as our decoder with the same
weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from models.fused import file_names

from ratchet.config.model_shape.decoder_config import DecoderConfig
from ratchet.models.decoder import Decoder
from ratchet.models.weights.hf_weights import load_weights

SHAPE: dict[str, Any] = {
    "vocab_size": 67,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "max_position_embeddings": 160,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
EXPERTS: dict[str, Any] = {
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
}


@pytest.fixture(scope="session")
def twins() -> Callable[[str], tuple[Decoder, Any]]:
    """`twins("qwen3")`: (decoder, transformers model). Their matrices are large enough for clearly
    uneven distributions, their norms and biases are random too. Shared by tests: leave the weights
    alone."""
    from transformers import AutoConfig, AutoModelForCausalLM

    @cache
    def build(model_type: str) -> tuple[Decoder, Any]:
        config = AutoConfig.for_model(
            model_type, **SHAPE, **(EXPERTS if model_type in ("mixtral", "qwen3_moe") else {})
        )
        model = AutoModelForCausalLM.from_config(config).eval()
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for parameter in model.parameters():
                noise = torch.empty(parameter.shape).normal_(0.0, 0.2, generator=generator)
                parameter.add_(noise) if parameter.dim() == 1 else parameter.copy_(noise)
        decoder = Decoder(DecoderConfig.from_hf(config.to_dict()))
        load_weights(decoder, file_names(model_type, model.state_dict().items()).items())
        return decoder, model

    return build


@pytest.fixture
def decoder() -> Decoder:
    """Our own to change: Qwen3 shaped, 67 tokens, context 160, uneven distributions."""
    shape = DecoderConfig(67, 64, 2, 4, 2, 32, 96, max_positions=160, init_std=0.2)
    return Decoder(shape).init_weights(0)


@pytest.fixture(params=["dense", "sparse"])
def either(request: pytest.FixtureRequest, decoder: Decoder) -> Decoder:
    """The decoder, and one with experts."""
    if request.param == "dense":
        return decoder
    experts = {
        "family": "qwen3_moe",
        "n_experts": 4,
        "experts_per_token": 2,
        "expert_intermediate_size": 48,
    }
    return Decoder(replace(decoder.config, **experts)).init_weights(0)
