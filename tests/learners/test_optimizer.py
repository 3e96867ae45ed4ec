import copy

import pytest
import torch
from torch import nn

from ratchet.config.schema import OptimizerConfig
from ratchet.errors import CheckpointError
from ratchet.learners.optimizer import AdamW

CONFIG = OptimizerConfig(lr=1.0, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.1)


def parameters():
    generator = torch.Generator().manual_seed(0)
    shapes = {"matrix": (3, 4), "vector": (4,), "late": (2, 2)}
    return [(name, nn.Parameter(torch.randn(shape, generator=generator))) for name, shape in shapes.items()]


def give_gradients(named, step):
    """The last parameter gets none in the first steps."""
    for i, (name, p) in enumerate(named):
        p.grad = None if name == "late" and step < 2 else torch.sin(p.detach() * (i + 1) + step)


def test_it_takes_the_steps_of_torchs_own_bit_for_bit():
    ours, theirs = parameters(), parameters()
    groups = [
        {"params": [p for _, p in theirs if p.dim() >= 2], "weight_decay": CONFIG.weight_decay},
        {"params": [p for _, p in theirs if p.dim() < 2], "weight_decay": 0.0},
    ]
    expected = torch.optim.AdamW(groups, betas=CONFIG.betas, eps=CONFIG.eps, fused=True)
    made = AdamW(ours, CONFIG)
    for step in range(6):
        lr = 0.1 / (step + 1)
        for group in expected.param_groups:
            group["lr"] = lr
        give_gradients(ours, step)
        give_gradients(theirs, step)
        made.step(lr)
        expected.step()
        for (name, a), (_, b) in zip(ours, theirs, strict=True):
            assert torch.equal(a, b), f"{name} after step {step}"


def test_it_goes_on_from_its_state_as_if_nothing_had_been():
    whole, resumed = parameters(), parameters()
    first, second = AdamW(whole, CONFIG), AdamW(resumed, CONFIG)
    for step in range(6):
        if step == 3:
            state = copy.deepcopy(first.state)
            for (_, a), (_, b) in zip(whole, resumed, strict=True):
                b.data.copy_(a)
            second.load(state)
            state["matrix"]["exp_avg"].zero_()  # it keeps a copy
        give_gradients(whole, step)
        first.step(0.01)
        if step >= 3:
            give_gradients(resumed, step)
            second.step(0.01)
    assert all(torch.equal(a, b) for (_, a), (_, b) in zip(whole, resumed, strict=True))
    second.zero_grad()
    assert all(p.grad is None for _, p in resumed)


def test_a_parameter_without_a_gradient_has_no_state():
    named = parameters()
    made = AdamW(named, CONFIG)
    give_gradients(named, 0)
    made.step(0.01)
    assert set(made.state) == {"matrix", "vector"}


def test_the_state_of_other_parameters_is_refused():
    with pytest.raises(CheckpointError, match=r"optimizer state of '0'.*older version"):
        AdamW(parameters(), CONFIG).load({0: {}})
