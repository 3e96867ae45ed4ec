"""The models of `cases.py`, as transformers writes them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from models.convert.cases import BASE, MODELS
from safetensors.torch import load_file
from torch import Tensor


def save_reference(model: Any, directory: Path) -> None:
    """With biases of routers, which are buffers, that change what they choose."""
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.copy_(torch.linspace(-0.4, 0.4, len(buffer)).roll(1))
    model.save_pretrained(directory)


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
            save_reference(reference(family, shape=BASE, **fields), made[name])
        return made[name]

    return write


@pytest.fixture(scope="session")
def weights(written: Callable[[str], Path]) -> Callable[[str], dict[str, Tensor]]:
    return lambda name: load_file(written(name) / "model.safetensors")
