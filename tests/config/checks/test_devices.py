"""Recipes for accelerators other than CUDA's: accepted, and what such a device lacks is refused."""

import pytest
import torch

from ratchet.config.loader import load_config
from ratchet.errors import ConfigError
from ratchet.models.accelerator import require_accelerator

RECIPE = """
model: {preset: tiny}
tokenizer: {kind: characters}
environment: {kind: sorting}
algorithm: {kind: grpo}
"""
REFUSED = {
    "learner={kind: dtensor}": "no ranks: learner.kind=dtensor",
    "generator={kind: workers, worker: {kind: engine}}": "no generator of kind workers",
    "generator={kind: vllm}": "no generator of kind vllm",
    "optimizer={kind: adamw8bit}": "no bitsandbytes, which optimizer.kind=adamw8bit needs",
    "precision=bfloat16": "no products in bfloat16. Set precision=auto",
    "lora={rank: 2, base: float8}": "no kernels for lora.base=float8. Remove lora.base",
}


@pytest.fixture
def load(tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text(RECIPE)
    return lambda *overrides: load_config(path, overrides)


@pytest.mark.parametrize("device", ["mps", "xpu", "xpu:1"])
def test_the_device_is_accepted_and_asked_for(device, load):
    assert load(f"device={device}").device == device
    with pytest.raises(ConfigError, match=f"device={device}, but torch finds no"):
        require_accelerator(torch.device(device))


@pytest.mark.parametrize("override", REFUSED)
def test_what_the_device_lacks_is_refused_by_name(override, load):
    with pytest.raises(ConfigError) as refusal:
        load("device=mps", override)
    assert f"device=mps has {REFUSED[override]}" in str(refusal.value)
