"""Routing, experts and the way between them, against one expert after the other in float64."""

import pytest
import torch
import torch.nn.functional as F

from ratchet.config.model_shape.presets import get_preset
from ratchet.models.layers.moe import (
    Experts,
    SparseMLP,
    multiply_by_expert,
    multiply_grouped,
    sort_by_expert,
)


def layer(dtype=torch.float64, **overrides):
    made = SparseMLP(
        get_preset("tiny-moe", 50, hidden_size=16, expert_intermediate_size=24, **overrides), 0, 4
    ).to(dtype)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_(torch.empty(parameter.shape).normal_(0.0, 0.3, generator=generator))
    return made


def tokens(count, seed=1, dtype=torch.float64):
    return torch.randn(count, 16, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def plainly(mlp, x_Td):
    """Each token alone, one expert after the other."""
    rows = []
    for x in x_Td:
        shares = (mlp.gate.weight @ x).softmax(0)
        chosen = shares.argsort(descending=True)[: mlp.gate.experts_per_token]
        weights = shares[chosen] / shares[chosen].sum() if mlp.gate.renormalise else shares[chosen]
        out = torch.zeros_like(x)
        for weight, expert in zip(weights, chosen.tolist(), strict=True):
            gate, up = (mlp.experts.gate_up_proj[expert] @ x).chunk(2)
            out = out + weight * (mlp.experts.down_proj[expert] @ (F.silu(gate) * up))
        rows.append(out)
    return torch.stack(rows)


@pytest.mark.parametrize("multiple", [1, 8])
@pytest.mark.parametrize(
    "fields", [{}, {"renormalise": False}, {"experts_per_token": 1, "renormalise": False}]
)
@pytest.mark.parametrize("count", [1, 2, 37])
def test_values_and_gradients_are_those_of_the_plain_sum(count, fields, multiple):
    mlp, x, slopes = layer(**fields), tokens(count).requires_grad_(), tokens(count, seed=2)
    wanted = [x, mlp.gate.weight, mlp.experts.gate_up_proj, mlp.experts.down_proj]
    found, expected = mlp(x, multiple), plainly(mlp, x)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-13)
    ours, theirs = (torch.autograd.grad((y * slopes).sum(), wanted) for y in (found, expected))
    for one, other in zip(ours, theirs, strict=True):
        assert one.abs().max() > 0
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)


def test_no_tokens():
    mlp = layer()
    x = tokens(0).requires_grad_()
    for multiple in (1, 8):
        out = mlp(x, multiple)
        assert out.shape == (0, 16)
        out.sum().backward()
    assert all(p.grad is not None and not p.grad.any() for p in mlp.experts.parameters())


def test_rows_are_arranged_by_expert_by_hand():
    experts = torch.tensor([[2, 0], [2, 3], [0, 2]])
    source, places, counts = sort_by_expert(experts, 4, 1)
    assert (source.tolist(), counts.tolist()) == ([0, 2, 0, 1, 2, 1], [2, 0, 3, 1])
    assert places.tolist() == [[2, 0], [3, 5], [1, 4]]
    source, places, counts = sort_by_expert(experts, 4, 2)
    assert (source.tolist(), counts.tolist()) == ([0, 2, 0, 1, 2, 0, 1, 0], [2, 0, 4, 2])
    assert places.tolist() == [[2, 0], [3, 6], [1, 4]]


def test_the_experts_see_rows_padded_to_the_multiple():
    mlp, seen = layer(), []
    mlp.exchange = lambda compute, x, counts: (
        seen.append((len(x), counts.tolist())) or compute(x, counts)
    )
    mlp(tokens(37), 8)
    ((rows, counts),) = seen
    assert rows == sum(counts)
    assert all(count % 8 == 0 for count in counts)
    assert 74 <= rows < 74 + 4 * 8


def test_experts_in_two_places_are_one_layer():
    """What expert parallelism does: a part of the experts each, and rows sent to where their expert
    is."""
    mlp, x = layer(), tokens(37).requires_grad_()
    parts = [Experts(2, 16, 24).double() for _ in range(2)]
    with torch.no_grad():
        for part, piece in zip(parts, (slice(0, 2), slice(2, 4)), strict=True):
            part.gate_up_proj.copy_(mlp.experts.gate_up_proj[piece])
            part.down_proj.copy_(mlp.experts.down_proj[piece])
    expected = mlp(x)
    expected.sum().backward()
    slope, x.grad = x.grad, None

    def send(compute, x_Nd, counts_E):
        assert compute is mlp.experts
        here = x_Nd.split([int(half.sum()) for half in counts_E.chunk(2)])
        return torch.cat(
            [
                part(rows, counts)
                for part, rows, counts in zip(parts, here, counts_E.chunk(2), strict=True)
            ]
        )

    mlp.exchange = send
    found = mlp(x)
    found.sum().backward()
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(x.grad, slope, rtol=1e-12, atol=1e-13)
    for name in ("gate_up_proj", "down_proj"):
        both = torch.cat([getattr(part, name).grad for part in parts])
        torch.testing.assert_close(both, getattr(mlp.experts, name).grad, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("counts", [[3, 0, 5, 2], [0, 0, 10, 0], [10, 0, 0, 0], [0, 0, 0, 10]])
def test_the_grouped_kernel_is_called_rightly(counts):
    """torch's kernel for CUDA has a CPU form."""
    generator = torch.Generator().manual_seed(0)
    x, weight = (
        torch.randn(10, 16, generator=generator),
        torch.randn(4, 24, 16, generator=generator),
    )
    counts = torch.tensor(counts)
    ends = []
    for product in (multiply_by_expert, multiply_grouped):
        rows, matrices = x.clone().requires_grad_(), weight.clone().requires_grad_()
        out = product(rows, matrices, counts)
        out.square().sum().backward()
        ends.append((out.detach(), rows.grad, matrices.grad))
    for one, other in zip(*ends, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


def test_the_router_is_float32_in_a_bfloat16_model():
    mlp = layer(dtype=torch.bfloat16)
    weights, experts = mlp.gate(tokens(9, dtype=torch.bfloat16))
    assert (weights.dtype, experts.dtype) == (torch.float32, torch.int64)
    torch.testing.assert_close(weights.sum(1), torch.ones(9))
    assert mlp(tokens(9, dtype=torch.bfloat16)).dtype == torch.bfloat16


def test_autocast_changes_products_only():
    mlp, x = layer(dtype=torch.float32), tokens(37, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        found = mlp(x)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, mlp(x), rtol=0.1, atol=0.1)
