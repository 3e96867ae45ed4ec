"""Products in bfloat16 on a CPU against float64, and when weights are rounded again."""

import asyncio
import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ratchet.config.model_shape.decoder_config import DecoderConfig
from ratchet.data.packing import pack
from ratchet.errors import ConfigError
from ratchet.executors.freeze import use_kernels
from ratchet.generators.config import EngineConfig
from ratchet.generators.engine.engine import EmbeddedEngine
from ratchet.kernels import bfloat16
from ratchet.learners.compute.forward import Forward
from ratchet.learners.config import LocalConfig
from ratchet.learners.local import LocalLearner
from ratchet.models.decoder import Decoder, Linear
from ratchet.models.layers.attention import PackedAttention
from ratchet.models.ops import linear, swiglu
from ratchet.models.policy import DecoderPolicy
from ratchet.testing.builders import make_group, make_trajectory
from ratchet.types import Sampling

UNIT = 2**-8  # largest relative error of rounding to bfloat16


@pytest.fixture
def rounding(bfloat16_products):
    bfloat16.set_enabled(True)


def normal(*shape, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(("tokens", "inputs", "outputs"), [(1, 3, 2), (50, 96, 288), (7, 64, 33)])
def test_products_and_gradients_are_within_their_bound(tokens, inputs, outputs, rounding):
    x, weight = normal(tokens, inputs, seed=0), normal(outputs, inputs, seed=1)
    grad, bias = normal(tokens, outputs, seed=2), normal(outputs, seed=3)
    leaves = [leaf.requires_grad_() for leaf in (x, weight, bias)]
    out = linear(*leaves)
    grads = torch.autograd.grad(out, leaves, grad)
    assert {tensor.dtype for tensor in (out, *grads)} == {torch.float32}
    assert not torch.equal(out, x @ weight.T + bias)  # it did round
    x, weight, bias, grad = (tensor.detach().double() for tensor in (x, weight, bias, grad))
    pairs = [(out - bias, x, weight.T), (grads[0], grad, weight), (grads[1], grad.T, x)]
    for ours, left, right in pairs:
        # both operands and the result are rounded; 1 % for second-order terms and float32's sums
        bound = 1.01 * UNIT * (2 * (left.abs() @ right.abs()) + (left @ right).abs())
        assert ((ours - left @ right).abs() <= bound).all()
    torch.testing.assert_close(grads[2].double(), grad.sum(0), rtol=1e-5, atol=1e-5)


def test_the_gate_between_two_products(rounding, kernels):
    kernels(True)
    gate_up = normal(40, 2 * 37, seed=0).bfloat16().requires_grad_()
    grad = normal(40, 37, seed=1).bfloat16()
    out = swiglu(gate_up)
    (grad_gate_up,) = torch.autograd.grad(out, gate_up, grad)
    exact_input = gate_up.detach().double().requires_grad_()
    gate, up = exact_input.chunk(2, dim=1)
    exact = F.silu(gate) * up
    (exact_grad,) = torch.autograd.grad(exact, exact_input, grad.double())
    for ours, expected in ((out, exact), (grad_gate_up, exact_grad)):
        assert ours.dtype is torch.bfloat16
        # the formula is computed in float32, and only its result is rounded
        torch.testing.assert_close(ours.double(), expected, rtol=1.01 * UNIT, atol=1e-7)


def test_the_gate_keeps_what_is_not_finite(rounding, kernels):
    kernels(True)
    gate = torch.tensor([[math.nan, -math.nan, math.inf, 3.4e38, 1e4]]).bfloat16()
    out = swiglu(torch.cat([gate, torch.ones_like(gate)], dim=1))[0]
    assert out[:2].isnan().all()
    assert out[2:].tolist() == [math.inf, math.inf, gate[0, 4].item()]


@pytest.mark.parametrize("compiled", [False, True], ids=["torch", "compiled"])
def test_a_models_gradient_is_near_that_in_float64(compiled, rounding, kernels):
    kernels(compiled)
    decoder = Decoder(SHAPES["dense"]).init_weights(0)
    tokens = torch.randint(0, 67, (60,), generator=torch.Generator().manual_seed(1))
    gradients = []
    for model in (decoder, copy.deepcopy(decoder).double()):
        hidden = model(tokens[:-1], torch.arange(59), PackedAttention([59]))
        F.cross_entropy(hidden @ model.head_weight.T, tokens[1:]).backward()
        gradients.append({name: p.grad.double() for name, p in model.named_parameters()})
    ours, exact = gradients
    for name, expected in exact.items():
        assert (ours[name] - expected).norm() < 0.03 * expected.norm(), name


def test_weights_are_rounded_again_when_they_change(rounding):
    weight, rounded = nn.Parameter(normal(4, 4, seed=0)), bfloat16.RoundedWeight()
    first = rounded.get(weight)
    assert rounded.get(weight) is first
    with torch.no_grad():
        weight.mul_(2)
    assert torch.equal(rounded.get(weight), weight.bfloat16())
    weight.data.mul_(2)  # PyTorch counts no version here
    bfloat16.forget_weights()
    assert torch.equal(rounded.get(weight), weight.bfloat16())
    other = nn.Parameter(normal(4, 4, seed=1))
    assert torch.equal(copy.deepcopy(rounded).get(other), other.bfloat16())
    assert torch.equal(rounded.get(other), other.bfloat16())


def test_threads_share_rounded_weights_as_they_share_weights():
    forward = Forward(DecoderPolicy(Decoder(SHAPES["dense"]).init_weights(0)), None, chunk_mib=1,
                      autocast=False, shared_vocab=None)  # fmt: skip
    first, second = (
        [module for module in each.model.modules() if isinstance(module, Linear)]
        for each in (forward, forward.copy_with_own_gradients())
    )
    assert len(first) == len(second) > 0
    for ours, theirs in zip(first, second, strict=True):
        rounded = theirs.rounded.get(theirs.weight)
        assert rounded is ours.rounded.get(ours.weight)
        bfloat16.forget_weights()
        ours.weight.data.mul_(2)
        assert torch.equal(theirs.rounded.get(theirs.weight), 2 * rounded)
        theirs.weight.data = 4 * theirs.weight.data  # in memory of its own
        assert torch.equal(theirs.rounded.get(theirs.weight), 8 * rounded)
        assert torch.equal(ours.rounded.get(ours.weight), 2 * rounded)


def test_other_processors_are_refused_by_name(monkeypatch):
    monkeypatch.setattr(bfloat16, "has_bfloat16_instructions", lambda: False)
    with pytest.raises(ConfigError, match=r"has neither AVX512-BF16 nor AMX.*precision=auto"):
        use_kernels(compiled=False, rounds_products=True)
    assert not bfloat16.is_enabled()


SHAPES = {
    "dense": DecoderConfig(67, 64, 3, 4, 2, 32, 200, max_positions=600, init_std=0.1),
    "odd sizes": DecoderConfig(67, 52, 3, 4, 2, 6, 37, max_positions=600, init_std=0.1),
    "experts": DecoderConfig(
        67, 64, 2, 4, 2, 32, 200, max_positions=600, init_std=0.1, family="qwen3_moe",
        n_experts=4, experts_per_token=2, expert_intermediate_size=32,
    ),
}  # fmt: skip


def measure_difference(policy, samples, sampler_rounds, learner_rounds):
    """Return the mean difference of the sampler's and the learner's log-probabilities."""
    bfloat16.set_enabled(sampler_rounds)
    prompts = torch.randint(0, 67, (8, 16), generator=torch.Generator().manual_seed(1)).tolist()
    completions = EmbeddedEngine(EngineConfig(), policy).generate_all(prompts, samples)
    attempts = [
        make_trajectory(prompt, list(completion.tokens), attempt=i)
        for i, (prompt, completion) in enumerate(zip(prompts, completions, strict=True))
    ]
    bfloat16.set_enabled(learner_rounds)
    batch = pack([make_group("g", attempts)])
    learner = LocalLearner(LocalConfig(workers=1), policy)
    logprobs_T = asyncio.run(learner.score(batch, ["logprobs"]))["logprobs"]
    sampled = torch.cat([torch.tensor(list(completion.logprobs)) for completion in completions])
    return (logprobs_T[batch.predicted_T] - sampled).abs().mean().item()


@pytest.mark.parametrize("compiled", [False, True], ids=["torch", "compiled"])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_sampler_and_learner_round_alike(shape, compiled, kernels, rounding):
    kernels(compiled)
    policy = DecoderPolicy(Decoder(shape).init_weights(0))
    samples = [Sampling(max_new_tokens=24, seed=i) for i in range(8)]
    alike = measure_difference(policy, samples, True, True)
    apart = measure_difference(policy, samples, True, False)
    assert alike < 1e-3
    assert alike < apart / 3
