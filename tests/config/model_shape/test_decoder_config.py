import json
from dataclasses import replace

import pytest

from ratchet.config.model_shape.decoder_config import FAMILIES, DecoderConfig, unsupported_reason
from ratchet.config.model_shape.presets import get_preset
from ratchet.errors import ModelError

SHAPE = {
    "vocab_size": 50,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
}


def hf(model_type="qwen3", **fields):
    return {
        "model_type": model_type,
        "num_key_value_heads": 2,
        "sliding_window": None,
        **SHAPE,
        **fields,
    }


def sparse(model_type="qwen3_moe", **fields):
    return hf(
        model_type,
        **{"moe_intermediate_size": 24, "num_experts_per_tok": 2, "num_local_experts": 4, **fields},
    )


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
    assert DecoderConfig.from_hf(hf(rope_scaling=None)).rope == {
        "rope_type": "default",
        "rope_theta": 10000.0,
    }


def test_a_plain_theta_is_read():
    assert DecoderConfig.from_hf(hf(rope_theta=1e6)).rope == {
        "rope_type": "default",
        "rope_theta": 1e6,
    }


@pytest.mark.parametrize(
    ("model_type", "fields", "head_dim"),
    [
        ("llama", {}, 8),
        ("llama", {"head_dim": None}, 8),
        ("llama", {"head_dim": 16}, 16),
        ("qwen2", {}, 8),
        ("qwen3", {}, 128),
    ],
)
def test_head_dim(model_type, fields, head_dim):
    assert DecoderConfig.from_hf(hf(model_type, **fields)).head_dim == head_dim


def test_absent_kv_heads_are_the_family_s():
    config = {key: value for key, value in hf("llama").items() if key != "num_key_value_heads"}
    assert DecoderConfig.from_hf(config).n_kv_heads == 4
    assert (
        DecoderConfig.from_hf(
            hf("mistral", num_attention_heads=16) | {"num_key_value_heads": None}
        ).n_kv_heads
        == 16
    )


@pytest.mark.parametrize(
    ("model_type", "fields", "expected"),
    [
        ("llama", {"attention_bias": True, "mlp_bias": True}, (True, True, True, False)),
        ("llama", {}, (False, False, False, False)),
        # transformers' Mistral has none, whatever it says
        ("mistral", {"attention_bias": True}, (False, False, False, False)),
        ("qwen2", {}, (True, False, False, False)),
        ("qwen3", {"attention_bias": True}, (True, True, False, True)),
        ("qwen3", {"mlp_bias": True}, (False, False, False, True)),
    ],
)
def test_biases_and_norms(model_type, fields, expected):
    config = DecoderConfig.from_hf(hf(model_type, **fields))
    assert (config.qkv_bias, config.out_bias, config.mlp_bias, config.qk_norm) == expected


@pytest.mark.parametrize("model_type", ["qwen3_moe", "mixtral"])
def test_both_spellings_of_the_number_of_experts(model_type):
    newer = sparse(model_type, num_local_experts=6)
    older = {key: value for key, value in newer.items() if key != "num_local_experts"} | {
        "num_experts": 6
    }
    assert (
        DecoderConfig.from_hf(older)
        == DecoderConfig.from_hf(newer)
        == DecoderConfig.from_hf(newer | older)
    )
    assert DecoderConfig.from_hf(newer).n_experts == 6


@pytest.mark.parametrize(
    ("fields", "dense"),
    [
        ({}, ()),
        ({"mlp_only_layers": None}, ()),
        ({"mlp_only_layers": [3, 0, 9]}, (0, 3)),
        ({"decoder_sparse_step": 2}, (0, 2, 4)),
        ({"decoder_sparse_step": 3, "mlp_only_layers": [2]}, (0, 1, 2, 3, 4)),
    ],
)
def test_which_layers_are_dense(fields, dense):
    config = DecoderConfig.from_hf(sparse(num_hidden_layers=6, **fields) | {"num_hidden_layers": 6})
    assert config.dense_layers == dense
    assert [layer for layer in range(6) if not config.is_sparse(layer)] == list(dense)
    # it has no such keys
    assert DecoderConfig.from_hf(sparse("mixtral", **fields)).dense_layers == ()


def test_what_families_say_of_experts():
    qwen, mixtral = (
        DecoderConfig.from_hf(sparse(model_type)) for model_type in ("qwen3_moe", "mixtral")
    )
    assert (qwen.expert_intermediate_size, qwen.renormalise, qwen.qk_norm, qwen.head_dim) == (
        24,
        False,
        True,
        8,
    )
    assert (mixtral.expert_intermediate_size, mixtral.renormalise, mixtral.qk_norm) == (
        48,
        True,
        False,
    )
    assert DecoderConfig.from_hf(sparse(norm_topk_prob=True)).renormalise
    assert DecoderConfig.from_hf(sparse("mixtral", norm_topk_prob=False)).renormalise


@pytest.mark.parametrize("model_type", ["qwen3_moe", "mixtral"])
def test_absent_keys_of_experts_are_those_of_transformers(model_type):
    from transformers import AutoConfig

    stated = hf(model_type, **({"moe_intermediate_size": 24} if model_type == "qwen3_moe" else {}))
    theirs = AutoConfig.for_model(**stated).to_dict()
    assert DecoderConfig.from_hf(stated) == DecoderConfig.from_hf(theirs)


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
        (
            {key: value for key, value in hf("mistral").items() if key != "sliding_window"},
            "sliding_window=4096",
        ),
        (
            hf("qwen2", use_sliding_window=True, sliding_window=16, max_window_layers=1),
            "layers 1 and up",
        ),
        (hf(rope_scaling={"rope_type": "dynamic", "factor": 2.0}), "'dynamic'"),
        (hf(rope_parameters={"rope_type": "longrope"}), "'longrope'"),
        (hf(rope_scaling={"rope_type": "linear"}), "without factor"),
        (hf(partial_rotary_factor=0.5), "partial_rotary_factor"),
        (hf(rope_parameters={"full_attention": {"rope_type": "default"}}), "between layers"),
        (sparse(moe_intermediate_size=None), "moe_intermediate_size"),
        (sparse(num_experts=8), "num_experts and num_local_experts disagree"),
        (sparse(num_local_experts=0), "num_experts_per_tok=2 of 0 experts"),
        (sparse(num_experts_per_tok=5), "num_experts_per_tok=5 of 4 experts"),
        (sparse("mixtral", num_experts_per_tok=0), "num_experts_per_tok=0 of 4 experts"),
        (sparse(decoder_sparse_step=0), "decoder_sparse_step=0"),
        (sparse(use_sliding_window=True, sliding_window=16), "layers 0 and up"),
        (sparse("mixtral", sliding_window=16, max_position_embeddings=64), "sliding_window=16"),
        (sparse("qwen2_moe"), "model_type 'qwen2_moe'"),  # its shared experts
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
        sparse(use_sliding_window=False, sliding_window=16),
        sparse("mixtral", sliding_window=64, max_position_embeddings=64),
        {key: value for key, value in sparse("mixtral").items() if key != "sliding_window"},
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
    "mistral": DecoderConfig(
        50, 32, 2, 4, 2, 8, 48, 64, "mistral", qk_norm=False, bos_id=1, eos_ids=(2,)
    ),
    "qwen2": DecoderConfig(50, 32, 2, 4, 2, 8, 48, 64, "qwen2", qk_norm=False, qkv_bias=True),
    "qwen3_moe": get_preset("tiny-moe", 50, n_layers=4, renormalise=False, dense_layers=(0, 2)),
    "mixtral": DecoderConfig(
        50,
        32,
        2,
        4,
        2,
        8,
        48,
        64,
        "mixtral",
        qk_norm=False,
        n_experts=4,
        experts_per_token=3,
        expert_intermediate_size=48,
    ),
    "qwen3": get_preset(
        "tiny", 50, norm_eps=1e-5, rope={"rope_type": "linear", "rope_theta": 1e5, "factor": 2.0}
    ),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_round_trip(name):
    assert name in FAMILIES
    written = json.loads(json.dumps(CONFIGS[name].to_hf()))
    assert DecoderConfig.from_hf(written) == CONFIGS[name]


def test_a_combination_without_a_model_type_is_refused():
    with pytest.raises(ModelError, match="mlp_bias"):
        get_preset("tiny", 50, mlp_bias=True).to_hf()
    with pytest.raises(ModelError, match="qk_norm"):
        get_preset("tiny", 50, qk_norm=False).to_hf()
    with pytest.raises(ModelError, match="family 'gpt2'"):
        get_preset("tiny", 50, family="gpt2").to_hf()
    for field, value in (
        ("renormalise", False),
        ("dense_layers", (0,)),
        ("expert_intermediate_size", 47),
    ):
        with pytest.raises(ModelError, match=f"a 'mixtral' .* can't say {field}="):
            replace(CONFIGS["mixtral"], **{field: value}).to_hf()


def test_impossible_shapes_are_refused():
    with pytest.raises(ModelError, match="KV heads"):
        get_preset("tiny", 50, n_heads=3)
    with pytest.raises(ModelError, match="head_dim=7"):
        get_preset("tiny", 50, head_dim=7)
    with pytest.raises(ModelError, match="rope"):
        get_preset("tiny", 50, rope={"rope_type": "yarn", "rope_theta": 1e4})
    with pytest.raises(
        ModelError, match="n_experts=4 with family 'qwen3': qwen3_moe, mixtral have experts"
    ):
        get_preset("tiny", 50, n_experts=4)
    with pytest.raises(ModelError, match="n_experts=0 with family 'qwen3_moe'"):
        get_preset("tiny-moe", 50, n_experts=0)
    with pytest.raises(ModelError, match="experts_per_token=5"):
        get_preset("tiny-moe", 50, experts_per_token=5)
    with pytest.raises(ModelError, match="expert_intermediate_size=0"):
        get_preset("tiny-moe", 50, expert_intermediate_size=0)
