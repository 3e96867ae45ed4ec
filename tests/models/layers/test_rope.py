import pytest
import torch

from ratchet.config.model_shape.decoder_config import DecoderConfig
from ratchet.models.layers.rope import RotaryTable, inverse_frequencies

ROPES = {
    "default": {"rope_type": "default", "rope_theta": 10000.0},
    "linear": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "yarn": {
        "rope_type": "yarn",
        "rope_theta": 1e6,
        "factor": 4.0,
        "original_max_position_embeddings": 32768,
    },
    "yarn, all stated": {
        "rope_type": "yarn",
        "rope_theta": 1e6,
        "factor": 4.0,
        "original_max_position_embeddings": 2048,
        "beta_fast": 16.0,
        "beta_slow": 2.0,
        "truncate": False,
        "attention_factor": 1.7,
    },
    "yarn, two scales": {
        "rope_type": "yarn",
        "rope_theta": 1e4,
        "factor": 40.0,
        "original_max_position_embeddings": 4096,
        "mscale": 1.0,
        "mscale_all_dim": 0.7,
    },
}


@pytest.mark.parametrize("name", ROPES)
@pytest.mark.parametrize("head_dim", [32, 128])
def test_equals_transformers(name, head_dim):
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    reference = LlamaRotaryEmbedding(
        LlamaConfig(
            hidden_size=2 * head_dim,
            num_attention_heads=2,
            max_position_embeddings=131072,
            rope_parameters=dict(ROPES[name]),
        )
    )
    frequencies, scale = inverse_frequencies(ROPES[name], head_dim)
    torch.testing.assert_close(frequencies, reference.inv_freq, rtol=2e-7, atol=0)
    assert scale == pytest.approx(reference.attention_scaling)


def test_default_by_hand():
    frequencies, scale = inverse_frequencies({"rope_type": "default", "rope_theta": 100.0}, 4)
    torch.testing.assert_close(frequencies, torch.tensor([1.0, 0.1]))
    assert scale == 1.0


def table(name="default"):
    return RotaryTable(DecoderConfig(8, 16, 1, 1, 1, 32, 8, rope=ROPES[name]))


def test_a_cast_of_the_model_leaves_the_angles_alone():
    positions = torch.tensor([0, 1, 100_000])
    expected = table()(positions, torch.float32)
    for found, exact in zip(
        table().to(torch.bfloat16)(positions, torch.float32), expected, strict=True
    ):
        assert torch.equal(found, exact)


def test_frequencies_survive_the_meta_device():
    with torch.device("meta"):
        made = table()
    assert made.frequencies.is_meta
    assert torch.equal(made.to_empty(device="cpu").frequencies, table().frequencies)


def test_frequencies_are_no_weight():
    assert not table().state_dict()
    assert not list(table().parameters())
