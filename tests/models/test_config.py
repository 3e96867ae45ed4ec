import json

import pytest

from ratchet.errors import ModelError
from ratchet.models.config import FAMILIES, DecoderConfig, unsupported_reason
from ratchet.models.presets import preset

SHAPE = {"vocab_size": 50, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}


def hf(model_type="qwen3", **fields):
    return {"model_type": model_type, "num_key_value_heads": 2, "sliding_window": None, **SHAPE, **fields}


def test_the_older_rope_layout_means_the_same():
    scaling = {"type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    older = hf("llama", rope_theta=5e5, rope_scaling=scaling, max_position_embeddings=8192)
    newer = hf(
        "llama",
        max_position_embeddings=8192,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 5e5,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    )
    assert DecoderConfig.from_hf(older) == DecoderConfig.from_hf(newer)


def test_no_word_on_rope_is_the_default():
    assert DecoderConfig.from_hf(hf(rope_scaling=None)).rope == {"rope_type": "default", "rope_theta": 10000.0}


def test_a_plain_theta_is_read():
    assert DecoderConfig.from_hf(hf(rope_theta=1e6)).rope == {"rope_type": "default", "rope_theta": 1e6}


@pytest.mark.parametrize(
    ("model_type", "fields", "head_dim"),
    [("llama", {}, 8), ("llama", {"head_dim": None}, 8), ("llama", {"head_dim": 16}, 16), ("qwen2", {}, 8), ("qwen3", {}, 128)],
)
def test_head_dim(model_type, fields, head_dim):
    assert DecoderConfig.from_hf(hf(model_type, **fields)).head_dim == head_dim


def test_absent_kv_heads_are_the_family_s():
    config = {key: value for key, value in hf("llama").items() if key != "num_key_value_heads"}
    assert DecoderConfig.from_hf(config).n_kv_heads == 4
    assert DecoderConfig.from_hf(hf("mistral", num_attention_heads=16) | {"num_key_value_heads": None}).n_kv_heads == 16


@pytest.mark.parametrize(
    ("model_type", "fields", "expected"),
    [
        ("llama", {"attention_bias": True, "mlp_bias": True}, (True, True, True, False)),
        ("llama", {}, (False, False, False, False)),
        ("mistral", {"attention_bias": True}, (False, False, False, False)),  # transformers' Mistral has none, whatever it says
        ("qwen2", {}, (True, False, False, False)),
        ("qwen3", {"attention_bias": True}, (True, True, False, True)),
        ("qwen3", {"mlp_bias": True}, (False, False, False, True)),
    ],
)
def test_biases_and_norms(model_type, fields, expected):
    config = DecoderConfig.from_hf(hf(model_type, **fields))
    assert (config.qkv_bias, config.out_bias, config.mlp_bias, config.qk_norm) == expected


@pytest.mark.parametrize(
    ("stated", "generation", "expected"),
    [
        (7, None, (7,)),
        ([7, 8], None, (7, 8)),
        (None, None, ()),
        (7, {"eos_token_id": [9, 7]}, (9, 7)),
        (7, {"eos_token_id": 9}, (9,)),
        (7, {"temperature": 0.6}, (7,)),
    ],
)
def test_ends_of_sequence(stated, generation, expected):
    assert DecoderConfig.from_hf(hf(eos_token_id=stated), generation).eos_ids == expected


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"model_type": "gpt2"}, "model_type 'gpt2'"),
        ({}, "model_type"),
        ({"model_type": "llama"}, "vocab_size"),
        (hf(hidden_act="gelu"), "gelu"),
        (hf(quantization_config={"quant_method": "awq"}), "quantized"),
        (hf(layer_types=["full_attention", "sliding_attention"]), "sliding_attention"),
        (hf("mistral", sliding_window=16, max_position_embeddings=64), "sliding_window=16"),
        ({key: value for key, value in hf("mistral").items() if key != "sliding_window"}, "sliding_window=4096"),
        (hf("qwen2", use_sliding_window=True, sliding_window=16, max_window_layers=1), "layers 1 and up"),
        (hf(rope_scaling={"rope_type": "dynamic", "factor": 2.0}), "'dynamic'"),
        (hf(rope_parameters={"rope_type": "longrope"}), "'longrope'"),
        (hf(rope_scaling={"rope_type": "linear"}), "without factor"),
        (hf(partial_rotary_factor=0.5), "partial_rotary_factor"),
        (hf(rope_parameters={"full_attention": {"rope_type": "default"}}), "between layers"),
    ],
)
def test_what_it_can_t_represent_is_named(config, words):
    assert words in (unsupported_reason(config) or "")
    with pytest.raises(ModelError, match="backend 'transformers'"):
        DecoderConfig.from_hf(config)


@pytest.mark.parametrize(
    "config",
    [
        hf(),
        hf(hidden_act="swish"),
        hf("mistral", sliding_window=64, max_position_embeddings=64),
        hf("qwen2", use_sliding_window=True, sliding_window=16, max_window_layers=2),
        hf("qwen2", use_sliding_window=False, sliding_window=16, max_window_layers=0),
        hf(layer_types=["full_attention"] * 2, use_sliding_window=False),
        hf(partial_rotary_factor=1.0),
        hf(quantization_config=None),
    ],
)
def test_windows_that_never_close_are_no_windows(config):
    assert unsupported_reason(config) is None


CONFIGS = {
    "llama": DecoderConfig(
        50,
        32,
        2,
        4,
        2,
        8,
        48,
        64,
        "llama",
        qk_norm=False,
        qkv_bias=True,
        out_bias=True,
        mlp_bias=True,
        tied=False,
        eos_ids=(3, 4),
    ),
    "mistral": DecoderConfig(50, 32, 2, 4, 2, 8, 48, 64, "mistral", qk_norm=False, bos_id=1, eos_ids=(2,)),
    "qwen2": DecoderConfig(50, 32, 2, 4, 2, 8, 48, 64, "qwen2", qk_norm=False, qkv_bias=True),
    "qwen3": preset("tiny", 50, norm_eps=1e-5, rope={"rope_type": "linear", "rope_theta": 1e5, "factor": 2.0}),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_round_trip(name):
    assert name in FAMILIES
    written = json.loads(json.dumps(CONFIGS[name].to_hf()))
    assert DecoderConfig.from_hf(written) == CONFIGS[name]


def test_a_combination_without_a_model_type_is_refused():
    with pytest.raises(ModelError, match="mlp_bias"):
        preset("tiny", 50, mlp_bias=True).to_hf()
    with pytest.raises(ModelError, match="qk_norm"):
        preset("tiny", 50, qk_norm=False).to_hf()
    with pytest.raises(ModelError, match="family 'gpt2'"):
        preset("tiny", 50, family="gpt2").to_hf()


def test_impossible_shapes_are_refused():
    with pytest.raises(ModelError, match="KV heads"):
        preset("tiny", 50, n_heads=3)
    with pytest.raises(ModelError, match="head_dim=7"):
        preset("tiny", 50, head_dim=7)
    with pytest.raises(ModelError, match="rope"):
        preset("tiny", 50, rope={"rope_type": "yarn", "rope_theta": 1e4})
