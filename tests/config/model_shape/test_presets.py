import pytest

from ratchet.config.model_shape.presets import PRESETS, get_preset
from ratchet.errors import ModelError


def matrices(config):
    """Weights in the layers' matrices."""
    attention = 2 * config.hidden_size * (config.n_heads + config.n_kv_heads) * config.head_dim
    mlp = config.n_experts * config.expert_intermediate_size or config.intermediate_size
    return config.n_layers * (attention + 3 * config.hidden_size * mlp)


@pytest.mark.parametrize(
    ("name", "millions"),
    [
        ("tiny", 0.1),
        ("tiny-moe", 0.18),
        ("small", 0.8),
        ("medium", 9.7),
        ("large", 51.9),
        ("qwen3-0.6b", 440),
        ("qwen3-1.7b", 1409),
    ],
)
def test_sizes(name, millions):
    assert matrices(get_preset(name, 64)) / 1e6 == pytest.approx(millions, rel=0.1)


@pytest.mark.parametrize("name", PRESETS)
def test_shapes_are_tied_qwen3_models_of_the_tokenizer_s_vocabulary(name):
    config = get_preset(name, 71)
    family = "qwen3_moe" if "moe" in name else "qwen3"
    assert (config.vocab_size, config.family, config.qk_norm, config.tied) == (
        71,
        family,
        True,
        True,
    )


def test_the_published_qwen3_sizes():
    found = get_preset("qwen3-0.6b", 151936)
    assert (found.hidden_size, found.n_layers, found.n_heads, found.n_kv_heads, found.head_dim) == (
        1024,
        28,
        16,
        8,
        128,
    )
    assert (found.max_positions, found.rope["rope_theta"]) == (40960, 1e6)


def test_any_field_can_be_overridden():
    config = get_preset("tiny", 64, n_layers=5, tied=False)
    assert (config.n_layers, config.tied, config.hidden_size) == (5, False, 64)


def test_misspelt_names_get_a_hint():
    with pytest.raises(ModelError, match="did you mean 'medium'"):
        get_preset("medum", 64)
    with pytest.raises(ModelError, match="did you mean 'n_layers'"):
        get_preset("tiny", 64, n_layer=3)
