"""The models of `cases.py`, as transformers writes them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from models.convert.cases import BASE, MODELS, MTP
from safetensors.torch import load_file, save_file
from torch import Tensor


def save_reference(model: Any, directory: Path, mtp_layers: int = 0) -> None:
    """With biases of routers, which are buffers, that change what they choose."""
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.copy_(torch.linspace(-0.4, 0.4, len(buffer)).roll(1))
    model.save_pretrained(directory)
    if mtp_layers:
        add_mtp_layers(directory, model.config.num_hidden_layers, mtp_layers)


def add_mtp_layers(directory: Path, first: int, count: int) -> None:
    """Which transformers does not write: random ones of the last layer's shapes, with the names
    that DeepSeek-V3 and GLM-4-MoE are published with."""
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(
        json.dumps({**config, "num_nextn_predict_layers": count})
    )
    weights = load_file(directory / "model.safetensors")
    generator = torch.Generator().manual_seed(7)
    embedding = weights["model.embed_tokens.weight"]
    hidden = embedding.shape[1]
    last = {
        name.removeprefix(f"model.layers.{first - 1}."): tensor
        for name, tensor in weights.items()
        if name.startswith(f"model.layers.{first - 1}.")
    }
    last |= {name: torch.ones(hidden) for name in ("enorm.weight", "hnorm.weight")}
    last |= {"shared_head.norm.weight": torch.ones(hidden), "eh_proj.weight": None}
    for layer in range(first, first + count):
        for name, like in last.items():
            shape = (hidden, 2 * hidden) if like is None else like.shape
            noise = 0.2 * torch.randn(shape, generator=generator)
            weights[f"model.layers.{layer}.{name}"] = noise + (len(shape) == 1)
        weights[f"model.layers.{layer}.embed_tokens.weight"] = embedding.clone()
        weights[f"model.layers.{layer}.shared_head.head.weight"] = weights["lm_head.weight"].clone()
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})


@pytest.fixture(scope="session")
def written(
    reference: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Path]:
    """`written("qwen3")`: the directory of a model of MODELS, as transformers saves it."""
    made: dict[str, Path] = {}

    def write(name: str) -> Path:
        if name not in made:
            family, fields = MODELS[name]
            made[name] = tmp_path_factory.mktemp(name)
            save_reference(reference(family, shape=BASE, **fields), made[name], MTP.get(name, 0))
        return made[name]

    return write


@pytest.fixture(scope="session")
def weights(written: Callable[[str], Path]) -> Callable[[str], dict[str, Tensor]]:
    return lambda name: load_file(written(name) / "model.safetensors")
