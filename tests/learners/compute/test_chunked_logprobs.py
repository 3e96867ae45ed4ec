"""Log-probabilities by chunks against autograd over whole logits, in float64."""

import pytest
import torch

from ratchet.learners.compute.chunked_logprobs import compute_target_logprobs


def made(seed=0):
    rng = torch.Generator().manual_seed(seed)
    draw = lambda *size: torch.randn(*size, dtype=torch.float64, generator=rng)  # noqa: E731
    return (
        draw(11, 5).requires_grad_(),
        (3 * draw(17, 5)).requires_grad_(),
        torch.randint(17, (11,), generator=rng),
        torch.rand(11, dtype=torch.float64, generator=rng) + 0.5,
        draw(11),
    )


@pytest.mark.parametrize("rows", [1, 4, 11, 100])
def test_values_and_gradients_are_those_of_whole_logits(rows):
    hidden, matrix, targets, temperature, weight = made()
    logprobs, entropies = compute_target_logprobs(
        hidden, matrix, targets, temperature, chunk_rows=rows, with_entropy=True
    )
    all_nV = (hidden @ matrix.T / temperature[:, None]).log_softmax(-1)
    whole = all_nV.gather(1, targets[:, None])[:, 0]
    torch.testing.assert_close(logprobs, whole, rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(entropies, -(all_nV.exp() * all_nV).sum(-1), rtol=1e-12, atol=1e-13)
    own = torch.autograd.grad((logprobs * weight).sum(), (hidden, matrix))
    torch.testing.assert_close(
        own, torch.autograd.grad((whole * weight).sum(), (hidden, matrix)), rtol=1e-12, atol=1e-13
    )


def test_entropy_costs_nothing_where_nobody_asks_and_has_no_gradient():
    hidden, matrix, targets, temperature, _ = made()
    logprobs, entropies = compute_target_logprobs(
        hidden, matrix, targets, temperature, chunk_rows=4, with_entropy=False
    )
    assert logprobs.requires_grad
    assert not entropies.requires_grad
    assert not entropies.any()


def test_a_matrix_that_rests_gets_no_gradient():
    hidden, matrix, targets, temperature, weight = made()
    resting = matrix.detach()
    (
        compute_target_logprobs(
            hidden, resting, targets, temperature, chunk_rows=4, with_entropy=False
        )[0]
        * weight
    ).sum().backward()
    moving, *_ = made()
    (
        compute_target_logprobs(
            moving, matrix, targets, temperature, chunk_rows=4, with_entropy=False
        )[0]
        * weight
    ).sum().backward()
    assert resting.grad is None
    assert torch.equal(hidden.grad, moving.grad)


def test_logits_far_from_zero_stay_finite():
    hidden, matrix = torch.tensor([[1e4], [-1e4]]), torch.tensor([[1.0], [-1.0], [0.0]])
    logprobs, _ = compute_target_logprobs(
        hidden, matrix, torch.tensor([0, 0]), torch.ones(2), chunk_rows=1, with_entropy=False
    )
    assert logprobs.tolist() == [0.0, -2e4]
