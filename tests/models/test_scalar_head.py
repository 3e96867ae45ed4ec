import pytest
import torch

from ratchet.config.model_shape.presets import get_preset
from ratchet.errors import ModelError
from ratchet.models.load import init_policy
from ratchet.models.policy import DecoderPolicy
from ratchet.models.scalar_head import ScalarHead, load_head, save_head
from ratchet.models.weights.hf_weights import load_decoder, save_decoder


def test_starts_at_zero_and_is_linear():
    head = ScalarHead(3)
    hidden = torch.tensor([[1.0, 2.0, 3.0], [0.0, 0.0, 1.0]])
    assert torch.equal(head(hidden), torch.zeros(2))
    with torch.no_grad():
        head.weight.copy_(torch.tensor([[1.0, 10.0, 100.0]]))
    assert head(hidden).tolist() == [321.0, 100.0]


def test_init_is_the_same_for_one_seed():
    one, two = (ScalarHead(64).init_weights(5, std=0.02) for _ in range(2))
    assert torch.equal(one.weight, two.weight)
    assert one.weight.detach().std() == pytest.approx(0.02, rel=0.3)


def test_a_zero_head_learns_before_the_backbone_does():
    head = ScalarHead(4)
    hidden = torch.ones(3, 4, requires_grad=True)
    head(hidden).sum().backward()
    assert torch.equal(head.weight.grad, torch.full((1, 4), 3.0))
    assert not hidden.grad.any()


def test_saved_beside_the_model_and_read_back(tmp_path):
    decoder = init_policy(get_preset("tiny", 50), 0).decoder
    save_decoder(decoder, tmp_path)
    assert load_head(tmp_path, 64) is None
    head = ScalarHead(64).init_weights(0, std=0.1)
    save_head(head, tmp_path)
    found = load_head(tmp_path, 64)
    assert found is not None
    assert torch.equal(found.weight, head.weight)
    load_decoder(tmp_path)  # the head's file is none of the model's
    with pytest.raises(ModelError, match=r"score\.weight"):
        load_head(tmp_path, 32)


def test_a_reward_model_of_transformers(tmp_path, ragged):
    from transformers import Qwen3Config, Qwen3ForSequenceClassification

    config = Qwen3Config(
        vocab_size=50,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        intermediate_size=48,
        num_labels=1,
        pad_token_id=0,
    )
    model = Qwen3ForSequenceClassification(config).eval()
    model.save_pretrained(tmp_path)
    policy, head = DecoderPolicy(load_decoder(tmp_path)), load_head(tmp_path, 32)
    assert head is not None
    tokens, positions, lengths = ragged
    tokens = tokens.clamp(min=1)  # transformers scores the last token that isn't padding
    last = torch.tensor(lengths).cumsum(0) - 1
    with torch.no_grad():
        scores = head(policy.hidden(tokens, positions, lengths))[last]
        expected = torch.cat(
            [model(input_ids=row[None]).logits[:, 0] for row in tokens.split(lengths)]
        )
    assert expected.abs().max() > 1e-3
    torch.testing.assert_close(scores, expected, rtol=1e-5, atol=1e-6)
