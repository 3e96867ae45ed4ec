import pytest
import torch

from ratchet.config.model_shape.presets import get_preset
from ratchet.models.layers.packed_inputs import sort_by_length
from ratchet.models.load import init_policy, load_policy


@pytest.fixture
def policy():
    return init_policy(get_preset("tiny", 50, eos_ids=(3,)), 0)


def test_what_a_learner_reads(policy):
    assert (policy.vocab_size, policy.hidden_size, policy.max_positions, policy.eos_ids) == (
        50,
        64,
        4096,
        (3,),
    )


def test_reordering_by_length_by_hand():
    order, inverse = sort_by_length([3, 1, 2])  # tokens 0 1 2 | 3 | 4 5
    assert order.tolist() == [3, 4, 5, 0, 1, 2]
    assert inverse.tolist() == [3, 4, 5, 0, 1, 2]


def test_order_of_the_sequences_changes_nothing(policy, ragged):
    tokens, positions, lengths = ragged
    with torch.no_grad():
        packed = policy.hidden(tokens, positions, lengths)
        alone = [
            policy.hidden(row, torch.arange(len(row)), [len(row)]) for row in tokens.split(lengths)
        ]
    torch.testing.assert_close(packed, torch.cat(alone), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_head_is_float32_even_under_autocast(policy, ragged, dtype):
    policy.to(dtype)
    tokens, positions, lengths = ragged
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        hidden = policy.hidden(tokens, positions, lengths)
        logits = policy.logits(hidden)
    assert logits.dtype == torch.float32
    exact = hidden.detach().double() @ policy.decoder.head_weight.detach().double().T
    torch.testing.assert_close(logits.double(), exact, rtol=1e-5, atol=1e-5)


def test_float32_master_weights_train_under_autocast(policy, ragged):
    tokens, positions, lengths = ragged
    with torch.autocast("cpu", torch.bfloat16):
        hidden = policy.hidden(tokens, positions, lengths)
    policy.logits(hidden).logsumexp(-1).mean().backward()
    half = [parameter.grad.clone() for parameter in policy.parameters()]
    policy.zero_grad()
    policy.logits(policy.hidden(tokens, positions, lengths)).logsumexp(-1).mean().backward()
    for name, found, exact in zip(
        dict(policy.named_parameters()), half, (p.grad for p in policy.parameters()), strict=True
    ):
        assert found.dtype == torch.float32
        assert (
            torch.nn.functional.cosine_similarity(found.flatten(), exact.flatten(), dim=0) > 0.99
        ), name


def test_saved_and_loaded(policy, tmp_path, ragged):
    policy.save(tmp_path)
    again = load_policy(tmp_path)
    with torch.no_grad():
        assert torch.equal(again.hidden(*ragged), policy.hidden(*ragged))


def test_lengths_that_do_not_fit_are_our_bug(policy, ragged):
    with pytest.raises(AssertionError, match="tokens in `lengths`"):
        policy.hidden(ragged[0], ragged[1], [3, 4])
