import pytest
import torch
import torch.nn.functional as F
from torch.autograd import gradcheck

from ratchet.models.ops import rms_norm, rotate, swiglu

SEED = 0


def normal(*shape, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(SEED), dtype=dtype)


def inputs(*shapes):
    return [(normal(*shape) + i).requires_grad_() for i, shape in enumerate(shapes)]


@pytest.mark.parametrize(("shape", "own"), [((5, 8), 1), ((3, 2, 4), 1), ((3, 2, 4), 2)])
def test_rms_norm_has_the_gradient_of_its_formula(shape, own):
    x, weight = inputs(shape, shape[-own:])
    assert gradcheck(lambda x, weight: rms_norm(x, weight, 1e-3), (x, weight))


def test_heads_may_have_weights_of_their_own():
    x, weights = normal(5, 3, 4), normal(3, 4)
    out = rms_norm(x, weights, 1e-6)
    for head in range(3):
        assert torch.equal(out[:, head], rms_norm(x[:, head], weights[head], 1e-6))


def test_rms_norm_by_hand():
    """mean([9, 16, 0, 0]) = 6.25, whose root is 2.5."""
    out = rms_norm(torch.tensor([[3.0, 4.0, 0.0, 0.0]]), torch.tensor([1.0, 10.0, 1.0, 1.0]), 0.0)
    torch.testing.assert_close(out, torch.tensor([[1.2, 16.0, 0.0, 0.0]]))


def test_rms_norm_of_a_strided_view():
    whole = normal(5, 3, 4).requires_grad_()
    weight = normal(4).requires_grad_()
    grads = [
        torch.autograd.grad(norm(whole[:, :2]).square().sum(), (whole, weight))
        for norm in (
            lambda x: rms_norm(x, weight, 1e-6),
            lambda x: F.rms_norm(x, (4,), weight, 1e-6),
        )
    ]
    for ours, theirs in zip(*grads, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def test_rms_norm_is_the_same_with_and_without_gradient():
    x, weight = normal(6, 8, dtype=torch.float32).requires_grad_(), normal(8, dtype=torch.float32)
    with torch.no_grad():
        alone = rms_norm(x, weight, 1e-6)
    assert torch.equal(rms_norm(x, weight, 1e-6), alone)


def test_rotate_turns_pairs_half_a_head_apart():
    """A quarter turn takes (1, 0) to (0, 1); the second pair stays where it is."""
    cos, sin = torch.tensor([[[0.0, 1.0, 0.0, 1.0]]]), torch.tensor([[[1.0, 0.0]]])
    out = rotate(torch.tensor([[[1.0, 5.0, 0.0, 7.0]]]), cos, sin)
    torch.testing.assert_close(out, torch.tensor([[[0.0, 5.0, 1.0, 7.0]]]))


def test_rotate_has_the_gradient_of_its_formula():
    angles = normal(3, 1, 2)
    tables = torch.cat([angles.cos()] * 2, dim=-1), angles.sin()
    (whole,) = inputs((3, 5, 4))
    assert gradcheck(lambda whole: rotate(whole[:, 1:3], *tables), (whole,))


def test_swiglu_has_the_value_and_gradient_of_its_formula():
    (x,) = inputs((4, 6))
    torch.testing.assert_close(swiglu(x), F.silu(x[:, :3]) * x[:, 3:])
    assert gradcheck(swiglu, (x,))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_keeps_its_dtype_and_is_near_float64(dtype):
    x = normal(7, 2, 8).to(dtype).requires_grad_()
    weight = (normal(8) + 1).requires_grad_()
    angles = normal(7, 1, 4)
    cos, sin = torch.cat([angles.cos()] * 2, dim=-1), angles.sin()
    out = swiglu(
        rotate(rms_norm(x, weight.to(dtype), 1e-6), cos.to(dtype), sin.to(dtype)).flatten(1)
    )
    assert out.dtype == dtype
    exact = x.detach().double().requires_grad_()
    expected = swiglu(rotate(rms_norm(exact, weight.detach(), 1e-6), cos, sin).flatten(1))
    torch.testing.assert_close(out.double(), expected, rtol=0.05, atol=0.05)
    out.sum().backward()
    expected.sum().backward()
    torch.testing.assert_close(x.grad.double(), exact.grad, rtol=0.1, atol=0.1)


def test_float32_scales_apply_to_bfloat16_states():
    """As under autocast: parameters stay float32."""
    x, weight = normal(5, 8).bfloat16().requires_grad_(), (normal(8).float() + 1).requires_grad_()
    out = rms_norm(x, weight, 1e-6)
    out.float().sum().backward()
    assert (out.dtype, x.grad.dtype, weight.grad.dtype) == (
        torch.bfloat16,
        torch.bfloat16,
        torch.float32,
    )


def test_rms_norm_takes_a_gradient_of_any_layout():
    x, weight = inputs((5, 3, 4), (4,))
    upstream = normal(3, 5, 4).transpose(0, 1)
    found = torch.autograd.grad(rms_norm(x, weight, 1e-6), (x, weight), upstream)
    expected = torch.autograd.grad(F.rms_norm(x, (4,), weight, 1e-6), (x, weight), upstream)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
