import pytest
import torch
from models.fused import file_names

from ratchet.config.model_shape.decoder_config import DecoderConfig
from ratchet.config.model_shape.presets import get_preset
from ratchet.models.decoder import Decoder
from ratchet.models.layers.attention import PackedAttention
from ratchet.models.policy import DecoderPolicy
from ratchet.models.weights.hf_weights import canonical_weights, load_weights

LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
}

EXPERTS = {
    "num_experts_per_tok": 2,
    "num_local_experts": 4,
    "moe_intermediate_size": 24,
    "head_dim": 8,
}

VARIANTS = {
    "llama": ("llama", {}),
    "llama, tied": ("llama", {"tie_word_embeddings": True}),
    "llama, biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama, one KV head each": ("llama", {"num_key_value_heads": 4}),
    "llama, wide heads": ("llama", {"head_dim": 16, "num_key_value_heads": 1}),
    "llama, llama3 rope": ("llama", {"rope_parameters": LLAMA3, "tie_word_embeddings": True}),
    "llama, linear rope": ("llama", {"rope_parameters": LINEAR}),
    "llama, large eps": ("llama", {"rms_norm_eps": 0.1}),
    "mistral": ("mistral", {"sliding_window": None}),
    "mistral, wide heads": (
        "mistral",
        {"sliding_window": None, "head_dim": 16, "rope_parameters": YARN},
    ),
    "qwen2": ("qwen2", {}),
    "qwen2, tied, yarn": ("qwen2", {"tie_word_embeddings": True, "rope_parameters": YARN}),
    "qwen3": ("qwen3", {"head_dim": 8}),
    "qwen3, tied": ("qwen3", {"head_dim": 16, "tie_word_embeddings": True}),
    "qwen3, biases, yarn": (
        "qwen3",
        {"head_dim": 8, "attention_bias": True, "rope_parameters": YARN},
    ),
    "qwen3, llama3 rope": ("qwen3", {"head_dim": 8, "rope_parameters": LLAMA3}),
    "qwen3_moe": ("qwen3_moe", EXPERTS),
    "qwen3_moe, one expert a token": (
        "qwen3_moe",
        EXPERTS | {"num_experts_per_tok": 1, "attention_bias": True},
    ),
    "qwen3_moe, renormalised, a dense layer": (
        "qwen3_moe",
        EXPERTS | {"norm_topk_prob": True, "mlp_only_layers": [0]},
    ),
    "qwen3_moe, tied, every other layer": (
        "qwen3_moe",
        EXPERTS | {"decoder_sparse_step": 2, "tie_word_embeddings": True},
    ),
    "mixtral": ("mixtral", {"num_local_experts": 4}),
    "mixtral, wide heads, all experts": (
        "mixtral",
        {"num_local_experts": 3, "num_experts_per_tok": 3, "head_dim": 16},
    ),
}


def ours(model):
    """Our decoder with the weights of a transformers model."""
    decoder = Decoder(DecoderConfig.from_hf(model.config.to_dict()))
    names = {name for name, _ in canonical_weights(decoder)}
    weights = file_names(model.config.model_type, model.state_dict().items())
    load_weights(decoder, ((name, tensor) for name, tensor in weights.items() if name in names))
    return DecoderPolicy(decoder)


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_equal_transformers(variant, reference, reference_logits, ragged):
    model_type, fields = VARIANTS[variant]
    model = reference(model_type, **fields)
    tokens, positions, lengths = ragged
    policy = ours(model)
    with torch.no_grad():
        expected = reference_logits(model, tokens, lengths)
        packed = policy.logits(policy.hidden(tokens, positions, lengths))
        alone = torch.cat(
            [
                policy.logits(policy.hidden(row, torch.arange(len(row)), [len(row)]))
                for row in tokens.split(lengths)
            ]
        )
    assert expected.std() > 0.3
    torch.testing.assert_close(packed, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(alone, expected, rtol=1e-5, atol=1e-5)


LEARNED = ["llama, biases", "mistral", "qwen2, tied, yarn", "qwen3, tied", "qwen3, biases, yarn"]
LEARNED += [
    variant
    for variant, (model_type, _) in VARIANTS.items()
    if model_type in ("qwen3_moe", "mixtral")
]


@pytest.mark.parametrize("variant", LEARNED)
def test_gradients_equal_transformers(variant, reference, reference_logits, ragged):
    model_type, fields = VARIANTS[variant]
    model = reference(model_type, **fields)
    tokens, positions, lengths = ragged
    policy = ours(model)
    rows = torch.arange(len(tokens))
    targets = tokens.roll(-1)
    (
        -policy.logits(policy.hidden(tokens, positions, lengths))
        .log_softmax(-1)[rows, targets]
        .mean()
    ).backward()
    (-reference_logits(model, tokens, lengths).log_softmax(-1)[rows, targets].mean()).backward()
    expected = file_names(
        model_type, ((name, parameter.grad) for name, parameter in model.named_parameters())
    )
    gradients = Decoder(policy.decoder.config)
    with torch.no_grad():
        for holder, parameter in zip(
            gradients.parameters(), policy.decoder.parameters(), strict=True
        ):
            holder.copy_(parameter.grad)
    found = dict(canonical_weights(gradients))
    assert found.keys() == expected.keys()
    for name, gradient in found.items():
        assert gradient.abs().max() > 0 or ".experts." in name, (
            f"{name}: only an expert may have had no token"
        )
        torch.testing.assert_close(
            gradient, expected[name], rtol=1e-4, atol=1e-6, msg=lambda m, name=name: f"{name}: {m}"
        )
        assert (gradient - expected[name]).norm() <= 1e-5 * expected[name].norm(), name


@pytest.mark.parametrize("lengths", [[6, 6, 6], [4, 7, 3], [7, 4, 5]])
def test_a_neighbour_changes_nothing_at_all(lengths):
    policy = DecoderPolicy(Decoder(get_preset("tiny", 50)).init_weights(0))
    tokens = torch.randint(0, 50, (sum(lengths),), generator=torch.Generator().manual_seed(0))
    positions = torch.cat([torch.arange(length) for length in lengths])
    own = slice(lengths[0], lengths[0] + lengths[1])
    other = (tokens + 1) % 50
    other[own] = tokens[own]
    with torch.no_grad():
        before, after = (policy.hidden(row, positions, lengths) for row in (tokens, other))
    assert torch.equal(before[own], after[own])
    assert (before - after).abs().amax(-1).count_nonzero() == sum(lengths) - lengths[1]


@pytest.mark.parametrize("name", ["tiny", "tiny-moe"])
def test_checkpointing_changes_nothing(name, ragged):
    tokens, positions, lengths = ragged
    gradients = []
    for on in (False, True):
        policy = DecoderPolicy(Decoder(get_preset(name, 50)).init_weights(0))
        policy.checkpointing = on
        assert policy.decoder.checkpointing is on
        policy.hidden(tokens, positions, lengths).square().mean().backward()
        gradients.append([parameter.grad for parameter in policy.parameters()])
    for plain, recomputed in zip(*gradients, strict=True):
        assert torch.equal(plain, recomputed)


@pytest.mark.parametrize("name", ["tiny", "tiny-moe"])
def test_init_is_the_same_bits_for_one_seed(name):
    one, two, other = (
        Decoder(get_preset(name, 50)).init_weights(seed).state_dict() for seed in (3, 3, 4)
    )
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert not torch.equal(one["embed_tokens.weight"], other["embed_tokens.weight"])
    assert all(
        tensor.std() == pytest.approx(0.02, rel=0.2) for tensor in one.values() if tensor.dim() >= 2
    )
    assert torch.equal(one["norm.weight"], torch.ones(64))


def test_float64_runs_in_float64(ragged):
    tokens, positions, lengths = ragged
    policy = DecoderPolicy(Decoder(get_preset("tiny", 50)).init_weights(0).double())
    hidden = policy.hidden(tokens, positions, lengths)
    single = DecoderPolicy(Decoder(get_preset("tiny", 50)).init_weights(0)).hidden(
        tokens, positions, lengths
    )
    assert hidden.dtype == torch.float64
    torch.testing.assert_close(hidden.float(), single, rtol=1e-4, atol=1e-5)


def test_attend_sees_the_layers_in_order():
    decoder = Decoder(get_preset("tiny", 50, n_layers=3)).init_weights(0)
    packed, layers = PackedAttention([4]), []

    def attend(layer, q, k, v):
        layers.append(layer)
        assert (q.shape, k.shape, v.shape) == ((4, 2, 32),) * 3
        return packed(layer, q, k, v)

    decoder(torch.arange(4), torch.arange(4), attend)
    assert layers == [0, 1, 2]
