"""Reference models built by transformers, small and fully random: its own initialisation leaves
norms at 1 and biases at 0, which would hide a weight in the wrong place.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

SHAPE = {
    "vocab_size": 50,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
}


@pytest.fixture(scope="session")
def reference() -> Callable[..., Any]:
    """`reference("qwen3", tie_word_embeddings=True)`: a transformers model in evaluation mode; None
    removes a default."""
    from transformers import AutoConfig, AutoModelForCausalLM

    def build(
        model_type: str, *, seed: int = 0, shape: dict[str, Any] | None = None, **fields: Any
    ) -> Any:
        config = AutoConfig.for_model(
            model_type, **{**(SHAPE if shape is None else shape), **fields}
        )
        model = AutoModelForCausalLM.from_config(config).eval()
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in model.parameters():
                noise = torch.empty(parameter.shape).normal_(
                    0.0, 0.3 if parameter.dim() == 1 else 0.15, generator=generator
                )
                parameter.add_(noise) if parameter.dim() == 1 else parameter.copy_(noise)
        return model

    return build


@pytest.fixture(scope="session")
def reference_logits() -> Callable[..., torch.Tensor]:
    """Logits [T, V] of each sequence alone, laid end to end."""

    def run(model: Any, tokens_T: torch.Tensor, lengths: list[int]) -> torch.Tensor:
        return torch.cat(
            [
                model(input_ids=row[None], use_cache=False).logits[0]
                for row in tokens_T.split(lengths)
            ]
        )

    return run


@pytest.fixture
def ragged() -> tuple[torch.Tensor, torch.Tensor, list[int]]:
    """(tokens [T], positions [T], lengths), neither sorted nor equal."""
    lengths = [5, 9, 1, 9, 4, 20]
    tokens = torch.randint(0, 50, (sum(lengths),), generator=torch.Generator().manual_seed(1))
    return tokens, torch.cat([torch.arange(length) for length in lengths]), lengths
