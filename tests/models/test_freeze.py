"""Which weights the patterns of `model.freeze` select."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from ratchet.config.model_shape.decoder_config import DecoderConfig
from ratchet.errors import ConfigError
from ratchet.models.load import init_policy
from ratchet.models.policy import check_freeze
from ratchet.models.transformers.policy import TransformersPolicy

SHAPE = DecoderConfig(23, 16, 12, 2, 1, 8, 24)


def frozen_by(*patterns):
    model = init_policy(SHAPE, seed=0)
    model.freeze(patterns)
    check_freeze(model, patterns)
    return model


def test_a_module_is_frozen_with_all_below_it_and_no_other():
    names = frozen_by("model.layers.1").frozen_names()
    assert len(names) == 11
    assert all(name.startswith("model.layers.1.") for name in names)


def test_patterns_match_whole_names_and_add_up():
    assert len(frozen_by("model.layers.*.mlp").frozen_names()) == 3 * 12
    model = frozen_by("*layernorm.weight", "model.norm.weight")
    assert len(model.frozen_names()) == 2 * 12 + 1
    model.freeze(["model.embed_tokens"])
    assert len(model.frozen_names()) == 2 * 12 + 2
    trained = {name for name, _ in model.trained_parameters()}
    assert trained == {name for name, p in model.named_parameters() if p.requires_grad}
    model.requires_grad_(False).requires_grad_(True)
    assert trained == {name for name, p in model.named_parameters() if p.requires_grad}


@pytest.mark.parametrize(
    ("pattern", "why"),
    [
        ("*.q_proj.weight", r"q_proj.weight, but not \S+k_proj.weight and \S+v_proj.weight"),
        ("model.layers.12", r"model.freeze=model.layers.12 selects no weight"),
        ("*", "every weight that would train"),
    ],
)
def test_patterns_that_can_not_be_followed_are_refused(pattern, why):
    with pytest.raises(ConfigError, match=why):
        frozen_by(pattern)


def test_a_model_of_transformers_freezes_single_matrices(tmp_path):
    torch.manual_seed(0)
    shape = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "vocab_size": 23}
    LlamaForCausalLM(
        LlamaConfig(**shape, num_attention_heads=2, num_key_value_heads=1)
    ).save_pretrained(tmp_path)
    model = TransformersPolicy.load(tmp_path)
    model.freeze(["*.q_proj.weight", "model.embed_tokens"])
    assert model.frozen_names() == {
        "model.embed_tokens.weight",
        *(f"model.layers.{layer}.self_attn.q_proj.weight" for layer in range(2)),
    }
    hidden = model.hidden(torch.arange(4), torch.arange(4), [4])
    model.logits(hidden).square().sum().backward()
    with_gradient = {
        name for name, p in model.named_parameters() if p.grad is not None and p.grad.any()
    }
    assert with_gradient == {name for name, _ in model.trained_parameters()}
